"""The composition root as a Django app: it brings the commands, the templates and the checks."""

from django.apps import AppConfig


class OpsConsoleConfig(AppConfig):
    name = "opsconsole"
    label = "ops_console"
    verbose_name = "Operations console"
