from django.apps import AppConfig


class DeadlettersConfig(AppConfig):
    name = "deadletters"
    label = "ops_deadletters"
    default_auto_field = "django.db.models.BigAutoField"
