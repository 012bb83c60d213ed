"""How numbers and times read in the console's templates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from grants.words import may_words
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


@register.simple_tag
def row_cells(cells: Sequence[tuple[words.Column, Any, bool]], url: str) -> str:
    """Return the cells of one row of a list; the first one is its head where the row has a page, at ``url``.

    Put together here, as a list has hundreds of them and an included template for each takes most of the page's time.
    Everything that goes in is escaped by ``_cell`` or here.
    """
    parts = []
    for place, (column, cell, is_plain) in enumerate(cells):
        css = f' class="{escape(column.css)}"' if column.css else ""
        if place == 0 and url:
            inner = f'<a href="{escape(url)}">{escape(str(cell))}</a>' if is_plain else _cell(cell, url)
            parts.append(f'<th scope="row"{css}>{inner}</th>')
        else:
            inner = escape(str(cell)) if is_plain else _cell(cell, "")
            parts.append(f'<td{css} data-label="{escape(column.label)}">{inner}</td>')
    return SafeString("".join(parts))


def _cell(cell: words.Cell, url: str) -> str:
    """Return a cell's parts as HTML; each of them is text, whatever it looks like."""
    first = f"{escape(cell.main)}{ago(cell.at)}"
    href = url or cell.url
    if first:
        first = f'<a href="{escape(href)}">{first}</a>' if href else f'<span class="ops-first">{first}</span>'
    pills = "".join(
        f' <span class="ops-pill ops-{escape(pill.kind)}">{escape(pill.text)}</span>' for pill in cell.pills
    )
    lines = "".join(
        f'<span class="ops-line ops-text-{escape(tone)}">{escape(text)}</span>' for tone, text in cell.lines
    )
    second = f'<span class="ops-second">{escape(cell.second)}</span>' if cell.second else ""
    return f"{first}{pills}{lines}{second}"


@register.filter
def may(action: str) -> str:
    """Return what a permission allows, "" for a name that is none."""
    return may_words(action)


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
