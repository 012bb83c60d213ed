"""What people read about repairs, and the questions that they answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.urls import reverse
from django.utils import timezone

from deadletters.admin import letter_name
from deadletters.arguments import parse_signature
from deadletters.models import DeadLetter
from grants.operators import Operator
from grants.pages import Section
from incidents.admin import incident_name
from incidents.models import Incident, IncidentState
from opsconsole.core.admin import ago, thousands
from opsconsole.core.errors import OpsError
from repairs.errors import JobOvertaken
from repairs.models import RETRIES, ActionState, ActionType, ProviderAnswer, RepairAction
from repairs.prospects import Checked, Prospect
from repairs.refusals import Served
from repairs.story import Deed

ACTION_WORDS = {
    ActionType.RETRY_MESSAGE: "Retry",
    ActionType.RETRY_RECORD: "Retry",
    ActionType.CLOSE_AS_DONE: "Close as already happened",
    ActionType.DISCARD: "Discard",
}
STATE_WORDS = {
    ActionState.PLANNED: "Planned, about to be sent",
    ActionState.SENT: "Sent, awaiting result",
    ActionState.STARTED: "Running, awaiting result",
    ActionState.SUCCEEDED: "Succeeded",
    ActionState.FAILED: "Repair failed",
    ActionState.CANCELLED: "Withdrawn",
}
DEED_WORDS = {
    ActionType.RETRY_MESSAGE: "retried {jobs}",
    ActionType.RETRY_RECORD: "retried {jobs}",
    ActionType.CLOSE_AS_DONE: "closed {jobs} as already happened",
    ActionType.DISCARD: "discarded {jobs}",
}
STANDING_WORDS = {
    "retrying": "being retried",
    "resolved": "closed",
    "already_done": "known to have happened",
    "overtaken": "done",
}
"""What a refusal says that a job is already."""
STATE_TONES = {
    ActionState.PLANNED: "info",
    ActionState.SENT: "info",
    ActionState.STARTED: "info",
    ActionState.SUCCEEDED: "good",
    ActionState.FAILED: "bad",
    ActionState.CANCELLED: "grey",
}
RESULT_WORDS = {
    ActionState.PLANNED: "about to be sent",
    ActionState.SENT: "awaiting result",
    ActionState.STARTED: "running",
    ActionState.SUCCEEDED: "succeeded",
    ActionState.FAILED: "failed again",
    ActionState.CANCELLED: "withdrawn",
}
TALK_FIRST = "They may be about to do the same, and are not told by this page: talk to them first."
LISTED = 25
PREVIEW_CUT = 200
"""Characters of a job's arguments on a confirmation: enough to tell which order it was."""
SOON = timedelta(minutes=2)
LEAVE = "leave"
ANSWERS = (
    (ProviderAnswer.DID_NOT_HAPPEN.value, "It did not happen: run it again"),
    (ProviderAnswer.ALREADY_HAPPENED.value, "It already happened: close it as done, run nothing"),
    (LEAVE, "I don't know: leave it as it is"),
)


def repair_words(action: RepairAction, now: datetime | None = None) -> str:
    """Return the state of a repair as a person says it; one whose answer is overdue says so."""
    state = ActionState(action.state)
    if action.action_type not in RETRIES and state == ActionState.SUCCEEDED:
        return "Done"
    overdue = action.answer_due_at is not None and action.answer_due_at < (now or timezone.now())
    if overdue and state in (ActionState.SENT, ActionState.STARTED):
        return f"Sent, no answer for {ago(action.sent_at, now).removesuffix(' ago')}"
    return STATE_WORDS[state]


def deed_words(deed: Deed) -> str:
    """Return what somebody did to some jobs, and how that went, without the reason."""
    jobs = f"{thousands(deed.jobs)} jobs" if deed.jobs != 1 else "1 job"
    if deed.job:
        jobs = f"{jobs} ({deed.job})"
    what = DEED_WORDS[ActionType(deed.action_type)].format(jobs=jobs)
    if deed.action_type not in RETRIES:
        return what
    counted = [(count, RESULT_WORDS[state]) for state in ActionState if (count := deed.states.get(state.value))]
    counted += [(deed.refused, "refused")] if deed.refused else []
    is_alone = deed.jobs == 1 and len(counted) == 1
    results = ", ".join(words if is_alone else f"{thousands(count)} {words}" for count, words in counted)
    return f"{what}: {results}" if results else what


def in_words(refusal: OpsError) -> OpsError:
    """Return a refusal for a page: with the state of a job in words, where the API has its name."""
    if not isinstance(refusal, JobOvertaken):
        return refusal
    standing = str(refusal.fields["standing"])
    return JobOvertaken(standing=STANDING_WORDS.get(standing, standing))


def incident_url(incident_id: UUID, *, site: str) -> str:
    """Return the address of an incident's page."""
    return reverse("admin:ops_incidents_incident_page", args=[incident_id], current_app=site)


