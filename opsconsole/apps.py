"""The composition root as a Django app: it brings the commands, the templates and the checks."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.contrib.admin.exceptions import NotRegistered


class OpsConsoleConfig(AppConfig):
    name = "opsconsole"
    label = "ops_console"
    verbose_name = "Operations console"


class QuietKnoxConfig(AppConfig):
    """knox, which we build on, without the page that it adds to the project's own admin.

    A project that uses knox itself lists ``knox`` in its place.
    """

    default = False
    name = "knox"
    verbose_name = "API tokens"

    def ready(self) -> None:
        """Take the page off again; the project's admin has looked for pages by now if it is listed before."""
        if apps.is_installed("django.contrib.admin"):
            from django.contrib import admin

            try:
                admin.site.unregister(self.get_model("AuthToken"))
            except NotRegistered:
                return
