"""Taking and closing several incidents of the list at once: each by its own service call, with a key of its own.

Every key is made of the form's one key and the incident's id, so that a form that is sent twice, or comes back from the
browser's memory, repeats nothing (A9). What an incident looked like when it was selected travels with the confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from grants.actions import Action
from grants.operators import Operator
from grants.pages import Confirmation, Section, held_by, operator_of, posted_ids, posted_key, require
from incidents.admin import (
    CloseForm,
    IncidentAdmin,
    incident_name,
    posted_number,
    seen,
    state_words,
    with_version,
)
from incidents.errors import IncidentNotFound
from incidents.models import Incident, IncidentState
from incidents.services import IncidentMutation, acknowledge_incident, resolve_incident
from opsconsole.core.admin import BulkAction, again, ago, thousands
from opsconsole.core.errors import OpsError

TAKE_SELECTED = BulkAction(value="take_selected", label="Take")
CLOSE_SELECTED = BulkAction(value="close_selected", label="Close without repairing…", is_folded=True, is_danger=True)
MOST_AT_ONCE = 100
UNNAMED = "One of them"
NOT_THERE = "There is no such incident, or you may not see it."


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the selected rows: ``done`` of them, ``replayed`` of those before; why not, by the row's name."""

    done: int = 0
    replayed: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)  # (name, sentence)

    def add(self, *, is_replay: bool) -> None:
        """Count a row that is as it was asked to be."""
        self.done += 1
        self.replayed += is_replay

    def words(self, start: str) -> str:
        """Return ``start``, whether it was a repetition, and every refusal with the rows that it is about."""
        told = f"{start}{again(bool(self.done) and self.replayed == self.done)}" if self.done else ""
        if not self.refused:
            return told
        named: dict[str, list[str]] = {}
        for name, sentence in self.refused:
            named.setdefault(sentence, []).append(name)
        why = " ".join(f"{', '.join(names)}: {sentence}" for sentence, names in named.items())
        return f"{told} {thousands(len(self.refused))} refused. {why}".strip()


def tell(request: HttpRequest, found: Outcome, start: str) -> None:
    """Tell the operator on the next page what became of the selected rows."""
    level = messages.WARNING if found.refused else messages.SUCCESS
    messages.add_message(request, level, found.words(start))


def seen_many(incidents: Iterable[Incident]) -> dict[str, str]:
    """Return what a form carries of several incidents as they were looked at."""
    return {f"{name}-{one.id}": value for one in incidents for name, value in seen(one).items()}


def seen_of(posted: Mapping[str, Any], incident_id: UUID) -> dict[str, str]:
    """Return what a form carries of one of several incidents, as ``with_version`` reads it."""
    return {name: str(posted.get(f"{name}-{incident_id}", "")) for name in ("version", "standing")}


