from django.apps import AppConfig


class RepairsConfig(AppConfig):
    name = "repairs"
    label = "ops_repairs"
    default_auto_field = "django.db.models.BigAutoField"
