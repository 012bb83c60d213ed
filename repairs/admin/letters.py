"""The half of a failed job's page that is about repairing it, and retrying several at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin, messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from deadletters.admin import DeadLetterAdmin, letter_name
from deadletters.models import DECIDABLE, DeadLetter, LetterState
from grants.actions import Action
from grants.operators import Operator
from grants.pages import (
    MOST_SELECTED,
    Allowed,
    Confirmation,
    Section,
    allowed,
    held_by,
    operator_of,
    posted_ids,
    posted_key,
    require,
    seen_by,
)
from incidents.admin import Button, Buttons, incident_name, seen, state_words, with_version
from incidents.models import Incident
from opsconsole.core.admin import BulkAction, Cell, Pill, again, thousands, when
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.ids import new_id
from opsconsole.jobs.tokens import job_id_of
from repairs.admin.decisions import DISCARD, DONE, Decision
from repairs.admin.incidents import carry_out, must_ask, refused_words, retry_form, reveal_of, served_for
from repairs.admin.payloads import reveal
from repairs.admin.words import (
    LISTED,
    TALK_FIRST,
    automatic_retries,
    held_by_another,
    in_words,
    is_held_by_another,
    readable_json,
    renewed_after,
    repair_rows,
    repair_runs,
    sections_for,
)
from repairs.errors import LetterNotFound, MessageExpired
from repairs.models import RepairAction
from repairs.payloads import Payload, read_payload
from repairs.prospects import FULLY_CHECKED, Checked, Prospect, check_letter, prospect_of
from repairs.reconciliation.retention import message_kept_until
from repairs.refusals import LOADED, Served, load_messages, unload_messages
from repairs.services import retry_letter

RETRY_SELECTED = BulkAction(value="retry_selected", label="Retry selected…")
REPAIRS_SHOWN = 50
VERBS = {Action.DEAD_LETTERS_RETRY: "Retry", Action.DEAD_LETTERS_DISCARD: "Discard"}


class RepairableLetterAdmin(DeadLetterAdmin):
    """The failed job as the console registers it."""

    bulk_actions: ClassVar[tuple[BulkAction, ...]] = (RETRY_SELECTED,)
    bulk_needs: ClassVar[dict[str, Action]] = {RETRY_SELECTED.value: Action.DEAD_LETTERS_RETRY}
    pages = (
        *DeadLetterAdmin.pages,
        ("retry", "<uuid:object_id>/retry/", "retry_view"),
        ("done", "<uuid:object_id>/done/", "done_view"),
        ("discard", "<uuid:object_id>/discard/", "discard_view"),
        ("payload", "<uuid:object_id>/payload/", "payload_view"),
    )

    # -- list ----------------------------------------------------------------------------------------------------------

    def list_context(self, request: HttpRequest, cl: Any) -> dict[str, Any]:
        """Look at what is listed as a retry would, so that no list calls safe what its own page says can't be sent."""
        waiting = [one for one in cl.result_list if not one.is_closed(one.incident) and one.state in DECIDABLE]
        served = {source: Served.lately(source) for source in {one.source for one in waiting}}
        for start in range(0, len(waiting), LOADED):
            few = waiting[start : start + LOADED]
            load_messages(few)
            for one in few:
                one.checked = check_letter(one, one.incident, served=served[one.source], now=served[one.source].at)
            unload_messages(few)
        return super().list_context(request, cl)

    @admin.display(description="If run again")
    def outcome(self, row: DeadLetter) -> Cell | str:
        checked: Checked | None = getattr(row, "checked", None)
        if checked is None:
            return ""
        if checked.prospect is Prospect.BLOCKED:
            return Cell(pills=[Pill(text="Can't be retried", kind="grey")], second=checked.remark)
        return super().outcome(row)

    # -- page ----------------------------------------------------------------------------------------------------------

    def letter_context(
        self, request: HttpRequest, letter: DeadLetter, runs: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Add its repairs, oldest first: what was sent instead of what."""
        by, site = operator_of(request), self.admin_site.name
        actions = list(
            RepairAction.objects.filter(letter=letter)
            .visible_to(by, Action.INSPECT, plan=seen_by(request, Action.INSPECT))
            .newest_first()[: REPAIRS_SHOWN + 1]
        )
        for action in actions:
            action.letter = letter
        sent = repair_runs([one.new_task_id for one in actions], are_all=len(actions) <= REPAIRS_SHOWN)
        context = super().letter_context(request, letter, {**sent, **(runs or {})})
        rows = repair_rows(actions[:REPAIRS_SHOWN], site=site, runs=sent)[::-1]
        checked = None
        if letter.state in DECIDABLE:
            served = Served.lately(letter.source)
            checked = check_letter(letter, letter.incident, served=served, now=served.at)
        is_awaited = letter.state == LetterState.RETRYING
        may = allowed(request, letter.resource, (*VERBS, Action.PAYLOADS_READ, Action.DEAD_LETTERS_HOLD))
        until = message_kept_until(letter, letter.incident)
        kept = [("Message kept until", when(until))] if until is not None and letter.message_state == "full" else []
        of_ledger = job_id_of(letter.task_id)
        ledger_url = reverse("admin:ops_jobs_job_page", args=[of_ledger], current_app=site) if of_ledger else ""
        return {
            **context,
            "ledger_url": ledger_url,
            "hold_url": reverse("admin:ops_deadletters_hold_page", args=[letter.hold_id], current_app=site)
            if letter.hold_id is not None
            else "",
            "facts": [*context["facts"], *kept],
            "buttons": self.buttons_for(letter, checked, may, by),
            "hidden": seen(letter.incident),
            "key": str(new_id()),
            "repairs": rows,
            "checked": checked,
            "cannot_be_retried": checked is not None and checked.prospect is Prospect.BLOCKED,
            "renew": renewed_after(rows[-1].action.planned_at if rows else None) if is_awaited else 0,
            "reveal": reveal_of(letter, may, site=site),
        }

    def buttons_for(self, letter: DeadLetter, checked: Checked | None, may: Allowed, by: Operator) -> Buttons:
        """Return what this operator may do about it, and one line for each thing they may not.

        A job that is safe to run again and asks nothing runs again at once, as from the page of its incident. One that
        can't be retried has no button for it, unless all that stands against it is a time that may be overridden.
        """
        found = Buttons()
        if checked is None:
            return found
        at_once = (
            checked.prospect is Prospect.SAFE
            and not letter.chord_id
            and not letter.is_closed(letter.incident)
            and not is_held_by_another(letter.incident, by)
        )
        if Action.DEAD_LETTERS_RETRY in may:
            label = "Retry it" if at_once else "Retry…"
            url = self.url("retry", letter.id)
            is_blocked = checked.prospect is Prospect.BLOCKED
            if not is_blocked or isinstance(checked.refusal, MessageExpired):
                found.bar.append(Button(label=label, url=url, is_primary=not is_blocked, direct=at_once))
            found.bar.append(Button(label="It already happened…", url=self.url("done", letter.id)))
        if Action.DEAD_LETTERS_HOLD in may:
            place = reverse("admin:ops_deadletters_hold_place", current_app=self.admin_site.name)
            found.more.append(Button(label="Hold jobs like this…", url=f"{place}?{urlencode({'like': letter.id})}"))
        if Action.DEAD_LETTERS_DISCARD in may:
            found.more.append(Button(label="Discard…", url=self.url("discard", letter.id), is_danger=True))
        found.missing = may.missing(VERBS)
        return found

    # -- one -----------------------------------------------------------------------------------------------------------

    def retry_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Run one job again."""
        letter = self.visible(request, object_id)
        by = operator_of(request)
        require(by, Action.DEAD_LETTERS_RETRY, letter.resource, LetterNotFound())
        served = served_for(request, letter.source)
        checked = check_letter(letter, letter.incident, served=served, now=served.at)
        if request.method != "POST" or must_ask(request, checked):
            status = 200 if request.method != "POST" else 400
            return self.confirm(request, self.asking(letter, checked, served, by=by), status=status)
        form = retry_form(checked, request.POST)
        if not form.is_valid():
            key = request.POST.get("idempotency_key", "")
            asked = self.asking(letter, checked, served, by=by, form=form, key=key)
            return self.confirm(request, asked, status=400)
        try:
            messages.success(request, carry_out(request, letter, form.cleaned_data, by=by))
        except OpsError as refusal:
            return self.refuse(request, refusal, letter)
        return HttpResponseRedirect(self.url("page", object_id))

    def asking(
        self,
        letter: DeadLetter,
        checked: Checked,
        served: Served,
        *,
        by: Operator,
        form: Any = None,
        key: str = "",
    ) -> Confirmation:
        """Return the confirmation of running one job again; without a button if it can't be."""
        form = form if form is not None else retry_form(checked)
        can_be_sent = checked.prospect is not Prospect.BLOCKED or "run_expired" in form.fields
        is_asked = "answer" in form.fields
        return Confirmation(
            title=f"Retry {letter_name(letter)}?",
            submit=("Do as answered" if is_asked else "Retry it") if can_be_sent else "",
            cancel_url=self.url("page", letter.id),
            sections=[
                *(held_by_another(letter.incident, by) if can_be_sent else []),
                *sections_for(
                    [checked],
                    queue=f"queue {letter.queue}",
                    site=self.admin_site.name,
                    retries=automatic_retries(letter.job_type, served),
                ),
            ],
            form=form if can_be_sent and form.fields else None,
            hidden=seen(letter.incident),
            note=(
                "Nobody has its incident; a retry makes it yours."
                if can_be_sent and not letter.incident.acknowledged_by
                else ""
            ),
            key=key,
        )

    def done_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """State that a job has happened already."""
        return self.decide(request, object_id, DONE)

    def discard_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Give a job up for good."""
        return self.decide(request, object_id, DISCARD)

    def payload_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Show what a job was called with, once and in full, for a reason that the audit trail keeps (B3)."""
        letter = self.visible(request, object_id)
        by = operator_of(request)
        require(by, Action.PAYLOADS_READ, letter.resource, LetterNotFound())
        name, page = letter_name(letter), self.url("page", letter.id)

        def show(payload: Payload) -> HttpResponse:
            context = self.page_context(
                request,
                f"Payload of {name}",
                letter=letter,
                payload=payload,
                args=readable_json(payload.args_json),
                kwargs=readable_json(payload.kwargs_json),
                back_url=page,
            )
            return TemplateResponse(request, "ops/payload.html", context)

        return reveal(
            self,
            request,
            name=name,
            page=page,
            show=show,
            read=lambda reason: read_payload(letter_id=letter.id, by=by, reason=reason),
        )

    def decide(self, request: HttpRequest, letter_id: UUID, decision: Decision) -> HttpResponse:
        """Show the confirmation of a decision about one job, or take the decision by its service."""
        letter = self.visible(request, letter_id)
        by = operator_of(request)
        require(by, decision.action, letter.resource, LetterNotFound())
        form = decision.form(request.POST or None)
        page = self.url("page", letter.id)
        if request.method != "POST" or not form.is_valid():
            asked = Confirmation(
                title=decision.title.format(letter_name(letter)),
                submit=decision.submit,
                cancel_url=page,
                sections=[*held_by_another(letter.incident, by), decision.warning],
                form=form,
                is_danger=decision.is_danger,
            )
            status = 400 if request.method == "POST" else 200
            return self.confirm(request, self.deciding(letter, asked, request.POST), status=status)
        try:
            key = posted_key(request)
            done = with_version(
                request.POST,
                letter.incident_id,
                lambda version: decision.service(
                    letter_id=letter.id, by=by, key=key, version=version, **form.cleaned_data
                ),
            )
        except OpsError as refusal:
            return self.refuse(request, refusal, letter)
        messages.success(request, f"{letter_name(letter)} is {decision.done}{again(done.idempotent_replay)}")
        return HttpResponseRedirect(page)

    def deciding(self, letter: DeadLetter, asked: Confirmation, posted: Mapping[str, Any]) -> Confirmation:
        """Return the confirmation with what was seen; one about a job with nothing to decide has no button.

        A form that was filled in wrongly keeps its key and what was seen when it was opened.
        """
        if letter.state not in DECIDABLE:
            note = "It does not wait for a decision any more; its page says how it stands."
            return replace(asked, submit="", sections=[], form=None, is_danger=False, note=note)
        hidden = seen(letter.incident)
        if posted:
            hidden = {name: str(posted.get(name, "")) for name in hidden}
        return replace(asked, hidden=hidden, key=str(posted.get("idempotency_key", "")))

    def refuse(self, request: HttpRequest, refusal: OpsError, letter: DeadLetter) -> HttpResponse:
        """Answer a refused change: by the site for what is not theirs, else with the reason and the new state."""
        if refusal.status in (401, 403, 404):
            raise refusal
        now = DeadLetter.objects.select_related("incident").get(id=letter.id)
        changed = ""
        if refusal.status in (409, 412):
            latest = RepairAction.objects.filter(letter=now).newest_first().first()
            who = f"{latest.planned_by_name or latest.planned_by} was there first. " if latest is not None else ""
            changed = (
                f"{who}{letter_name(now)} is now: {self.state(now)}; {incident_name(now.incident)}: "
                f"{state_words(now.incident)}{_holder(now.incident)}. Nothing of yours was done."
            )
        asked = Confirmation(
            title=f"{letter_name(letter)} was not changed", submit="", cancel_url=self.url("page", letter.id)
        )
        return self.confirm(request, asked, refusal=in_words(refusal), changed=changed)

    # -- several -------------------------------------------------------------------------------------------------------

    def bulk_actions_for(self, request: HttpRequest) -> list[BulkAction]:
        """Offer what somebody may do to anything at all; each job is asked about when it comes to it."""
        held = held_by(request)
        return [one for one in super().bulk_actions_for(request) if self.bulk_needs[one.value] in held]

    def act_on_selected(self, request: HttpRequest) -> HttpResponse:
        """Show what retrying the selected jobs would do; once confirmed, retry them one by one (ADM-01)."""
        if request.POST.get("action") != RETRY_SELECTED.value:
            return super().act_on_selected(request)
        ids, bad = posted_ids([*request.POST.getlist("_selected_action"), *request.POST.get("letters", "").split()])
        if not ids or len(ids) > MOST_SELECTED:
            text = f"Select at least one job, and at most {MOST_SELECTED:,}. Nothing was changed."
            messages.error(request, text)
            return HttpResponseRedirect(request.get_full_path())
        if request.POST.get("confirmed") != "yes":
            return self.confirm(request, self.asking_selected(request, ids))
        try:
            key = posted_key(request)
        except OpsError as refusal:
            return self.confirm(request, self.asking_selected(request, ids), refusal=refusal)
        planned, refusals = self.retry_each(ids, by=operator_of(request), key=key)
        if bad:
            refusals["There is no such failed job, or you may not see it."] += bad
        level = messages.SUCCESS if not refusals else messages.WARNING
        start = f"{thousands(planned)} {'job is' if planned == 1 else 'jobs are'} on the way: Sent, awaiting result."
        messages.add_message(request, level, f"{start}{refused_words(refusals)}")
        return HttpResponseRedirect(request.get_full_path())

    def retry_each(self, ids: list[UUID], *, by: Operator, key: str) -> tuple[int, Counter[str]]:
        """Retry jobs one service call each; returns how many were planned, and the refusals by their sentence."""
        planned = 0
        refusals: Counter[str] = Counter()
        for letter_id in ids:
            try:
                retry_letter(letter_id=letter_id, by=by, key=f"{key}:{letter_id}")
                planned += 1
            except OpsError as refusal:
                refusals[in_words(refusal).detail] += 1
        return planned, refusals

    def asking_selected(self, request: HttpRequest, ids: list[UUID]) -> Confirmation:
        """Return the confirmation of retrying several jobs; what is not theirs to retry is audited here already."""
        by = operator_of(request)
        letters = {
            one.id: one
            for one in DeadLetter.objects.filter(id__in=ids)
            .visible_to(by, Action.DEAD_LETTERS_RETRY)
            .select_related("incident")
            .defer("payload_preview", "error_text")
        }
        refused = 0
        for letter_id in ids:
            if letter_id not in letters:
                refused += not self.may_decide(by, Action.DEAD_LETTERS_RETRY, letter_id)
        # Oldest first, as with every other way of retrying several.
        checked = self._check(sorted(letters.values(), key=lambda one: (one.first_seen_at, one.id)))
        run = [one for one in checked if one.prospect in (Prospect.SAFE, Prospect.NOT_DECLARED)]
        sections = [
            *(self.held_by_others([one.letter.incident for one in checked], by) if run else []),
            *sections_for(
                checked, queue="each in the queue it came from", site=self.admin_site.name, skips_ambiguous=True
            ),
        ]
        if refused:
            verb = "is" if refused == 1 else "are"
            heading = f"Skipped, because: {thousands(refused)} {verb} not yours to retry, or not there"
            sections.append(Section(heading=heading, tone="bad", text="Nothing happens to them. This was audited."))
        return Confirmation(
            title=f"Retry {thousands(len(run))} of {thousands(len(ids))} selected jobs?",
            submit=f"Retry {thousands(len(run))}" if run else "",
            cancel_url=request.get_full_path(),
            sections=sections,
            hidden={
                "action": RETRY_SELECTED.value,
                "confirmed": "yes",
                "letters": " ".join(str(one.letter.id) for one in run),
            },
            key=str(new_id()),
        )

    def held_by_others(self, incidents: list[Incident], by: Operator) -> list[Section]:
        """Return a warning that names each incident of the selected jobs that somebody else is at work on."""
        held = {one.id: one for one in incidents if is_held_by_another(one, by)}
        if not held:
            return []
        page = partial(reverse, "admin:ops_incidents_incident_page", current_app=self.admin_site.name)
        rows = [
            (page(args=[one.id]), incident_name(one), f"{one.acknowledged_by_name} has it")
            for one in sorted(held.values(), key=lambda one: one.number)
        ]
        return [
            Section(
                heading="Somebody else has an incident of these jobs",
                tone="warn",
                text=TALK_FIRST,
                rows=rows[:LISTED],
                more=max(len(rows) - LISTED, 0),
            )
        ]

    def may_decide(self, by: Operator, action: Action, letter_id: UUID) -> bool:
        """Say whether somebody may do that to a job; a refusal is audited."""
        try:
            require(by, action, DeadLetter.objects.scope(letter_id), LetterNotFound())
        except OpsError:
            return False
        return True

    def _check(self, letters: list[DeadLetter]) -> list[Checked]:
        """Return what a retry of each would mean: to the end for a few, by their rows for many."""
        now = database_now()
        served = {source: Served.by(source, now) for source in {one.source for one in letters}}
        checked = []
        whole: dict[UUID, DeadLetter] = {}
        if len(letters) <= FULLY_CHECKED:
            whole = DeadLetter.objects.select_related("message", "incident").in_bulk([one.id for one in letters])
        for one in letters:
            if one.id in whole:
                found = whole[one.id]
                checked.append(check_letter(found, found.incident, served=served[one.source], now=now))
            elif one.state not in DECIDABLE:
                checked.append(Checked(letter=one, prospect=Prospect.BLOCKED, remark=f"It is: {self.state(one)}."))
            else:
                prospect, reason = prospect_of(one, served[one.source])
                checked.append(Checked(letter=one, prospect=prospect, remark=reason))
        return checked


def _holder(incident: Incident) -> str:
    return f" by {incident.acknowledged_by_name}" if incident.acknowledged_by_name else ""
