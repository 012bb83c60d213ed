"""The half of an incident's page that is about its jobs: what a retry would mean, one first, then all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse

from deadletters.admin import HEAVY, OUTCOME_TONES, OUTCOME_WORDS, letter_name, letter_words
from deadletters.journal.events import MessageState
from deadletters.models import DeadLetter, LetterState
from grants.actions import Action
from grants.operators import Operator
from grants.pages import Allowed, Confirmation, Section, operator_of, posted_ids, posted_key, require
from incidents.admin import (
    TIMELINE_ROWS,
    Button,
    Buttons,
    IncidentAdmin,
    TimelineLine,
    incident_name,
    seen,
    with_version,
)
from incidents.errors import IncidentChanged, IncidentNotFound
from incidents.models import Incident
from opsconsole.core.admin import CURSOR, NotAListParameter, again, keyset_page, thousands
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from repairs.admin.words import (
    ACTION_WORDS,
    LEAVE,
    RetryForm,
    deed_words,
    held_by_another,
    in_words,
    letter_url,
    renewed_after,
    repair_rows,
    sections_for,
)
from repairs.errors import JobOvertaken, LetterNotFound, MessageExpired, SelectionInvalid, TooMany
from repairs.models import ActionState, ActionType, ProviderAnswer, RepairAction
from repairs.prospects import (
    Checked,
    Judged,
    Prospect,
    Selection,
    Tiles,
    check_letters,
    first_to_retry,
    judge_jobs,
    latest_retry,
    select_open,
)
from repairs.refusals import Served
from repairs.selectors import deeds_of
from repairs.services import (
    INCIDENT_RETRIED,
    MOST_LETTERS,
    BatchMutation,
    close_letter_as_done,
    retry_incident,
    retry_letter,
)

LETTERS_SHOWN = 25
REPAIRS_SHOWN = 20
SHOWN = {
    "decision": "Failed jobs needing a decision",
    "safe": "Failed jobs that are safe to run again",
    "ambiguous": "Failed jobs that may already have happened",
    "not_declared": "Failed jobs not declared",
    "blocked": "Failed jobs that can't be retried",
    "awaiting": "Sent, awaiting result",
    "all": "All failed jobs of this incident",
}


class RepairableIncidentAdmin(IncidentAdmin):
    """The incident as the console registers it."""

    told_otherwise = (INCIDENT_RETRIED,)
    pages = (
        *IncidentAdmin.pages,
        ("retry_one", "<uuid:object_id>/retry-one/", "retry_one_view"),
        ("retry_all", "<uuid:object_id>/retry/", "retry_all_view"),
    )

    # -- page ----------------------------------------------------------------------------------------------------------

    def button_actions(self) -> tuple[Action, ...]:
        """Ask about retrying as well."""
        return (*super().button_actions(), Action.DEAD_LETTERS_RETRY)

    def incident_context(self, request: HttpRequest, incident: Incident) -> dict[str, Any]:
        """Add what is known of the incident's jobs and their repairs."""
        by = operator_of(request)
        context = super().incident_context(request, incident)
        served = Served.by(incident.source, database_now())
        judged = judge_jobs(incident, served)
        counted = judged.tiles
        latest = None if incident.is_resolved else latest_retry(incident)
        self.add_repair_buttons(context["buttons"], incident, context["may"], counted, latest)
        shown = request.GET.get("show", "all" if incident.is_resolved else "decision")
        if shown not in SHOWN:
            raise NotAListParameter("no such set of jobs")
        letters = DeadLetter.objects.filter(incident=incident).visible_to(by, Action.INSPECT)
        page = keyset_page(
            _shown(letters, incident, shown, judged, served).defer(*HEAVY), ("-last_seen_at", "-id"),
            request.GET.get(CURSOR, ""), LETTERS_SHOWN,
        )  # fmt: skip
        repairs = list(
            RepairAction.objects.filter(incident=incident)
            .visible_to(by, Action.INSPECT)
            .select_related("letter")
            .defer("letter__payload_preview", "letter__error_text")
            .newest_first()[: REPAIRS_SHOWN + 1]
        )
        is_awaited = DeadLetter.objects.filter(incident=incident, state=LetterState.RETRYING).exists()
        can_be_retried_alone = (
            incident.is_resolved
            and DeadLetter.objects.filter(incident=incident, state=LetterState.OPEN)
            .filter(message_state=MessageState.FULL.value)
            .exists()
        )
        site = self.admin_site.name
        return {
            **context,
            "newest": letters.newest_first().first(),
            "tiles": counted,
            "shown": shown,
            "shown_words": SHOWN[shown],
            "letters": [
                {
                    "letter": one,
                    "name": letter_name(one),
                    "url": letter_url(one.id, site=site),
                    "state": letter_words(one, incident),
                    **_if_run_again(one, judged, served),
                }
                for one in page.rows
            ],
            "letters_next": f"?show={shown}&{CURSOR}={page.next}" if page.next else "",
            "letters_previous": f"?show={shown}&{CURSOR}={page.previous}" if page.previous else "",
            "letters_first": f"?show={shown}" if request.GET.get(CURSOR) else "",
            "repairs": repair_rows(repairs[:REPAIRS_SHOWN], site=site),
            "all_repairs": self.repairs_url(incident) if len(repairs) > REPAIRS_SHOWN else "",
            "renew": renewed_after(repairs[0].planned_at if repairs else None) if is_awaited else 0,
            "can_be_retried_alone": can_be_retried_alone,
            "no_worker_seen": not served.has_nodes,
            "policy": served.policies.for_task(incident.job_type),
            "latest": latest,
        }

    def add_repair_buttons(
        self, buttons: Buttons, incident: Incident, may: Allowed, counted: Tiles, latest: RepairAction | None
    ) -> None:
        """Add the retries; what is primary is the next step: take it, one first, and all once that one succeeded."""
        if incident.is_resolved or not counted.retriable:
            return
        count = f"{thousands(counted.retriable)}{'+' if counted.is_capped else ''}"
        if Action.DEAD_LETTERS_RETRY not in may:
            buttons.missing.extend(may.missing({Action.DEAD_LETTERS_RETRY: "Retry 1 first and Retry all"}))
            return
        is_taken = not any(button.is_primary for button in buttons.bar)
        is_alone = counted.retriable == 1
        has_succeeded = latest is not None and latest.state == ActionState.SUCCEEDED
        is_awaited = counted.awaiting > 0
        buttons.bar.append(
            Button(
                label="Retry it…" if is_alone else "Retry 1 first…",
                url=self.url("retry_one", incident.id),
                is_primary=is_taken and not is_awaited and (is_alone or not has_succeeded),
            )
        )
        if not is_alone:
            buttons.bar.append(
                Button(
                    label=f"Retry all {count}…",
                    url=self.url("retry_all", incident.id),
                    is_primary=is_taken and not is_awaited and has_succeeded,
                )
            )

    def repairs_url(self, incident: Incident) -> str:
        """Return the address of the list of its repairs."""
        listed = reverse("admin:ops_repairs_repairaction_changelist", current_app=self.admin_site.name)
        return f"{listed}?incident={incident_name(incident)}"

    def timeline(self, incident: Incident) -> list[TimelineLine]:
        """Add what people did to its jobs and how that went, a batch as one line."""
        deeds = [
            TimelineLine(at=deed.at, who=deed.who, what=deed_words(deed), detail=deed.reason)
            for deed in deeds_of(incident, TIMELINE_ROWS)
        ]
        # Of one moment, what the system did comes of what a person did, so it is the newer one.
        return sorted([*super().timeline(incident), *deeds], key=lambda line: line.at, reverse=True)[:TIMELINE_ROWS]

    def latest_change(self, incident: Incident) -> TimelineLine | None:
        """Look at repairs as well."""
        found = super().latest_change(incident)
        action = RepairAction.objects.filter(incident=incident).newest_first().first()
        if action is None or (found is not None and found.at >= action.planned_at):
            return found
        what = f"chose “{ACTION_WORDS[ActionType(action.action_type)]}” for a job of it"
        return TimelineLine(at=action.planned_at, who=action.planned_by_name or action.planned_by, what=what)

    def refuse(self, request: HttpRequest, refusal: OpsError, *, incident_id: UUID) -> HttpResponse:
        """Say the state of a job in words."""
        return super().refuse(request, in_words(refusal), incident_id=incident_id)

    # -- retry one -----------------------------------------------------------------------------------------------------

    def retry_one_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Try one job before the others."""
        incident = self.visible(request, object_id)
        by = operator_of(request)
        require(by, Action.DEAD_LETTERS_RETRY, incident.resource, IncidentNotFound())
        served = Served.by(incident.source, database_now())
        if request.method != "POST":
            return self.confirm(request, self.asking_one(incident, first_to_retry(incident, served), by=by))
        ids, _bad = posted_ids([request.POST.get("letter", "")])
        chosen = next(
            iter(check_letters(DeadLetter.objects.filter(id__in=ids, incident=incident).only("id"), incident, served)),
            None,
        )
        if chosen is None:
            return self.confirm(request, self.asking_one(incident, first_to_retry(incident, served), by=by), status=400)
        form = retry_form(chosen, request.POST)
        if not form.is_valid():
            asked = self.asking_one(incident, chosen, by=by, form=form, key=request.POST.get("idempotency_key", ""))
            return self.confirm(request, asked, status=400)
        try:
            text = carry_out(request, chosen.letter, form.cleaned_data, by=by)
        except OpsError as refusal:
            return self.refuse(request, refusal, incident_id=object_id)
        messages.success(request, text)
        return HttpResponseRedirect(self.url("page", object_id))

    def asking_one(
        self, incident: Incident, chosen: Checked | None, *, by: Operator, form: RetryForm | None = None, key: str = ""
    ) -> Confirmation:
        """Return the confirmation of trying one job."""
        back = self.url("page", incident.id)
        if chosen is None:
            return Confirmation(
                title=f"No job of {incident_name(incident)} can be retried now",
                submit="",
                cancel_url=back,
                sections=[
                    Section(
                        heading="None of its oldest jobs can be sent",
                        tone="grey",
                        text="The page of the incident says why for each of them.",
                    )
                ],
            )
        sections = [
            *held_by_another(incident, by),
            *sections_for([chosen], queue=chosen.letter.queue, site=self.admin_site.name),
        ]
        return Confirmation(
            title=f"Retry 1 job of {incident_name(incident)} first?",
            submit="Do as answered" if chosen.prospect is Prospect.AMBIGUOUS else "Retry this 1",
            cancel_url=back,
            sections=sections,
            form=form if form is not None else retry_form(chosen),
            hidden={**seen(incident), "letter": str(chosen.letter.id)},
            note=_takes(incident),
            key=key,
        )

    # -- retry all -----------------------------------------------------------------------------------------------------

    def retry_all_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Retry every job that waits: those that may already have happened only as somebody says."""
        incident = self.visible(request, object_id)
        by = operator_of(request)
        require(by, Action.DEAD_LETTERS_RETRY, incident.resource, IncidentNotFound())
        if request.method != "POST":
            return self.confirm(request, self.asking_all(incident, by=by))
        try:
            run, asked_about = chosen_ids(incident, request.POST)
        except OpsError as refusal:
            return self.refuse(request, refusal, incident_id=object_id)
        form = RetryForm(request.POST, asks=len(asked_about))
        if not form.is_valid():
            asked = self.asking_all(incident, by=by, form=form, key=request.POST.get("idempotency_key", ""))
            return self.confirm(request, asked, status=400)
        try:
            text = self.retry_as_answered(request, object_id, run, asked_about, form.cleaned_data, by=by)
        except OpsError as refusal:
            return self.refuse(request, refusal, incident_id=object_id)
        messages.success(request, text)
        return HttpResponseRedirect(self.url("page", object_id))

    def retry_as_answered(
        self,
        request: HttpRequest,
        incident_id: UUID,
        run: list[UUID],
        asked_about: list[UUID],
        answers: Mapping[str, Any],
        *,
        by: Operator,
    ) -> str:
        """Retry and close what the form says, each through its service; returns what to tell the operator."""
        answer, reference = answers.get("answer", LEAVE), str(answers.get("reference", ""))
        key = posted_key(request)
        again_too = answer == ProviderAnswer.DID_NOT_HAPPEN
        chosen = [*run, *asked_about] if again_too else run
        parts = []
        if chosen:
            done = with_version(
                request.POST,
                incident_id,
                lambda version: retry_incident(
                    incident_id=incident_id, by=by, key=key, letter_ids=chosen, provider_checked=again_too,
                    reference=reference if again_too else "", version=version,
                ),
            )  # fmt: skip
            parts.append(batch_words(done))
        if asked_about and answer == ProviderAnswer.ALREADY_HAPPENED:
            # A retry has compared the version already, and may have taken the incident since.
            versioned = None if chosen else request.POST
            parts.append(close_as_done(incident_id, asked_about, reference, versioned, by=by, key=key))
        elif asked_about and not again_too:
            parts.append(f"{thousands(len(asked_about))} left as they are.")
        return " ".join(parts) or "Nothing was chosen, and nothing was changed."

    def asking_all(
        self, incident: Incident, *, by: Operator, form: RetryForm | None = None, key: str = ""
    ) -> Confirmation:
        """Return the confirmation of retrying all, at most the 1,000 oldest."""
        selection = select_open(incident, Served.by(incident.source, database_now()))
        run = selection.of(Prospect.SAFE, Prospect.NOT_DECLARED)
        asked_about = selection.of(Prospect.AMBIGUOUS)
        queues = sorted({one.letter.queue for one in selection.checked})
        sections = sections_for(
            list(selection.checked), queue=queues[0] if len(queues) == 1 else "it came from", site=self.admin_site.name
        )
        if selection.left_out:
            sections.insert(0, _thousand(selection))
        if run or asked_about:
            sections = [*held_by_another(incident, by), *sections]
        else:
            sections.append(Section(heading="There is nothing to retry", tone="grey"))
        return Confirmation(
            title=_all_title(len(run) + len(asked_about), incident),
            submit=_all_label(len(run), len(asked_about)),
            cancel_url=self.url("page", incident.id),
            sections=sections,
            form=form if form is not None else (RetryForm(asks=len(asked_about)) if asked_about else None),
            hidden={
                **seen(incident),
                "run": " ".join(str(one.letter.id) for one in run),
                "asked": " ".join(str(one.letter.id) for one in asked_about),
            },
            note=_takes(incident) if run or asked_about else "",
            key=key,
        )


