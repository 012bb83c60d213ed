from django.apps import AppConfig


class IncidentsConfig(AppConfig):
    name = "incidents"
    label = "ops_incidents"
    default_auto_field = "django.db.models.BigAutoField"