def plan_url(incident: Incident, *, site: str) -> str:
    """Return where a redrive of every job of an incident is planned."""
    planned = reverse("admin:ops_repairs_redrive_plan", current_app=site)
    return f"{planned}?{urlencode({'incident': incident.id})}"


def renewed_after(newest: datetime | None, now: datetime | None = None) -> int:
    """Return after how many seconds a page that waits for a repair's result looks again.

    Most results come within seconds. One that has not come for minutes may never, and its page is left open for days.
    """
    if newest is None or (now or timezone.now()) - newest < SOON:
        return 3
    return 30


def is_held_by_another(incident: Incident, by: Operator) -> bool:
    """Say whether somebody else is at work on an incident."""
    return incident.state == IncidentState.ACKNOWLEDGED and incident.acknowledged_by != by.ref


def held_by_another(incident: Incident, by: Operator) -> list[Section]:
    """Return a warning if somebody else is at work on an incident, else nothing."""
    if not is_held_by_another(incident, by):
        return []
    holder, taken = incident.acknowledged_by_name, ago(incident.acknowledged_at)
    return [
        Section(
            heading=f"{holder} has {incident_name(incident)}, taken {taken}",
            tone="warn",
            text=TALK_FIRST,
        )
    ]


def readable_json(text: str) -> str:
    """Return JSON with a line for each value; text that is none comes back as it is.

    A lone surrogate, which no page can be sent with, is shown by its escape.
    """
    with suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), ensure_ascii=False, indent=2)
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRow:
    """One repair as a list shows it."""

    action: RepairAction
    what: str
    state: str
    tone: str
    url: str
    letter_url: str
    job: str
    run: str = ""  # what its run is called among those of its job
    record: str = ""  # what it did to the record that a job of the ledger works on


def repair_rows(
    actions: Iterable[RepairAction], *, site: str, runs: Mapping[str, str] | None = None
) -> list[RepairRow]:
    """Return repairs, whose letters were fetched with them, as rows; ``runs`` names them by the id of their run."""
    now = timezone.now()
    named = runs or {}
    return [
        RepairRow(
            action=one,
            what=ACTION_WORDS[ActionType(one.action_type)],
            state=repair_words(one, now),
            tone=STATE_TONES[ActionState(one.state)],
            url=reverse("admin:ops_repairs_repairaction_page", args=[one.id], current_app=site),
            letter_url=letter_url(one.letter_id, site=site),
            job=letter_name(one.letter),
            run=named.get(one.new_task_id, ""),
            record=record_words(one),
        )
        for one in actions
    ]


def record_words(action: RepairAction) -> str:
    """Return what a retry did to the authoritative record, such as "email_delivery failed → pending"; "" for others."""
    if action.action_type != ActionType.RETRY_RECORD:
        return ""
    before, after = json.loads(action.before), json.loads(action.after)
    if "record" not in before:
        return ""
    return f"{before['recordType']} {before['record']} → {after.get('record', after.get('state', ''))}"


def repair_runs(newest: Sequence[str], *, are_all: bool) -> dict[str, str]:
    """Return what the run of each repair of a job is called, by the id it was sent under; ``newest`` come first.

    What was decided without a run has no id. Where older ones were left out, nobody knows the numbers.
    """
    sent = [task_id for task_id in reversed(newest) if task_id]
    return {task_id: f"repair {number}" if are_all else "a repair" for number, task_id in enumerate(sent, 1)}


def letter_url(letter_id: Any, *, site: str) -> str:
    """Return the address of a failed job."""
    return reverse("admin:ops_deadletters_deadletter_page", args=[letter_id], current_app=site)


def job_section(
    found: list[Checked],
    heading: str,
    *,
    tone: str,
    text: str,
    site: str,
    listed: int = LISTED,
    remarks: Mapping[UUID, str] | None = None,
) -> Section:
    """Return a block of a confirmation that lists jobs, the first ones of many; each with its remark, or why."""
    told = remarks or {}
    return Section(
        heading=heading,
        tone=tone,
        text=text,
        rows=[
            (letter_url(one.letter.id, site=site), letter_name(one.letter), told.get(one.letter.id) or _remark(one))
            for one in found[:listed]
        ],
        more=max(len(found) - listed, 0),
    )


