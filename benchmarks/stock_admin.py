"""Django's own admin on the console's tables, as a project without the console would list them; as many rows a page."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.urls import path

from deadletters.models import DeadLetter
from incidents.models import Incident
from opsconsole.urls import urlpatterns as console

ModelAdmin: Any = admin.ModelAdmin


class StockLetters(ModelAdmin):
    """Failed jobs: the columns and filters of the console's list, everything else as Django has it."""

    list_per_page = 50
    list_display = ("task_id", "job_type", "queue", "state", "outcome_class", "error_class", "attempts", "last_seen_at")
    list_filter = ("state", "outcome_class", "queue")
    list_select_related = ("incident",)
    search_fields = ("task_id", "error_text", "error_class")
    ordering = ("-last_seen_at",)


class StockIncidents(ModelAdmin):
    """Incidents, likewise."""

    list_per_page = 50
    list_display = ("number", "severity", "state", "title", "tenant", "unresolved_count", "last_seen_at")
    list_filter = ("state", "severity", "tenant")
    search_fields = ("title", "job_type")
    ordering = ("-severity", "-last_seen_at")


site = admin.AdminSite("stock")
site.register(DeadLetter, StockLetters)
site.register(Incident, StockIncidents)
urlpatterns = [path("stock/", site.urls), *console]