def retry_form(chosen: Checked, data: Any = None) -> RetryForm:
    """Return the questions that one job raises, none at all for most; and those that ``data`` has answers to.

    Once answered, the job raises them no more. The same form sent again has to be read as it was, to be a replay (A9).
    """
    sent = data if data is not None else {}
    is_open_question = (
        chosen.letter.outcome_class == Prospect.AMBIGUOUS.value and chosen.letter.state == LetterState.OPEN
    )
    return RetryForm(
        data,
        asks=int(is_open_question or "answer" in sent),
        expired=isinstance(chosen.refusal, MessageExpired) or "run_expired" in sent,
    )


def chosen_ids(incident: Incident, posted: Mapping[str, Any]) -> tuple[list[UUID], list[UUID]]:
    """Return the jobs that a form about a whole incident would run, and those that it asked about.

    Raises ``SelectionInvalid``, ``TooMany``, or ``LetterNotFound`` for one that it asked about and that is not one of
    the incident's; those to run are looked up by their service.
    """
    (run, bad), (asked_about, worse) = (posted_ids(str(posted.get(name, "")).split()) for name in ("run", "asked"))
    if bad or worse:
        raise SelectionInvalid(detail="The form names a failed job by what is no id.")
    if len(run) + len(asked_about) > MOST_LETTERS:
        raise TooMany(found=len(run) + len(asked_about), most=MOST_LETTERS)
    own = DeadLetter.objects.filter(incident=incident, id__in=asked_about).values_list("id", flat=True)
    if asked_about and len(own) != len(asked_about):
        raise LetterNotFound
    return run, asked_about


