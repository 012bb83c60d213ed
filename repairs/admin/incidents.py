"""The half of an incident's page that is about its jobs: what a retry would mean, one first, then all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin, messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse

from deadletters.admin import OUTCOME_TONES, OUTCOME_WORDS, attempt_words, job_context, letter_name, letter_words
from deadletters.journal.events import MessageState
from deadletters.models import DECIDABLE, DeadLetter, LetterState, hold_of
from deadletters.selectors import Hourly, open_jobs_of
from grants.actions import Action
from grants.operators import Operator
from grants.pages import Allowed, Confirmation, Section, allowed, operator_of, posted_ids, posted_key, require, seen_by
from incidents.admin import (
    TIMELINE_ROWS,
    Button,
    Buttons,
    IncidentAdmin,
    TimelineLine,
    incident_name,
    posted_number,
    seen,
    with_version,
)
from incidents.errors import IncidentNotFound
from incidents.models import Incident
from incidents.selected import SelectableIncidentAdmin
from opsconsole.core.admin import (
    CURSOR,
    Cell,
    KeysetChangeList,
    NotAListParameter,
    again,
    keyset_page,
    thousands,
    when,
)
from opsconsole.core.bounded import capped_counts
from opsconsole.core.charts import HOUR, bar_chart, hours_before
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from opsconsole.core.keyset import Page
from repairs.admin.bars import Breakdown, breakdown
from repairs.admin.copying import as_curl, as_text
from repairs.admin.words import (
    ACTION_WORDS,
    LEAVE,
    RetryForm,
    automatic_retries,
    deed_words,
    held_by_another,
    in_words,
    is_held_by_another,
    letter_url,
    plan_url,
    renewed_after,
    repair_rows,
    repair_runs,
    sections_for,
)
from repairs.errors import (
    JobOvertaken,
    LetterNotFound,
    MessageExpired,
    SelectionDrifted,
    SelectionInvalid,
    TooMany,
)
from repairs.models import ActionState, ActionType, ProviderAnswer, RepairAction
from repairs.prospects import (
    Checked,
    Judged,
    Prospect,
    Selection,
    check_letter,
    check_letters,
    first_to_retry,
    judge_jobs,
    prospect_of,
    select_open,
)
from repairs.reconciliation.retention import messages_kept
from repairs.refusals import Served
from repairs.services import (
    INCIDENT_RETRIED,
    MOST_LETTERS,
    BatchMutation,
    LetterResult,
    LettersClosed,
    close_letter_as_done,
    close_letters_as_done,
    retry_incident,
    retry_letter,
)
from repairs.story import Deed, IncidentStory, story_of

CHART_HOURS, CHART_HEIGHT = 48, 108
LETTERS_SHOWN = 10
SAMPLED = 5
"""Jobs of each kind that the confirmation of retrying all names; their page lists them all."""
LONGEST_AGE = timedelta(days=36_500)
"""An age beyond which a policy's limit is none, and could not be added to a date."""
BROKEN_DOWN_BY = {
    "queue": ("Queue", "queue"),
    "error": ("Newest error", "error_class"),
    "release": ("Release", "release"),
    "worker": ("Worker", "worker"),
}
"""By what the jobs of an incident are told apart: the name in the address, its title, the letter's column."""
JOBS_LOOKED_AT = 200
"""Open jobs of each incident of the list whose outcome is told."""
OUTCOME_LINES = (
    (Prospect.SAFE, "good", "safe"),
    (Prospect.AMBIGUOUS, "warn", "may have happened"),
    (Prospect.NOT_DECLARED, "grey", "not declared"),
    (Prospect.BLOCKED, "grey", "can't be retried"),
)
NOT_ON_THE_PAGE = ("call_site", "trace_id", "sentry_id")
REPAIRS_SHOWN = 20
SHOWN = {
    "decision": "Failed jobs needing a decision",
    "safe": "Failed jobs that are safe to run again",
    "ambiguous": "Failed jobs that may already have happened",
    "not_declared": "Failed jobs not declared",
    "blocked": "Failed jobs that can't be retried",
    "awaiting": "Sent, awaiting result",
    "held": "Jobs on hold",
    "all": "All failed jobs of this incident",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedFor:
    """Which jobs of an incident its page is to list: a set of ``SHOWN``, values of breakdowns, and a place."""

    shown: str
    only: Mapping[str, str]
    cursor: str

    @property
    def place(self) -> dict[str, str]:
        """The parameters of the first page."""
        return {"show": self.shown, **self.only}

    @property
    def here(self) -> dict[str, str]:
        """The parameters of this page."""
        return {**self.place, **({CURSOR: self.cursor} if self.cursor else {})}

    def among(self, letters: Any) -> Any:
        """Keep the jobs with the wanted values."""
        return letters.filter(**{BROKEN_DOWN_BY[name][1]: value for name, value in self.only.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """The jobs of an incident that its page looks at more closely.

    ``first`` is the one that a click may try at once: safe, with no question about it or about who has the incident.
    """

    first: DeadLetter | None
    focus: DeadLetter | None


class RepairableIncidentAdmin(SelectableIncidentAdmin):
    """The incident as the console registers it."""

    pages = (
        *IncidentAdmin.pages,
        ("retry_one", "<uuid:object_id>/retry-one/", "retry_one_view"),
        ("retry_all", "<uuid:object_id>/retry/", "retry_all_view"),
    )

    columns = ("number", "severity", "state", "what", "unresolved", "outcome", "last", "holder")

    # -- list ----------------------------------------------------------------------------------------------------------

    def list_context(self, request: HttpRequest, cl: KeysetChangeList) -> dict[str, Any]:
        """Look at the open jobs of what is listed before the rows are told."""
        rows = list(cl.result_list)
        sources = {one.source for one in rows}
        served = {source: Served.lately(source) for source in {one.source for one in rows if not one.is_resolved}}
        for one in rows:
            cast(Any, one).tells_source = len(sources) > 1
        for incident_id, found in open_jobs_of(rows, JOBS_LOOKED_AT).items():
            row: Any = next(one for one in rows if one.id == incident_id)
            row.open_jobs = found
            row.prospects = Counter(prospect_of(job, served[row.source])[0] for job in found.rows)
        return super().list_context(request, cl)

    def what_parts(self, row: Incident) -> list[str]:
        """Name the queue as well, where the open jobs have one, and the source only where there are several."""
        jobs = getattr(row, "open_jobs", None)
        queues = sorted({job.queue for job in jobs.rows if job.queue}) if jobs is not None else []
        told = f"queue {queues[0]}" if len(queues) == 1 else f"{len(queues)} queues"
        source = [row.source] if getattr(row, "tells_source", True) else []
        return [row.job_type, *([told] if queues else []), row.tenant, *source]

    @admin.display(description="Outcome of those jobs")
    def outcome(self, row: Incident) -> Cell:
        jobs = getattr(row, "open_jobs", None)
        if jobs is None:
            return Cell()
        counted: Counter[Prospect] = cast(Any, row).prospects
        lines = [
            (tone, f"{thousands(counted[prospect])} {words}")
            for prospect, tone, words in OUTCOME_LINES
            if counted[prospect]
        ]
        awaiting = row.unresolved_count - len(jobs.rows)
        if awaiting > 0 and not jobs.is_capped:
            lines.append(("grey", f"{thousands(awaiting)} awaiting result"))
        return Cell(lines=lines, second=f"of the first {thousands(JOBS_LOOKED_AT)}" if jobs.is_capped else "")

    # -- page ----------------------------------------------------------------------------------------------------------

    def button_actions(self) -> tuple[Action, ...]:
        """Ask about retrying as well, one by one and as a redrive, and about holding."""
        return (*super().button_actions(), Action.DEAD_LETTERS_RETRY, Action.REDRIVE_RUN, Action.DEAD_LETTERS_HOLD)

    def incident_context(self, request: HttpRequest, incident: Incident) -> dict[str, Any]:
        """Add what is known of the incident's jobs and their repairs."""
        by, plan = operator_of(request), seen_by(request, Action.INSPECT)
        served = Served.lately(incident.source)
        judged = judge_jobs(incident, served)
        letters = DeadLetter.objects.filter(incident=incident).visible_to(by, Action.INSPECT, plan=plan)
        asked = _asked_for(request, incident)
        page = keyset_page(
            asked.among(_shown(letters, incident, asked.shown, judged, served)).defer(*NOT_ON_THE_PAGE),
            ("-last_seen_at", "-id"), asked.cursor, LETTERS_SHOWN,
        )  # fmt: skip
        looked_at = self.looked_at(request, incident, letters, page.rows, judged, served)
        starts = hours_before(served.at, CHART_HOURS)
        story = story_of(
            incident,
            since=None if incident.last_seen_at < starts[0] else starts[0],
            letter=looked_at.focus,
            most_of_job=REPAIRS_SHOWN + 1,
        )
        repairs = list(
            RepairAction.objects.filter(incident=incident)
            .visible_to(by, Action.INSPECT, plan=plan)
            .select_related("letter")
            .defer("letter__payload_preview", "letter__error_text")
            .newest_first()[: REPAIRS_SHOWN + 1]
        )
        context = self.told_context(request, incident, story.told)
        self.add_repair_buttons(
            context["buttons"], incident, context["may"], judged, story.latest_retry, first=looked_at.first, by=by
        )
        return {
            **context,
            **self.jobs_context(incident, page, asked, judged, served),
            **self.focus_context(request, incident, looked_at.focus, story, judged, served),
            **self.first_context(context, looked_at.first, judged),
            **self.repairs_context(incident, repairs, judged),
            "timeline": self.with_deeds(context["timeline"], story.deeds),
            "tiles": judged.tiles,
            "is_hold": hold_of(incident) is not None,
            "held": max(incident.unresolved_count - judged.tiles.waiting - judged.tiles.awaiting, 0),
            "breakdowns": _breakdowns(judged),
            "looked_at": len(judged.waiting),
            "no_worker_seen": not served.has_nodes,
            "policy": served.policies.for_task(incident.job_type),
            "as_of": served.at,
            "refresh_url": request.get_full_path(),
            "chart": _chart(story.hourly, starts, is_hold=hold_of(incident) is not None),
            "as_text": as_text(
                request, incident, judged.tiles, by=by, now=served.at, repaired=context["repaired_words"]
            ),
            "as_curl": as_curl(request, incident, judged.tiles.waiting),
        }

    def jobs_context(
        self, incident: Incident, page: Page[DeadLetter], asked: AskedFor, judged: Judged, served: Served
    ) -> dict[str, Any]:
        """Return the list of its jobs, with what each would do if it ran again."""
        site = self.admin_site.name
        return {
            "shown": asked.shown,
            "shown_words": SHOWN[asked.shown],
            "letters": [
                {
                    "letter": one,
                    "name": letter_name(one),
                    "url": letter_url(one.id, site=site),
                    "state": letter_words(one, incident),
                    "attempts": attempt_words(one),
                    "error": one.error_class.rpartition(".")[2],
                    "look": f"?{urlencode({**asked.here, 'job': one.id})}#job",
                    **_if_run_again(one, judged, served),
                }
                for one in page.rows
            ],
            "letters_next": f"?{urlencode({**asked.place, CURSOR: page.next})}" if page.next else "",
            "letters_previous": f"?{urlencode({**asked.place, CURSOR: page.previous})}" if page.previous else "",
            "letters_first": f"?{urlencode(asked.place)}" if asked.cursor else "",
            "only": [(BROKEN_DOWN_BY[name][0].lower(), value or "not known") for name, value in asked.only.items()],
        }

    def first_context(self, context: Mapping[str, Any], first: DeadLetter | None, judged: Judged) -> dict[str, Any]:
        """Return what the buttons send along, and which job they would try first."""
        hidden = {**context["hidden"], "expected": str(len(judged.waiting))}
        if first is not None:
            hidden["letter"] = str(first.id)
        goes_first = first if any(button.hint for button in context["buttons"].bar) else None
        return {
            "hidden": hidden,
            "goes_first": goes_first,
            "goes_first_url": letter_url(goes_first.id, site=self.admin_site.name) if goes_first is not None else "",
            "goes_first_name": letter_name(goes_first) if goes_first is not None else "",
        }

    def repairs_context(self, incident: Incident, repairs: Sequence[RepairAction], judged: Judged) -> dict[str, Any]:
        """Return its newest repairs, whether one is waited for, and if a job of a closed one may be retried."""
        is_awaited, can_be_retried_alone = judged.tiles.awaiting > 0, False
        if incident.is_resolved:
            of_it = DeadLetter.objects.filter(incident=incident)
            alone = of_it.filter(state__in=DECIDABLE, message_state=MessageState.FULL.value)
            awaited, retriable = capped_counts([of_it.filter(state=LetterState.RETRYING), alone], 0)
            is_awaited, can_be_retried_alone = awaited > 0, retriable > 0
        failed_again = _failed_again(incident, repairs)
        return {
            "repairs": repair_rows(repairs[:REPAIRS_SHOWN], site=self.admin_site.name),
            "all_repairs": self.repairs_url(incident) if len(repairs) > REPAIRS_SHOWN else "",
            "renew": renewed_after(repairs[0].planned_at if repairs else None) if is_awaited else 0,
            "can_be_retried_alone": can_be_retried_alone,
            "failed_again": failed_again,
            "failed_again_url": f"?{urlencode({'job': failed_again.letter_id})}#job" if failed_again else "",
        }

    def looked_at(
        self,
        request: HttpRequest,
        incident: Incident,
        letters: Any,
        listed: Sequence[DeadLetter],
        judged: Judged,
        served: Served,
    ) -> LookedAt:
        """Return the job to try first, and the one to show: the chosen one, else the first listed.

        Where none is listed it is the one to try first, else the newest.
        """
        ids, _bad = posted_ids([request.GET.get("job", "")])
        chosen = next((one for one in listed if one.id in ids), None)
        first_id = None if is_held_by_another(incident, operator_of(request)) else judged.first_safe
        first = judged.checked[first_id].letter if first_id is not None and judged.checked is not None else None
        wanted = [*ids[:1]] if chosen is None else []
        if first is None and first_id is not None:
            wanted.append(first_id)
        if wanted:
            found = {one.id: one for one in letters.filter(id__in=wanted).select_related("message")}
            chosen = chosen or next((found[one] for one in ids[:1] if one in found), None)
            if first is None and first_id in found:
                # The rows of many jobs don't tell what their messages do, so this one is looked at to the end.
                checked = check_letter(found[first_id], incident, served=served, now=served.at)
                first = checked.letter if checked.prospect is Prospect.SAFE else None
        focus = chosen or next(iter(listed), first) or letters.newest_first().first()
        return LookedAt(first=first, focus=focus)

    def focus_context(
        self,
        request: HttpRequest,
        incident: Incident,
        chosen: DeadLetter | None,
        story: IncidentStory,
        judged: Judged,
        served: Served,
    ) -> dict[str, Any]:
        """Return what is shown of one job of it."""
        if chosen is None:
            return {"focus": None}
        site = self.admin_site.name
        of_it = story.of_job[:REPAIRS_SHOWN]
        runs = repair_runs([one.new_task_id for one in story.of_job], are_all=len(story.of_job) <= REPAIRS_SHOWN)
        may = allowed(request, chosen.resource, [Action.PAYLOADS_READ])
        return {
            "focus": job_context(chosen, {**runs, chosen.task_id: ""}, site=site),
            "focus_name": letter_name(chosen),
            "focus_url": letter_url(chosen.id, site=site),
            "focus_state": letter_words(chosen, incident),
            "focus_words": _if_run_again(chosen, judged, served),
            "focus_repairs": repair_rows(of_it[::-1], site=site, runs=runs),
            "reveal": reveal_of(chosen, may, site=site),
        }

    def add_repair_buttons(
        self,
        buttons: Buttons,
        incident: Incident,
        may: Allowed,
        judged: Judged,
        latest: ActionState | None,
        *,
        first: DeadLetter | None,
        by: Operator,
    ) -> None:
        """Add the retries; what is primary is the next step: take it, one first, and all once that one succeeded.

        A button whose job asks nothing acts at once; the others, whose label ends in an ellipsis, ask first.
        """
        counted = judged.tiles
        if not incident.is_resolved and Action.DEAD_LETTERS_HOLD in may:
            self.add_hold_button(buttons, incident)
        if incident.is_resolved or not counted.retriable:
            return
        count = f"{thousands(counted.retriable)}{'+' if counted.is_capped else ''}"
        if Action.DEAD_LETTERS_RETRY not in may:
            buttons.missing.extend(may.missing({Action.DEAD_LETTERS_RETRY: "Retry 1 first and Retry all"}))
            return
        is_taken = not any(button.is_primary for button in buttons.bar)
        is_alone = counted.retriable == 1
        has_succeeded = latest is ActionState.SUCCEEDED
        is_awaited = counted.awaiting > 0
        label = "Retry it" if is_alone else "Retry 1 first"
        buttons.bar.append(
            Button(
                label=label if first is not None else f"{label}…",
                url=self.url("retry_one", incident.id),
                is_primary=is_taken and not is_awaited and (is_alone or not has_succeeded),
                direct=first is not None,
                hint=f"Sends {letter_name(first)}" if first is not None else "",
            )
        )
        if counted.retriable > MOST_LETTERS and Action.REDRIVE_RUN in may:
            buttons.bar.append(
                Button(
                    label=f"Retry all {count}…",
                    url=plan_url(incident, site=self.admin_site.name),
                    is_primary=is_taken and not is_awaited and has_succeeded,
                    hint="As a redrive: a dry run first, then at a pace that you choose",
                )
            )
        elif not is_alone:
            at_once = has_succeeded and judged.asks_nothing and not is_held_by_another(incident, by)
            buttons.bar.append(
                Button(
                    label=f"Retry all {count}" if at_once else f"Retry all {count}…",
                    url=self.url("retry_all", incident.id),
                    is_primary=is_taken and not is_awaited and has_succeeded,
                    direct=at_once,
                )
            )

    def add_hold_button(self, buttons: Buttons, incident: Incident) -> None:
        """Add what stops the bleeding: holding the task whose jobs fail; or, of a hold's incident, the hold itself."""
        site = self.admin_site.name
        hold_id = hold_of(incident)
        if hold_id is not None:
            url = reverse("admin:ops_deadletters_hold_page", args=[hold_id], current_app=site)
            buttons.bar.append(Button(label="Look at the hold", url=url, is_primary=True))
        elif incident.job_type:
            named = {"tenant": incident.tenant, "source": incident.source, "job_type": incident.job_type}
            url = f"{reverse('admin:ops_deadletters_hold_place', current_app=site)}?{urlencode(named)}"
            buttons.more.append(Button(label="Hold jobs of this task…", url=url))

    def repairs_url(self, incident: Incident) -> str:
        """Return the address of the list of its repairs."""
        listed = reverse("admin:ops_repairs_repairaction_changelist", current_app=self.admin_site.name)
        return f"{listed}?incident={incident_name(incident)}"

    def with_deeds(self, lines: list[TimelineLine], deeds: Iterable[Deed]) -> list[TimelineLine]:
        """Add what people did to its jobs and how that went, a batch as one line."""
        told = [line for line in lines if line.action != INCIDENT_RETRIED]
        done = [TimelineLine(at=deed.at, who=deed.who, what=deed_words(deed), detail=deed.reason) for deed in deeds]
        # Of one moment, what the system did comes of what a person did, so it is the newer one.
        return sorted([*told, *done], key=lambda line: line.at, reverse=True)[:TIMELINE_ROWS]

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

    def undone_words(self, incident: Incident) -> str:
        """Add what the jobs are, and until when they may be retried."""
        served = Served.lately(incident.source)
        judged = judge_jobs(incident, served)
        counted = judged.tiles
        parts = [
            f"{thousands(number)}{'+' if counted.is_capped else ''} {words}"
            for number, words in (
                (counted.safe, "could safely run again"),
                (counted.ambiguous, "may already have happened"),
                (counted.not_declared, "not declared"),
                (counted.blocked, "can't be retried"),
                (counted.awaiting, "awaiting result"),
            )
            if number
        ]
        told = f"Of these jobs: {', '.join(parts)}." if parts else ""
        return " ".join(filter(None, (told, _until_when(judged, served), super().undone_words(incident))))

    # -- retry one -----------------------------------------------------------------------------------------------------

    def retry_one_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Try one job before the others."""
        incident = self.visible(request, object_id)
        by = operator_of(request)
        require(by, Action.DEAD_LETTERS_RETRY, incident.resource, IncidentNotFound())
        served = served_for(request, incident.source)
        if request.method != "POST":
            return self.confirm(request, self.asking_one(incident, first_to_retry(incident, served), served, by=by))
        ids, _bad = posted_ids([request.POST.get("letter", "")])
        chosen = next(
            iter(check_letters(DeadLetter.objects.filter(id__in=ids, incident=incident).only("id"), incident, served)),
            None,
        )
        if chosen is None:
            asked = self.asking_one(incident, first_to_retry(incident, served), served, by=by)
            return self.confirm(request, asked, status=400)
        if must_ask(request, chosen):
            return self.confirm(request, self.asking_one(incident, chosen, served, by=by), status=400)
        form = retry_form(chosen, request.POST)
        if not form.is_valid():
            key = request.POST.get("idempotency_key", "")
            asked = self.asking_one(incident, chosen, served, by=by, form=form, key=key)
            return self.confirm(request, asked, status=400)
        try:
            text = carry_out(request, chosen.letter, form.cleaned_data, by=by)
        except OpsError as refusal:
            return self.refuse(request, refusal, incident_id=object_id)
        messages.success(request, text)
        return HttpResponseRedirect(self.url("page", object_id))

    def asking_one(
        self,
        incident: Incident,
        chosen: Checked | None,
        served: Served,
        *,
        by: Operator,
        form: RetryForm | None = None,
        key: str = "",
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
            *sections_for(
                [chosen],
                queue=f"queue {chosen.letter.queue}",
                site=self.admin_site.name,
                retries=automatic_retries(incident.job_type, served),
            ),
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
        if "run" not in request.POST and "expected" in request.POST:
            return self.retry_whole(request, incident, by=by)
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

    def retry_whole(self, request: HttpRequest, incident: Incident, *, by: Operator) -> HttpResponse:
        """Retry every job that waits, as many as the page showed; where there are others by now, ask instead.

        What may already have happened is refused by the service, however the page looked that was clicked.
        """
        expected = posted_number(request.POST.get("expected"))
        if expected is None:
            return self.confirm(request, self.asking_all(incident, by=by), status=400)
        judged = judge_jobs(incident, Served.by(incident.source, database_now()))
        # Where none waits any more, the service tells a second click that it was done.
        if judged.waiting and not judged.asks_nothing:
            messages.warning(request, "They are not all safe to run again any more. Look at them as they are now.")
            return HttpResponseRedirect(self.url("retry_all", incident.id))
        try:
            key = posted_key(request)
            done = with_version(
                request.POST,
                incident.id,
                lambda version: retry_incident(
                    incident_id=incident.id, by=by, key=key, expected_count=expected, version=version
                ),
            )
        except SelectionDrifted as drifted:
            messages.warning(request, f"{drifted.detail} Look at them as they are now.")
            return HttpResponseRedirect(self.url("retry_all", incident.id))
        except OpsError as refusal:
            return self.refuse(request, refusal, incident_id=incident.id)
        messages.success(request, batch_words(done))
        return HttpResponseRedirect(self.url("page", incident.id))

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
        served = Served.lately(incident.source)
        selection = select_open(incident, served)
        run = selection.of(Prospect.SAFE, Prospect.NOT_DECLARED)
        asked_about = selection.of(Prospect.AMBIGUOUS)
        queues = sorted({one.letter.queue for one in selection.checked})
        sections = sections_for(
            list(selection.checked),
            queue=f"queue {queues[0]}" if len(queues) == 1 else "each in the queue it came from",
            site=self.admin_site.name,
            listed=SAMPLED,
            retries=automatic_retries(incident.job_type, served),
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


def served_for(request: HttpRequest, source: str) -> Served:
    """Return what the workers serve: as of now for a form that was sent, of a moment ago for a page that asks."""
    return Served.by(source, database_now()) if request.method == "POST" else Served.lately(source)


def must_ask(request: HttpRequest, chosen: Checked) -> bool:
    """Say whether a button that acts at once was pressed for a job that has come to need a question since."""
    if "at_once" not in request.POST or chosen.letter.state not in DECIDABLE:
        return False
    return chosen.prospect is not Prospect.SAFE or bool(chosen.letter.chord_id)


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
    """Close several jobs of an incident as already happened; returns how it went.

    ``versioned`` is what was posted of the incident as it was looked at: until the first job is closed, it has to
    stand so still (raises ``IncidentChanged``).
    """

    def close(version: int | None = None) -> LettersClosed:
        return close_letters_as_done(
            incident_id=incident_id, letter_ids=letter_ids, by=by, key=key,
            reason=f"It had already happened: {reference}"[:500], reference=reference, version=version,
        )  # fmt: skip

    done = close() if versioned is None else with_version(versioned, incident_id, close)
    start = f"{thousands(done.closed)} closed as already happened"
    return f"{start}{again(done.idempotent_replay)}{refused_words(_refusals(done.results))}"


def batch_words(done: BatchMutation) -> str:
    """Return what became of a batch, in a sentence or two."""
    one = done.planned == 1
    start = f"{thousands(done.planned)} {'job is' if one else 'jobs are'} on {'its' if one else 'their'} way"
    return f"{start}: Sent, awaiting result{again(done.idempotent_replay)}{refused_words(_refusals(done.results))}"


def refused_words(refusals: Counter[str]) -> str:
    """Return how many were refused and why, " " first; "" if none was."""
    if not refusals:
        return ""
    listed = " ".join(f"{thousands(count)}: {detail}" for detail, count in refusals.most_common(5))
    return f" {thousands(refusals.total())} refused. {listed}"


def _refusals(results: Iterable[LetterResult]) -> Counter[str]:
    return Counter(
        "It did not wait for a decision any more." if result.code == JobOvertaken.code else result.detail
        for result in results
        if result.status == "refused"
    )


def _if_run_again(letter: DeadLetter, judged: Judged, served: Served) -> dict[str, str]:
    """Return what the list of an incident's jobs says of running one again: nothing of one that is settled."""
    if letter.state not in DECIDABLE:
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
    if shown == "held":
        return running.filter(state=LetterState.HELD)
    waiting = running.filter(state=LetterState.OPEN) if not incident.is_resolved else letters.none()
    if shown == "decision" or incident.is_resolved:
        return waiting
    return waiting.filter(judged.rows(Prospect(shown), incident, served))


def _failed_again(incident: Incident, newest: Sequence[RepairAction]) -> RepairAction | None:
    """Return the repair that was the last to be settled, if it has failed and its job waits for a decision again."""
    settled = [one for one in newest if one.settled_at is not None and one.state != ActionState.CANCELLED]
    last = max(settled, key=lambda one: (one.settled_at, one.planned_at), default=None)
    if last is None or incident.is_resolved or last.state != ActionState.FAILED:
        return None
    return last if last.letter.state == LetterState.OPEN else None


def _asked_for(request: HttpRequest, incident: Incident) -> AskedFor:
    """Return which jobs the address wants; raises ``NotAListParameter`` for what is none of the page's."""
    first = "held" if hold_of(incident) is not None else "decision"
    shown = request.GET.get("show", "all" if incident.is_resolved else first)
    if shown not in SHOWN:
        raise NotAListParameter("no such set of jobs")
    only = {name: request.GET[name] for name in BROKEN_DOWN_BY if name in request.GET}
    if any("\x00" in value for value in only.values()):
        raise NotAListParameter("no such value")
    return AskedFor(shown=shown, only=only, cursor=request.GET.get(CURSOR, ""))


def _until_when(judged: Judged, served: Served) -> str:
    """Return until when the waiting jobs could be retried, if their incident were closed now."""
    if not judged.waiting:
        return ""
    retriable, blocked = judged.tiles.retriable, judged.tiles.blocked
    what = "Should that change, each can be retried from its own page"
    if retriable:
        what = (
            "Those that can be retried can be so from their own pages"
            if blocked
            else "Each can still be retried from its own page"
        )
    kept = served.at + messages_kept()
    most = served.policies.for_task(judged.waiting[0].job_type).max_age_seconds
    if most is not None and most <= LONGEST_AGE.total_seconds():
        first, last = (
            edge(row.first_seen_at for row in judged.waiting) + timedelta(seconds=most) for edge in (min, max)
        )
        if first < kept:
            return (
                f"{what}, by the policy of their task: the oldest until {when(first)} UTC, the newest until "
                f"{when(min(last, kept))} UTC."
            )
    return f"{what} until {when(kept)} UTC; then their messages are removed."


def _breakdowns(judged: Judged) -> list[Breakdown]:
    """Return by what the jobs that wait differ; what is the same for all of them says nothing and is left out."""
    found = (
        breakdown(name, title, (getattr(row, column) for row in judged.waiting))
        for name, (title, column) in BROKEN_DOWN_BY.items()
    )
    return [one for one in found if one.values > 1]


def _chart(hourly: Hourly | None, starts: Sequence[datetime], *, is_hold: bool) -> dict[str, Any]:
    """Return a bar for each hour of ``starts``, with what they count; None is none at all."""
    counts: Mapping[datetime, int] = {} if hourly is None else hourly.counts
    noun = "jobs put aside" if is_hold else "failures"
    if hourly is not None and not is_hold:
        noun = "jobs, by their last failure" if hourly.of_jobs else "final failures"
    values = [counts.get(start, 0) for start in starts]
    return {
        "chart": bar_chart(noun=noun, starts=starts, step=HOUR, values=values, height=CHART_HEIGHT),
        "begin": starts[0],
        "middle": starts[len(starts) // 2],
        "noun": noun,
        "is_capped": hourly is not None and hourly.is_capped,
    }


def reveal_of(letter: DeadLetter, may: Allowed, *, site: str) -> dict[str, Any]:
    """Return where a job's whole payload is shown, or which grant is missing for it; nothing where none is stored."""
    if letter.message_state != MessageState.FULL:
        return {"url": "", "missing": [], "why": f"The message is not stored in full ({letter.message_state})."}
    url = reverse("admin:ops_deadletters_deadletter_payload", args=[letter.id], current_app=site)
    is_allowed = Action.PAYLOADS_READ in may
    missing = may.missing({Action.PAYLOADS_READ: "Reveal the payload"})
    return {"url": url if is_allowed else "", "missing": missing, "why": ""}


def _takes(incident: Incident) -> str:
    return "" if incident.acknowledged_by else "Nobody has this incident; a retry makes it yours."


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
