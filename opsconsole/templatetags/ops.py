"""How numbers and times read in the console's templates."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django import template
from django.utils.html import format_html

from incidents import admin as names
from incidents.models import Incident
from opsconsole.core import admin as words

register = template.Library()

register.filter("thousands", words.thousands)
register.filter("cut", words.cut)


@register.filter
def when(moment: datetime | None) -> str:
    """Return a time in UTC, readable by machines too."""
    if moment is None:
        return ""
    return format_html('<time datetime="{}">{}</time>', moment.isoformat(), words.when(moment))


@register.filter
def ago(moment: datetime | None) -> str:
    """Return how long ago that was, with the time itself for who wants it."""
    if moment is None:
        return ""
    return format_html(
        '<time datetime="{}" title="{} UTC">{}</time>', moment.isoformat(), words.when(moment), words.ago(moment)
    )


@register.filter
def field_id(field: Any) -> str:
    """Return the id of a form field's input, for its label and its hint."""
    return str(field.id_for_label or field.auto_id)


@register.filter
def utc(moment: datetime, form: str) -> str:
    """Return a time in UTC, whatever the project's time zone, in a form such as ``%H:%M``."""
    return format(moment.astimezone(UTC), form)


@register.filter
def incident_name(incident: Incident) -> str:
    """Return what people call an incident on the phone."""
    return names.incident_name(incident)
