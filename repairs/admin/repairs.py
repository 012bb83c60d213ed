"""Repairs in the console: what was done about which job, by whom, and how it ended."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from deadletters.admin import IncidentNumberFilter, letter_name, letter_words
from grants.actions import Action
from grants.pages import (
    Confirmation,
    OperatorAdmin,
    Section,
    allowed,
    operator_of,
    posted_key,
    require,
    require_readable,
)
from incidents.admin import Button, Buttons, TenantFilter, incident_name
from opsconsole.core.admin import ChoiceFilter, again, ago
from opsconsole.core.errors import OpsError
from repairs.admin.words import (
    ACTION_WORDS,
    STATE_TONES,
    STATE_WORDS,
    letter_url,
    record_words,
    renewed_after,
    repair_words,
)
from repairs.errors import RepairNotFound
from repairs.models import LIVE, ActionState, ActionType, ProviderAnswer, RepairAction
from repairs.services import cancel_repair

LINEAGE_STEPS = 20


class RepairStateFilter(ChoiceFilter):
    """By state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the states, and those that wait for an answer together."""
        return [("live", "Awaiting result"), *((state.value, STATE_WORDS[state]) for state in ActionState)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the repairs in that state."""
        chosen = self.value()
        if chosen == "live":
            return queryset.filter(state__in=LIVE)
        return queryset.filter(state=chosen) if chosen else queryset


class RepairActionAdmin(OperatorAdmin):
    """The list of repairs, and a page for each."""

    slug = "repairs"
    menu_label = list_title = "Repairs"
    menu_order = 30
    list_note = "Newest first."
    tells_scope = True
    keyset = ("-id",)
    columns = ("what", "job", "state", "tenant", "by", "planned", "incident")
    list_filter = (RepairStateFilter, TenantFilter, IncidentNumberFilter)
    list_select_related = ("letter", "incident")
    pages = (
        ("page", "<uuid:object_id>/", "page_view"),
        ("cancel", "<uuid:object_id>/withdraw/", "cancel_view"),
    )

    @admin.display(description="Repair")
    def what(self, row: RepairAction) -> str:
        return ACTION_WORDS[ActionType(row.action_type)]

    @admin.display(description="Job")
    def job(self, row: RepairAction) -> str:
        return f"{row.job_type} {letter_name(row.letter)}"

    @admin.display(description="State")
    def state(self, row: RepairAction) -> str:
        return repair_words(row)

    @admin.display(description="Tenant")
    def tenant(self, row: RepairAction) -> str:
        return row.tenant

    @admin.display(description="By")
    def by(self, row: RepairAction) -> str:
        return row.planned_by_name or row.planned_by

    @admin.display(description="When")
    def planned(self, row: RepairAction) -> str:
        return ago(row.planned_at)

    @admin.display(description="Incident")
    def incident(self, row: RepairAction) -> str:
        return incident_name(row.incident)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the visible repairs without the long texts of their jobs."""
        return (
            super()
            .get_queryset(request)
            .defer("letter__payload_preview", "letter__error_text", "error_text", "before", "after")
        )

    def visible(self, request: HttpRequest, repair_id: UUID) -> RepairAction:
        """Return a repair that this operator may see; raises ``Http404``, audited."""
        require_readable(request, Action.INSPECT, RepairAction.objects.scope(repair_id))
        found: RepairAction = RepairAction.objects.select_related("letter__incident", "incident").get(id=repair_id)
        return found

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with one repair and what it was a repair of."""
        action = self.visible(request, object_id)
        buttons = Buttons()
        if action.state in (ActionState.PLANNED, ActionState.SENT):
            may = allowed(request, action.letter.resource, [Action.DEAD_LETTERS_RETRY])
            if Action.DEAD_LETTERS_RETRY in may:
                buttons.bar.append(Button(label="Withdraw…", url=self.url("cancel", action.id)))
            buttons.missing = may.missing({Action.DEAD_LETTERS_RETRY: "Withdraw"})
        context = self.page_context(
            request,
            f"{self.what(action)} of {letter_name(action.letter)}",
            action=action,
            state=repair_words(action),
            tone=STATE_TONES[ActionState(action.state)],
            letter=action.letter,
            letter_name=letter_name(action.letter),
            letter_state=letter_words(action.letter, action.letter.incident),
            letter_url=letter_url(action.letter_id, site=self.admin_site.name),
            incident=action.incident,
            incident_name=incident_name(action.incident),
            answer=ProviderAnswer(action.provider_answer).label if action.provider_answer else "",
            lineage=self.lineage(action),
            record=record_words(action),
            buttons=buttons,
            renew=renewed_after(action.planned_at) if action.state in LIVE else 0,
        )
        return TemplateResponse(request, "ops/repair.html", context)

    def lineage(self, action: RepairAction) -> list[tuple[str, str, RepairAction]]:
        """Return the repairs of the same job, oldest first, with address and state."""
        actions = RepairAction.objects.filter(letter_id=action.letter_id).newest_first()[:LINEAGE_STEPS]
        return [(self.url("page", one.id), repair_words(one), one) for one in actions][::-1]

    def cancel_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Withdraw a repair that has not started."""
        action = self.visible(request, object_id)
        by = operator_of(request)
        require(by, Action.DEAD_LETTERS_RETRY, RepairAction.objects.scope(object_id), RepairNotFound())
        page = self.url("page", object_id)
        name = letter_name(action.letter)
        if request.method != "POST":
            can_be = action.state in (ActionState.PLANNED, ActionState.SENT)
            heading = "It will not start" if can_be else f"It can't be withdrawn any more: {repair_words(action)}"
            text = "Its job waits for a decision again. A message that is on its way is refused by the worker."
            section = Section(heading=heading, tone="warn" if can_be else "grey", text=text if can_be else "")
            asked = Confirmation(
                title=f"Withdraw the retry of {name}?",
                submit="Withdraw it" if can_be else "",
                cancel_url=page,
                sections=[section],
            )
            return self.confirm(request, asked)
        try:
            done = cancel_repair(repair_id=object_id, by=by, key=posted_key(request))
        except OpsError as refusal:
            if refusal.status in (401, 403, 404):
                raise
            asked = Confirmation(title=f"The retry of {name} was not withdrawn", submit="", cancel_url=page)
            return self.confirm(request, asked, refusal=refusal)
        messages.success(request, f"The retry of {name} is withdrawn{again(done.idempotent_replay)}")
        return HttpResponseRedirect(page)