def carry_out(request: HttpRequest, letter: DeadLetter, answers: Mapping[str, Any], *, by: Operator) -> str:
    """Do to one job what was answered, through its service; returns what to tell the operator."""
    answer, reference = answers.get("answer"), str(answers.get("reference", ""))
    key = posted_key(request)
    if answer == LEAVE:
        return f"{letter_name(letter)} was left as it is. Nothing was changed."
    if answer == ProviderAnswer.ALREADY_HAPPENED:
        closed = with_version(
            request.POST,
            letter.incident_id,
            lambda version: close_letter_as_done(
                letter_id=letter.id, by=by, key=key, reason=f"It had already happened: {reference}"[:500],
                reference=reference, version=version,
            ),
        )  # fmt: skip
        return f"{letter_name(letter)} is closed as already happened{again(closed.idempotent_replay)}"
    sent = with_version(
        request.POST,
        letter.incident_id,
        lambda version: retry_letter(
            letter_id=letter.id, by=by, key=key, provider_checked=answer == ProviderAnswer.DID_NOT_HAPPEN,
            run_expired=bool(answers.get("run_expired")), reference=reference, version=version,
        ),
    )  # fmt: skip
    return f"1 job is on its way ({letter_name(letter)}): Sent, awaiting result{again(sent.idempotent_replay)}"