class SelectableIncidentAdmin(IncidentAdmin):
    """The list of incidents with what may be done to the selected ones."""

    bulk_actions: ClassVar[tuple[BulkAction, ...]] = (TAKE_SELECTED, CLOSE_SELECTED)
    bulk_needs: ClassVar[dict[str, tuple[Action, ...]]] = {
        TAKE_SELECTED.value: (Action.INCIDENTS_ACKNOWLEDGE,),
        CLOSE_SELECTED.value: (Action.INCIDENTS_RESOLVE, Action.INCIDENTS_CLOSE_UNREPAIRED),
    }

    def bulk_actions_for(self, request: HttpRequest) -> list[BulkAction]:
        """Offer what somebody may do to anything at all; each incident is asked about when it comes to it."""
        held = held_by(request)
        return [one for one in super().bulk_actions_for(request) if held.issuperset(self.bulk_needs[one.value])]

    def act_on_selected(self, request: HttpRequest) -> HttpResponse:
        """Take the selected incidents at once, or show what closing them would do (ADM-01)."""
        action = request.POST.get("action")
        if action not in self.bulk_needs:
            return super().act_on_selected(request)
        chosen = request.POST.getlist("_selected_action") or request.POST.get("incidents", "").split()
        ids, bad = posted_ids(chosen)
        if not ids or len(ids) > MOST_AT_ONCE:
            text = f"Select at least one incident, and at most {MOST_AT_ONCE}. Nothing was changed."
            messages.error(request, text)
            return HttpResponseRedirect(request.get_full_path())
        if action == TAKE_SELECTED.value:
            return self.take_selected(request, ids, bad=bad)
        return self.close_selected(request, ids, bad=bad)

    # -- take ----------------------------------------------------------------------------------------------------------

    def take_selected(self, request: HttpRequest, ids: Sequence[UUID], *, bad: int) -> HttpResponse:
        """Make the asking operator the holder of each that nobody has; nobody is relieved of one this way."""
        by = operator_of(request)
        key = posted_key(request)

        def take(incident_id: UUID) -> IncidentMutation:
            return acknowledge_incident(incident_id=incident_id, by=by, key=f"{key}:{incident_id}")

        found = _each(ids, take, by=by, takes=True, bad=bad)
        tell(request, found, f"{_incidents(found.done)} taken")
        return HttpResponseRedirect(request.get_full_path())

    # -- close ---------------------------------------------------------------------------------------------------------

    def close_selected(self, request: HttpRequest, ids: Sequence[UUID], *, bad: int) -> HttpResponse:
        """Show what closing the selected incidents would leave undone; once confirmed, close them one by one."""
        by = operator_of(request)
        if request.POST.get("confirmed") != "yes":
            return self.confirm(request, self.asking_to_close(request, ids, by=by))
        form = CloseForm(request.POST)
        if not form.is_valid():
            return self.confirm(request, self.asking_to_close(request, ids, by=by, form=form), status=400)
        key = posted_key(request)

        def close(incident_id: UUID) -> IncidentMutation:
            unrepaired = posted_number(request.POST.get(f"unrepaired-{incident_id}"))
            return with_version(
                seen_of(request.POST, incident_id),
                incident_id,
                lambda version: resolve_incident(
                    incident_id=incident_id, by=by, key=f"{key}:{incident_id}", version=version,
                    unrepaired=unrepaired, **form.cleaned_data,
                ),
            )  # fmt: skip

        found = _each(ids, close, by=by, bad=bad)
        tell(request, found, f"{_incidents(found.done).capitalize()} {'is' if found.done == 1 else 'are'} closed")
        return HttpResponseRedirect(request.get_full_path())

    def asking_to_close(
        self, request: HttpRequest, ids: Sequence[UUID], *, by: Operator, form: CloseForm | None = None
    ) -> Confirmation:
        """Return the confirmation of closing several; what is not theirs to close is audited here already.

        Only what will change travels on, with its number of unrepaired jobs as it was shown. A form that was filled in
        wrongly keeps its key and what was seen when it was opened.
        """
        closable, skipped = self._closable(ids, by)
        jobs = sum(one.unresolved_count for one in closable)
        told = f"{thousands(jobs)} {'job' if jobs == 1 else 'jobs'}"
        hidden = {
            "action": CLOSE_SELECTED.value,
            "confirmed": "yes",
            "incidents": " ".join(str(one.id) for one in closable),
            **seen_many(closable),
            **{f"unrepaired-{one.id}": str(one.unresolved_count) for one in closable},
        }
        key = ""
        if form is not None:
            hidden = {name: str(request.POST.get(name, value)) for name, value in hidden.items()}
            key = str(request.POST.get("idempotency_key", ""))
        return Confirmation(
            title=f"Close {thousands(len(closable))} of {thousands(len(ids))} selected incidents without repairing?",
            submit=f"Close {_incidents(len(closable))}, leave {told} undone" if closable else "",
            cancel_url=request.get_full_path(),
            sections=[*self._closing_sections(closable, told), *self._held_by_others(closable, by), *skipped],
            form=(form if form is not None else CloseForm()) if closable else None,
            hidden=hidden,
            is_danger=True,
            key=key,
        )

    def _closable(self, ids: Sequence[UUID], by: Operator) -> tuple[list[Incident], list[Section]]:
        """Return those of the selected incidents that may be closed, and why the others are skipped."""
        visible = Incident.objects.filter(id__in=ids).visible_to(by, Action.INCIDENTS_RESOLVE)
        undone = set(
            Incident.objects.filter(id__in=ids)
            .visible_to(by, Action.INCIDENTS_CLOSE_UNREPAIRED)
            .values_list("id", flat=True)
        )
        theirs = {one.id: one for one in visible if one.id in undone or not one.unresolved_count}
        for incident_id in ids:
            if incident_id not in theirs:
                _audit_refusal(by, incident_id)
        found = [theirs[one] for one in ids if one in theirs]
        over = [one for one in found if one.is_resolved]
        sections = []
        if over:
            sections.append(
                Section(
                    heading=f"Skipped, because: {_incidents(len(over))} closed already",
                    tone="grey",
                    text="Nothing happens to them.",
                    rows=[self._row(one, state_words(one)) for one in over],
                )
            )
        if missing := len(ids) - len(found):
            heading = f"Skipped, because: {_incidents(missing)} not yours to close, or not there"
            sections.append(Section(heading=heading, tone="bad", text="Nothing happens to them. This was audited."))
        return [one for one in found if not one.is_resolved], sections

    def _closing_sections(self, closable: Sequence[Incident], told: str) -> list[Section]:
        if not closable:
            return [Section(heading="There is nothing to close", tone="grey")]
        return [
            Section(
                heading=f"Will change: {_incidents(len(closable))} with {told} not repaired",
                tone="bad",
                text=(
                    "Their work is not done, and nobody will be reminded. Each job can still be retried from its own"
                    " page. An incident that has more of them by then is left open."
                ),
                rows=[
                    self._row(one, f"{thousands(one.unresolved_count)} not repaired, {one.title}") for one in closable
                ],
            )
        ]

    def _held_by_others(self, closable: Sequence[Incident], by: Operator) -> list[Section]:
        held = [one for one in closable if one.state == IncidentState.ACKNOWLEDGED and one.acknowledged_by != by.ref]
        if not held:
            return []
        return [
            Section(
                heading="Somebody else has some of them",
                tone="warn",
                text="They are not told by this page; talk to them first.",
                rows=[
                    self._row(one, f"{one.acknowledged_by_name} has it, taken {ago(one.acknowledged_at)}")
                    for one in held
                ],
            )
        ]

    def _row(self, incident: Incident, remark: str) -> tuple[str, str, str]:
        return self.url("page", incident.id), incident_name(incident), remark


