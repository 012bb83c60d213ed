"""The dead letters app: capture, recording, letters."""

from django.apps import AppConfig


class DeadlettersConfig(AppConfig):
    name = "deadletters"
    label = "ops_deadletters"
    verbose_name = "Failed jobs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks."""
        from deadletters import checks  # noqa: F401 - importing registers them; models must be loaded first