def close_as_done(
    incident_id: UUID,
    letter_ids: list[UUID],
    reference: str,
    versioned: Mapping[str, Any] | None,
    *,
    by: Operator,
    key: str,
) -> str:
    """Close several jobs of an incident as already happened, one service call each; returns how it went.

    ``versioned`` is what was posted of the incident as it was looked at: until the first job is closed, it has to
    stand so still (raises ``IncidentChanged``); from then on it changes by what is done here.
    """

    def close(letter_id: UUID, version: int | None = None) -> None:
        close_letter_as_done(
            letter_id=letter_id,
            by=by,
            key=f"{key}:{letter_id}",
            reason=f"It had already happened: {reference}"[:500],
            reference=reference,
            version=version,
        )

    refusals: Counter[str] = Counter()
    for letter_id in letter_ids:
        try:
            if versioned is None:
                close(letter_id)
            else:
                with_version(versioned, incident_id, partial(close, letter_id))
                versioned = None
        except IncidentChanged:
            raise
        except OpsError as refusal:
            refusals[in_words(refusal).detail] += 1
    done = len(letter_ids) - refusals.total()
    return f"{thousands(done)} closed as already happened.{refused_words(refusals)}"


def batch_words(done: BatchMutation) -> str:
    """Return what became of a batch, in a sentence or two."""
    refusals = Counter(
        "It did not wait for a decision any more." if result.code == JobOvertaken.code else result.detail
        for result in done.results
        if result.status == "refused"
    )
    one = done.planned == 1
    start = f"{thousands(done.planned)} {'job is' if one else 'jobs are'} on {'its' if one else 'their'} way"
    return f"{start}: Sent, awaiting result{again(done.idempotent_replay)}{refused_words(refusals)}"


