"""Deciding about several failed jobs of the list at once: discard them, or state that they have happened.

Each job is one call of the service that decides about one, with a key made of the form's one key and the job's id: a
form that is sent twice, or comes back from the browser's memory, repeats nothing (A9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from deadletters.admin import letter_name
from deadletters.models import DECIDABLE, DeadLetter
from grants.actions import Action
from grants.operators import Operator
from grants.pages import Confirmation, Section, operator_of, posted_ids, posted_key
from incidents.admin import incident_name, with_version
from incidents.selected import MOST_AT_ONCE, UNNAMED, Outcome, seen_many, seen_of, tell
from opsconsole.core.admin import BulkAction, thousands
from opsconsole.core.errors import OpsError
from repairs.admin.decisions import DISCARD, DONE, Decision
from repairs.admin.letters import RETRY_SELECTED, RepairableLetterAdmin
from repairs.admin.words import LISTED, ReasonForm, in_words, letter_url
from repairs.errors import LetterNotFound
from repairs.services import LetterMutation

DONE_SELECTED = BulkAction(value="done_selected", label="They already happened, close as done…", is_folded=True)
DISCARD_SELECTED = BulkAction(value="discard_selected", label="Discard…", is_folded=True, is_danger=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The selected jobs: what will change, and why the others are skipped."""

    letters: Sequence[DeadLetter]
    skipped: Sequence[Section]