def sections_for(
    checked: list[Checked],
    *,
    queue: str,
    site: str,
    retries: int | None = None,
    skips_ambiguous: bool = False,
    listed: int = LISTED,
) -> list[Section]:
    """Return what a retry would do to each job: what will change first, then what is skipped and why.

    What is empty is left out. ``queue`` says where they go, ``retries`` are those that the task makes by itself;
    ``skips_ambiguous`` where nobody is asked about what may already have happened.
    """
    by_prospect = {prospect: [one for one in checked if one.prospect is prospect] for prospect in Prospect}
    up_to = "" if retries is None else f" (up to {retries} automatic {'retry' if retries == 1 else 'retries'} each)"
    again = f"Runs again from attempt 1{up_to}, {queue}, with the original arguments, oldest first."
    because = _because(by_prospect[Prospect.AMBIGUOUS])
    texts = {
        Prospect.SAFE: ("good", "Will change: {} safe to run again", again),
        Prospect.NOT_DECLARED: (
            "info",
            "Will change: {} not declared",
            f"Nobody has declared what it does before it fails; run it again only if twice does no harm. {again}",
        ),
        Prospect.AMBIGUOUS: ("warn", "Changes as you answer: {} may already have happened", because),
        Prospect.BLOCKED: ("grey", "Skipped, because: {} can't be retried", "They stay as they are."),
    }  # fmt: skip
    if skips_ambiguous:
        text = f"{because} These are asked about one by one, or all together on the page of their incident."
        texts[Prospect.AMBIGUOUS] = ("warn", "Skipped, because: {} may already have happened", text)
    chords = [one for one in checked if one.letter.chord_id and one.prospect is not Prospect.BLOCKED]
    sections = [
        job_section(
            found,
            texts[p][1].format(thousands(len(found))),
            tone=texts[p][0],
            text=texts[p][2],
            site=site,
            listed=listed,
            remarks=_whereabouts(found[:listed]) if p is Prospect.AMBIGUOUS else None,
        )
        for p, found in by_prospect.items()
        if found
    ]
    if chords:
        text = "A chord's body waits for the first runs of its members: it will not run because of this."
        sections.append(Section(heading=f"{thousands(len(chords))} of a chord", tone="warn", text=text))
    return sections


def automatic_retries(job_type: str, served: Served) -> int | None:
    """Return how often a task retries by itself as the live workers have it; None where that is not known."""
    found = [parse_signature(text) for text in served.signatures.get(job_type, ())]
    return max((one.max_retries for one in found if one is not None and one.max_retries is not None), default=None)


def _whereabouts(found: Sequence[Checked]) -> dict[UUID, str]:
    """Return what to look for at the receiver before one answers: whose each job is, and what it was called with.

    One query where the arguments, redacted as everywhere, were not fetched with the jobs.
    """
    missing = [one.letter.id for one in found if "payload_preview" in one.letter.get_deferred_fields()]
    previews = dict(DeadLetter.objects.filter(id__in=missing).values_list("id", "payload_preview")) if missing else {}
    differ = len({_remark(one) for one in found}) > 1
    told = {}
    for one in found:
        letter = one.letter
        whose = f"{letter.actor_type} {letter.actor_id}".strip()
        preview = previews.get(letter.id, "") if letter.id in missing else letter.payload_preview
        called = preview if len(preview) <= PREVIEW_CUT else f"{preview[:PREVIEW_CUT]}…"
        told[letter.id] = "; ".join(filter(None, (whose, called, _remark(one) if differ else "")))
    return told


def _remark(one: Checked) -> str:
    return in_words(one.refusal).detail if isinstance(one.refusal, JobOvertaken) else one.remark


def _because(found: list[Checked]) -> str:
    reasons = Counter(one.remark.rstrip(".") for one in found if one.remark)
    told = reasons.most_common(3)
    because = (
        "; ".join(f"{thousands(n)}: {reason}" if len(reasons) > 1 else reason for reason, n in told)
        or "nobody knows how far its last attempt came"
    )
    many = "They" if len(found) != 1 else "It"
    return f"{many} may already have happened, because: {because}. Without looking, the work may be done twice."


class RetryForm(forms.Form):
    """What has to be said before a job may run again; it asks only what matters to the jobs at hand."""

    answer = forms.ChoiceField(
        choices=ANSWERS, initial=LEAVE, widget=forms.RadioSelect, label="What do you know about it?"
    )
    reference = forms.CharField(
        required=False,
        max_length=300,
        label="Reference",
        help_text="needed for the first two answers: a ticket, a log line, who said so",
    )
    run_expired = forms.BooleanField(
        required=False,
        label="Run it although it has expired",
        help_text="its sender did not want it to run after that time",
    )

    def __init__(self, *args: Any, asks: int = 0, expired: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not asks:
            del self.fields["answer"], self.fields["reference"]
        elif asks > 1:
            self.fields["answer"].label = f"What do you know about these {thousands(asks)}?"
        if not expired:
            del self.fields["run_expired"]

    def clean(self) -> dict[str, Any]:
        """Want a reference for an answer that acts."""
        found = super().clean() or {}
        if found.get("answer", LEAVE) != LEAVE and not str(found.get("reference", "")).strip():
            self.add_error("reference", "Say where you saw it: a ticket, a log line, who told you.")
        return found


class ReasonForm(forms.Form):
    """Why something is given up or stated."""

    reason = forms.CharField(
        max_length=500,
        label="Reason",
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="required, up to 500 characters; kept in the audit trail",
    )


class DoneForm(ReasonForm):
    """Why somebody is sure that a job has happened already."""

    reference = forms.CharField(
        required=False, max_length=300, label="Reference", help_text="a ticket, a log line, who said so"
    )