def refused_words(refusals: Counter[str]) -> str:
    """Return how many were refused and why, " " first; "" if none was."""
    if not refusals:
        return ""
    listed = " ".join(f"{thousands(count)}: {detail}" for detail, count in refusals.most_common(5))
    return f" {thousands(refusals.total())} refused. {listed}"


def _if_run_again(letter: DeadLetter, judged: Judged, served: Served) -> dict[str, str]:
    """Return what the list of an incident's jobs says of running one again: nothing of one that is settled."""
    if letter.state != LetterState.OPEN:
        return {"outcome": "", "tone": "", "reason": ""}
    prospect, reason = judged.of_letter(letter, served)
    if prospect is Prospect.BLOCKED:
        return {"outcome": "Can't be retried", "tone": "grey", "reason": reason}
    return {"outcome": OUTCOME_WORDS[prospect.value], "tone": OUTCOME_TONES[prospect.value], "reason": reason}


def _shown(letters: Any, incident: Incident, shown: str, judged: Judged, served: Served) -> Any:
    if shown == "all":
        return letters
    running = letters.filter(episode=incident.episode)
    if shown == "awaiting":
        return running.filter(state=LetterState.RETRYING)
    waiting = running.filter(state=LetterState.OPEN) if not incident.is_resolved else letters.none()
    if shown == "decision" or incident.is_resolved:
        return waiting
    return waiting.filter(judged.rows(Prospect(shown), incident, served))


def _takes(incident: Incident) -> str:
    return "" if incident.acknowledged_by else "Nobody has this incident; retrying makes it yours."


def _thousand(selection: Selection) -> Section:
    return Section(
        heading=f"The oldest {thousands(len(selection.checked))} now",
        tone="plain",
        text="One request may repair that many; come back here for the rest when these have their answer.",
    )


def _all_title(count: int, incident: Incident) -> str:
    if not count:
        return f"No job of {incident_name(incident)} can be retried now"
    if count == 1:
        return f"Retry the 1 job of {incident_name(incident)} that can be retried?"
    return f"Retry all {thousands(count)} jobs of {incident_name(incident)}?"


def _all_label(run: int, asked_about: int) -> str:
    if run and asked_about:
        return f"Retry {thousands(run)}, and do as answered for {thousands(asked_about)}"
    if asked_about:
        return f"Do as answered for {thousands(asked_about)}"
    return f"Retry {thousands(run)}" if run else ""