class SelectableLetterAdmin(RepairableLetterAdmin):
    """The list of failed jobs as the console registers it."""

    bulk_actions: ClassVar[tuple[BulkAction, ...]] = (RETRY_SELECTED, DONE_SELECTED, DISCARD_SELECTED)
    bulk_needs: ClassVar[dict[str, Action]] = {
        **RepairableLetterAdmin.bulk_needs,
        DONE_SELECTED.value: DONE.action,
        DISCARD_SELECTED.value: DISCARD.action,
    }
    decisions: ClassVar[dict[str, Decision]] = {DONE_SELECTED.value: DONE, DISCARD_SELECTED.value: DISCARD}

    def act_on_selected(self, request: HttpRequest) -> HttpResponse:
        """Show what a decision about the selected jobs would do; once confirmed, take it for each (ADM-01)."""
        name = request.POST.get("action", "")
        decision = self.decisions.get(name)
        if decision is None:
            return super().act_on_selected(request)
        ids, bad = posted_ids(request.POST.getlist("_selected_action") or request.POST.get("letters", "").split())
        if not ids or len(ids) > MOST_AT_ONCE:
            messages.error(request, f"Select at least one job, and at most {MOST_AT_ONCE}. Nothing was changed.")
            return HttpResponseRedirect(request.get_full_path())
        if request.POST.get("confirmed") != "yes":
            return self.confirm(request, self.asking_about(request, name, decision, ids))
        form = decision.form(request.POST)
        if not form.is_valid():
            return self.confirm(request, self.asking_about(request, name, decision, ids, form=form), status=400)
        found = self.decide_each(request, decision, ids, form, key=posted_key(request))
        found.refused += [(UNNAMED, LetterNotFound().detail)] * bad
        tell(request, found, f"{_jobs(found.done).capitalize()} {'is' if found.done == 1 else 'are'} {decision.done}")
        return HttpResponseRedirect(request.get_full_path())

    def decide_each(
        self, request: HttpRequest, decision: Decision, ids: Sequence[UUID], form: ReasonForm, *, key: str
    ) -> Outcome:
        """Take a decision about each job by itself; the name of a job that may not be seen is not told."""
        by = operator_of(request)
        seen = DeadLetter.objects.filter(id__in=ids).visible_to(by, Action.INSPECT)
        letters = {one.id: one for one in seen.only("id", "job_id", "task_id", "incident_id")}
        found = Outcome()
        for letter_id in ids:
            letter = letters.get(letter_id)
            name = UNNAMED if letter is None else letter_name(letter)
            incident_id = letter_id if letter is None else letter.incident_id
            decide = partial(
                decision.service, letter_id=letter_id, by=by, key=f"{key}:{letter_id}", **form.cleaned_data
            )
            try:
                done = with_version(seen_of(request.POST, incident_id), incident_id, _at_version(decide))
            except OpsError as refusal:
                found.refused.append((name, in_words(refusal).detail))
            else:
                found.add(is_replay=done.idempotent_replay)
        return found

    def asking_about(
        self,
        request: HttpRequest,
        name: str,
        decision: Decision,
        ids: Sequence[UUID],
        *,
        form: ReasonForm | None = None,
    ) -> Confirmation:
        """Return the confirmation of a decision about several jobs; what is not theirs is audited here already.

        Only what will change travels on. A form that was filled in wrongly keeps its key and what was seen.
        """
        by = operator_of(request)
        chosen = self._chosen(decision, ids, by=by)
        incidents = {one.incident_id: one.incident for one in chosen.letters}
        hidden = {
            "action": name,
            "confirmed": "yes",
            "letters": " ".join(str(one.id) for one in chosen.letters),
            **seen_many(incidents.values()),
        }
        key = ""
        if form is not None:
            hidden = {field: str(request.POST.get(field, value)) for field, value in hidden.items()}
            key = str(request.POST.get("idempotency_key", ""))
        count = len(chosen.letters)
        sections = [*self._deciding_sections(decision, chosen.letters)]
        if chosen.letters:
            sections += self.held_by_others(list(incidents.values()), by)
        return Confirmation(
            title=decision.title.format(f"{thousands(count)} of {thousands(len(ids))} selected jobs"),
            submit=decision.submit_many.format(thousands(count)) if count else "",
            cancel_url=request.get_full_path(),
            sections=[*sections, *chosen.skipped],
            form=(form if form is not None else decision.form()) if count else None,
            hidden=hidden,
            is_danger=decision.is_danger,
            key=key,
        )

    def _chosen(self, decision: Decision, ids: Sequence[UUID], *, by: Operator) -> _Chosen:
        letters = {
            one.id: one
            for one in DeadLetter.objects.filter(id__in=ids)
            .visible_to(by, decision.action)
            .select_related("incident")
            .defer("payload_preview", "error_text")
        }
        missing = sum(not self.may_decide(by, decision.action, one) for one in ids if one not in letters)
        found = [letters[one] for one in ids if one in letters]
        settled = [one for one in found if one.state not in DECIDABLE]
        skipped = []
        if settled:
            skipped.append(
                Section(
                    heading=f"Skipped, because: {_jobs(len(settled))} not waiting for a decision any more",
                    tone="grey",
                    text="Nothing happens to them.",
                    rows=[self._row(one, str(self.state(one))) for one in settled[:LISTED]],
                    more=max(len(settled) - LISTED, 0),
                )
            )
        if missing:
            heading = f"Skipped, because: {_jobs(missing)} not yours to decide about, or not there"
            skipped.append(Section(heading=heading, tone="bad", text="Nothing happens to them. This was audited."))
        return _Chosen(letters=[one for one in found if one.state in DECIDABLE], skipped=skipped)

    def _deciding_sections(self, decision: Decision, letters: Sequence[DeadLetter]) -> list[Section]:
        if not letters:
            return [Section(heading="There is nothing to decide", tone="grey")]
        return [
            Section(
                heading=f"Will change: {_jobs(len(letters))}. {decision.warning.heading}",
                tone=decision.warning.tone,
                text=decision.warning.text,
                rows=[self._row(one, f"{one.job_type}, {incident_name(one.incident)}") for one in letters[:LISTED]],
                more=max(len(letters) - LISTED, 0),
            )
        ]

    def _row(self, letter: DeadLetter, remark: str) -> tuple[str, str, str]:
        return letter_url(letter.id, site=self.admin_site.name), letter_name(letter), remark


def _at_version(decide: Callable[..., LetterMutation]) -> Callable[[int], LetterMutation]:
    return lambda version: decide(version=version)


def _jobs(count: int) -> str:
    return f"{thousands(count)} job{'' if count == 1 else 's'}"
