from django.apps import AppConfig


class RepairsConfig(AppConfig):
    name = "repairs"
    label = "ops_repairs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Let the ledger tell when a job that was put back has succeeded."""
        from repairs import records  # noqa: F401 - importing registers it; models must be loaded first