def _each(
    ids: Sequence[UUID], change: Callable[[UUID], IncidentMutation], *, by: Operator, takes: bool = False, bad: int = 0
) -> Outcome:
    """Make one change to each incident by itself; if it ``takes`` them, one that somebody else has counts as refused.

    What may not be seen is not named in the answer.
    """
    found = Outcome(refused=[(UNNAMED, NOT_THERE)] * bad)
    rows = Incident.objects.filter(id__in=ids).visible_to(by, Action.INSPECT).only("id", "number")
    names = {one.id: incident_name(one) for one in rows}
    for incident_id in ids:
        name = names.get(incident_id, UNNAMED)
        try:
            done = change(incident_id)
        except OpsError as refusal:
            found.refused.append((name, refusal.detail))
            continue
        if takes and done.holder != by.name:
            found.refused.append((name, f"{done.holder} has it already."))
        else:
            found.add(is_replay=done.idempotent_replay)
    return found


def _audit_refusal(by: Operator, incident_id: UUID) -> None:
    """Ask for one incident as its own page would, so that a refusal is audited."""
    scope = Incident.objects.scope(incident_id)
    for action in (Action.INCIDENTS_RESOLVE, Action.INCIDENTS_CLOSE_UNREPAIRED):
        try:
            require(by, action, scope, IncidentNotFound())
        except OpsError:
            return


def _incidents(count: int) -> str:
    return f"{thousands(count)} incident{'' if count == 1 else 's'}"
