"""Revealing what a job is called with: asked for with a reason, shown once, and audited before it is shown (B3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from django.http import HttpRequest, HttpResponse

from grants.pages import Confirmation, OperatorAdmin, Section
from opsconsole.core.errors import OpsError
from repairs.admin.words import ReasonForm

P = TypeVar("P")


def reveal(
    admin: OperatorAdmin,
    request: HttpRequest,
    *,
    name: str,
    page: str,
    read: Callable[[str], P],
    show: Callable[[P], HttpResponse],
) -> HttpResponse:
    """Ask for a reason, or ``show`` what ``read`` has found for it; the caller has authorised.

    ``name`` is what the job is called, ``page`` the address of its own page.
    """
    form = ReasonForm(request.POST or None)
    if request.method != "POST" or not form.is_valid():
        section = Section(
            heading="Nothing in it is redacted",
            tone="warn",
            text="It may hold what belongs to people. It is shown once, on the next page, and not kept by it.",
        )
        asked = Confirmation(
            title=f"Reveal the payload of {name}?",
            submit="Reveal it",
            cancel_url=page,
            sections=[section],
            form=form,
        )
        return admin.confirm(request, asked, status=400 if request.method == "POST" else 200)
    try:
        payload = read(form.cleaned_data["reason"])
    except OpsError as refusal:
        if refusal.status in (401, 403, 404):
            raise
        asked = Confirmation(title=f"The payload of {name} can't be shown", submit="", cancel_url=page)
        return admin.confirm(request, asked, refusal=refusal)
    return show(payload)
