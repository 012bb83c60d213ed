"""Recording: failures become letters, occurrences and incidents, many at a time, each exactly once.

Lock order: incidents by id, letters by id, then occurrences. What is decided is decided under those locks, from rows
read after they were had; a plan made from an unlocked read is thrown away when the locked rows disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import IntegrityError, connection, transaction
from django.db.models import F

from deadletters import conf
from deadletters.grouping import TITLE_LENGTH, GroupingMode
from deadletters.intake import Failure, rebind_message
from deadletters.journal.events import Caught, MessageState
from deadletters.models import DeadLetter, Hold, LetterState, Occurrence, SealedMessage, TracebackText
from deadletters.outcome import Judgement, OutcomeClass, combine
from grants import audit
from grants.access import SYSTEM_CAPABILITY
from grants.audit import AuditEntry
from grants.operators import SYSTEM
from grants.resources import Resource
from incidents.models import HOLD_CATEGORY, EpisodeEnd, Incident, IncidentNumber, IncidentState
from opsconsole.core.canonical_json import JsonValue, canonical_json
from opsconsole.core.database import AnyOf, RowWriter, is_unique_violation, locked, plain_value
from opsconsole.core.ids import new_id
from opsconsole.core.safe_text import shorten

LETTER_RECORDED = "queue.dead_lettered"
LETTER_HELD = "queue.held"
INCIDENT_OPENED = "operations.incident_opened"
INCIDENT_REOPENED = "operations.incident_reopened"
PLANS_AT_MOST = 5
# Asked of the enumeration for every row, they would cost more than the row.
OPEN, HELD = LetterState.OPEN.value, LetterState.HELD.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What became of one failure."""

    failure: Failure
    letter_id: UUID
    incident_id: UUID | None  # None if nothing was changed and nobody had to know
    is_new_letter: bool
    is_new_occurrence: bool
    is_late: bool = False


class _Known(NamedTuple):
    """A delivery that has its occurrence already."""

    id: UUID
    letter_id: UUID
    caught: str


class PlanOvertaken(Exception):
    """Another transaction changed what the plan was made from; plan again."""


def record_failures(failures: Sequence[Failure], *, now: datetime) -> list[Recorded]:
    """Record ``failures`` inside the caller's transaction and say what became of each.

    A delivery that is recorded already changes nothing (C2). Writes one audit event for each letter first recorded and
    each incident opened or reopened (A5, C8).
    """
    recorded: list[Recorded] = []
    for chunk in without_repeats(failures):
        for attempt in range(PLANS_AT_MOST):
            try:
                with transaction.atomic():
                    recorded += _Recording(chunk, now).run()
                break
            except PlanOvertaken:
                if attempt == PLANS_AT_MOST - 1:
                    raise
    return recorded


def without_repeats(failures: Sequence[Failure]) -> Iterable[list[Failure]]:
    """Split so that no letter stands twice in one part: the second sees what the first has written.

    A letter's plain failure and its repair's do not look alike, so the two kinds are never in one part. Each part
    wants a transaction of its own: one that holds the incidents of a part must not wait for those of the next.
    """
    part: list[Failure] = []
    seen: set[object] = set()
    for failure in failures:
        identity = failure.repaired_letter_id or (failure.tenant, failure.fingerprint)
        if identity in seen or (part and part[-1].is_failed_repair != failure.is_failed_repair):
            yield part
            part, seen = [], set()
        seen.add(identity)
        part.append(failure)
    if part:
        yield part


class _Recording:
    """One transaction's worth of failures, no letter twice."""

    def __init__(self, failures: list[Failure], now: datetime) -> None:
        self.failures = failures
        self.repaired = {failure.repaired_letter_id for failure in failures if failure.repaired_letter_id is not None}
        self.now = now
        self.letters: dict[object, DeadLetter] = {}
        self.incidents: dict[UUID, Incident] = {}
        self.by_key: dict[tuple[str, str, str], Incident] = {}
        self.closed_at: dict[tuple[UUID, int], datetime] = {}
        self.opened: set[UUID] = set()
        self.reopened: dict[UUID, str] = {}
        self.relieved: dict[UUID, str] = {}  # who had what has opened again
        self.changed: set[UUID] = set()
        self.messages: list[tuple[Failure, UUID, bytes]] = []
        self.holds = _holds_of(failures)
        self.held: Counter[UUID] = Counter()  # messages newly put aside, by hold

    def run(self) -> list[Recorded]:
        self._lock()
        known = self._known_occurrences()
        results: list[Recorded] = []
        new_letters: list[Failure] = []
        new_occurrences: list[tuple[Failure, UUID, bool]] = []
        changed: list[DeadLetter] = []
        for failure in self.failures:
            letter = self.letters.get(self._identity(failure))
            told = known.get((failure.tenant, failure.delivery))
            if told is not None:
                is_real = _is_better_known(told.caught, failure.caught)
                if letter is None or letter.id != told.letter_id:
                    pass
                elif is_real:
                    self._replace_presumed_loss(told, letter, failure)
                    changed.append(letter)
                elif self._adopt_message(letter, failure):
                    changed.append(letter)
                results.append(self._result(failure, told.letter_id, is_new_occurrence=False))
                continue
            if letter is None:
                incident = self._target(failure)
                self._add_new_letter(incident, failure)
                new_letters.append(failure)
                new_occurrences.append((failure, failure.letter_id, False))
                self.messages.append((failure, failure.letter_id, failure.blob))
                results.append(
                    Recorded(
                        failure=failure,
                        letter_id=failure.letter_id,
                        incident_id=incident.id,
                        is_new_letter=True,
                        is_new_occurrence=True,
                    )
                )
                continue
            is_late = self._add_to_letter(letter, failure)
            changed.append(letter)
            new_occurrences.append((failure, letter.id, is_late))
            results.append(
                Recorded(
                    failure=failure,
                    letter_id=letter.id,
                    incident_id=letter.incident_id,
                    is_new_letter=False,
                    is_new_occurrence=True,
                    is_late=is_late,
                )
            )
        self._write(new_letters, new_occurrences, changed)
        return results

    # Planning and locking

    def _identity(self, failure: Failure) -> object:
        return failure.repaired_letter_id or (failure.tenant, failure.fingerprint)

    def _key(self, failure: Failure) -> tuple[str, str, str]:
        return failure.tenant, failure.source, failure.incident_key

    def _lock(self) -> None:
        """Make the incidents that may be needed, lock them all in the order of their ids, then the letters."""
        found = {self._letter_identity(letter): letter for letter in self._read_letters()}
        existing = self._read_incidents()
        needed = {
            self._key(failure): failure
            for failure in self.failures
            if self._key(failure) not in existing and self._may_need_target(found.get(self._identity(failure)))
        }
        made = self._make_incidents(needed)
        if len(made) < len(needed):
            # Another recorder made some of them first: read those, now that its transaction has ended.
            existing = self._read_incidents()
        ids = set(existing.values())
        ids.update(letter.incident_id for letter in found.values())
        self.incidents = Incident.objects.lock_many(list(ids | made))
        self.by_key = {(row.tenant, row.source, row.key): row for row in self.incidents.values()}
        self.opened = made & set(self.incidents)
        if found:
            ids_of_letters = [letter.id for letter in found.values()]
            for letter in DeadLetter.objects.lock_many(ids_of_letters).values():
                if letter.incident_id not in self.incidents:
                    raise PlanOvertaken
                self.letters[self._letter_identity(letter)] = letter
            self._read_episode_ends()

    def _letter_identity(self, letter: DeadLetter) -> object:
        if letter.id in self.repaired:
            return letter.id
        return letter.tenant, letter.fingerprint

    def _read_letters(self) -> list[DeadLetter]:
        plain = [failure for failure in self.failures if failure.repaired_letter_id is None]
        ids = set(self.repaired)
        if plain:
            # Their ids first: most failures have no letter yet, and a query of every column takes longer to write.
            ids |= set(
                DeadLetter.objects.filter(
                    AnyOf("fingerprint", [failure.fingerprint for failure in plain]),
                    tenant__in={failure.tenant for failure in plain},
                    source=plain[0].source,
                ).values_list("id", flat=True)
            )
        return list(DeadLetter.objects.filter(AnyOf("id", ids)).select_related("incident")) if ids else []

    def _read_incidents(self) -> dict[tuple[str, str, str], UUID]:
        keys = {self._key(failure) for failure in self.failures}
        rows = Incident.objects.filter(
            AnyOf("key", {key for _tenant, _source, key in keys}),
            tenant__in={tenant for tenant, _source, _key in keys},
            source__in={source for _tenant, source, _key in keys},
        ).values_list("tenant", "source", "key", "id")
        return {(tenant, source, key): incident_id for tenant, source, key, incident_id in rows}

    def _may_need_target(self, letter: DeadLetter | None) -> bool:
        """A letter keeps its incident while it is unresolved, whatever its newest error."""
        return letter is None or letter.is_closed(letter.incident)

    def _make_incidents(self, needed: dict[tuple[str, str, str], Failure]) -> set[UUID]:
        """Insert missing incidents with no counts, in the order of their keys, so that no two recorders cross."""
        if not needed:
            return set()
        numbers = _draw_numbers(len(needed))
        rows = []
        for number, key in zip(numbers, sorted(needed), strict=True):
            failure = needed[key]
            is_job = failure.grouping == GroupingMode.JOB
            category, title, summary = "queue_dead_letter", "", ""
            if failure.is_held:
                category, title, summary = self._words_of_hold(failure)
            rows.append(
                (
                    new_id(),
                    number,
                    failure.tenant,
                    failure.source,
                    failure.incident_key,
                    failure.grouping.value,
                    int(failure.severity),
                    category,
                    IncidentState.OPEN.value,
                    title or failure.title,
                    summary or failure.summary,
                    failure.job_type,
                    ("queue_job" if failure.job_id else "queue_message") if is_job else "job_type",
                    (failure.job_id or failure.delivery[:200]) if is_job else failure.job_type[:200],
                    canonical_json(_metadata(failure)),
                    0,
                    0,
                    0,
                    0,
                    failure.happened_at,
                    failure.happened_at,
                    1,
                    self.now,
                )
            )
        made = INCIDENTS.insert_returning(rows, "id")
        return {UUID(text) for text in made}

    def _words_of_hold(self, failure: Failure) -> tuple[str, str, str]:
        """Return category, title and summary of a hold's incident; made of the message where the hold is not known."""
        hold = self.holds.get(failure.hold_id)
        if hold is None:
            return HOLD_CATEGORY, failure.title, "Its messages were put aside by a hold that is not known here."
        title = shorten(f"On hold: {hold.words}", TITLE_LENGTH)
        summary = f"Nothing has failed: {hold.placed_by_name} has put these jobs aside. {hold.reason}"
        return HOLD_CATEGORY, title, summary

    def _read_episode_ends(self) -> None:
        wanted = {
            letter.incident_id
            for letter in self.letters.values()
            if letter.closed_at is None and letter.is_closed(self.incidents[letter.incident_id])
        }
        if wanted:
            for end in EpisodeEnd.objects.filter(incident_id__in=wanted):
                self.closed_at[end.incident_id, end.episode] = end.resolved_at

    def _known_occurrences(self) -> dict[tuple[str, str], _Known]:
        rows = locked(
            Occurrence.objects.filter(
                AnyOf("delivery", [failure.delivery for failure in self.failures]),
                tenant__in={failure.tenant for failure in self.failures},
                source=self.failures[0].source,
            )
        )
        columns = rows.values_list("tenant", "delivery", "id", "letter_id", "caught")
        return {(tenant, delivery): _Known(*known) for tenant, delivery, *known in columns}

    # Deciding

    def _target(self, failure: Failure) -> Incident:
        incident = self.by_key.get(self._key(failure))
        if incident is None:
            raise PlanOvertaken
        return incident

    def _add_new_letter(self, incident: Incident, failure: Failure) -> None:
        self._open_for(incident)
        self.changed.add(incident.id)
        incident.letter_count += 1
        incident.unresolved_count += 1
        incident.note_occurrence(failure.happened_at)
        if failure.is_held:
            self._count_held(incident, failure)
        else:
            self._break_acknowledgement(incident, failure)

    def _count_held(self, incident: Incident, failure: Failure) -> None:
        """Count a message that is newly put aside. Whoever has placed the hold has its incident from the beginning."""
        hold = self.holds.get(failure.hold_id)
        if hold is None:
            return
        self.held[hold.id] += 1
        if incident.state == IncidentState.OPEN and (incident.id in self.opened or incident.id in self.reopened):
            incident.take(by=hold.placed_by, name=hold.placed_by_name, at=self.now)

    def _open_for(self, incident: Incident) -> None:
        """Make the incident one that may have an unresolved letter."""
        if incident.is_resolved:
            incident.reopen("recurred", self.now)
            self.reopened[incident.id] = "recurred"

    def _break_acknowledgement(self, incident: Incident, failure: Failure) -> None:
        """An acknowledgement holds, except for the reasons of C1; one incident per job is source system A's (A3)."""
        reason = ""
        if failure.is_failed_repair:
            reason = "repair_failed"
        elif failure.severity > incident.severity:
            reason = "severity_rose"
        elif incident.acknowledged_until is not None and incident.occurrence_count > incident.acknowledged_until:
            reason = "count_passed"
        elif incident.grouping == GroupingMode.JOB.value:
            reason = "recurred"
        incident.severity = max(incident.severity, int(failure.severity))
        if reason and incident.state == IncidentState.ACKNOWLEDGED:
            self.relieved[incident.id] = incident.break_acknowledgement(reason)
            self.reopened[incident.id] = reason

    def _add_to_letter(self, letter: DeadLetter, failure: Failure) -> bool:
        """Add an occurrence to a known letter; returns whether it is late."""
        incident = self.incidents[letter.incident_id]
        is_failed_repair = failure.is_failed_repair
        self.changed.add(incident.id)
        letter.occurrence_count += 1
        if failure.is_held and not letter.is_closed(incident):
            # What is known of it stays: it waits for a decision, is on hold, or is under repair already.
            incident.note_occurrence(failure.happened_at)
            self._adopt_message(letter, failure)
            return False
        if letter.is_closed(incident):
            if not failure.is_held and self._is_late(letter, incident, failure):
                incident.note_occurrence(failure.happened_at, is_late=True)
                if is_failed_repair and letter.state == LetterState.RETRYING:
                    # Closed through its incident all the same; but nobody is repairing it any more.
                    letter.state = LetterState.OPEN
                return True
            self._recur(letter, incident, failure)
            judgement = failure.judgement
        else:
            incident.note_occurrence(failure.happened_at)
            judgement = combine(_judgement_of(letter), failure.judgement)
            if is_failed_repair or letter.state == LetterState.HELD:
                letter.state = LetterState.OPEN
            self._break_acknowledgement(incident, failure)
        _describe(letter, failure, judgement)
        return False

    def _is_late(self, letter: DeadLetter, incident: Incident, failure: Failure) -> bool:
        closed_at = letter.closed_at
        if closed_at is None:
            closed_at = self.closed_at.get((incident.id, letter.episode))
        if closed_at is None and incident.is_resolved:
            closed_at = incident.resolved_at
        return closed_at is not None and failure.happened_at <= closed_at

    def _recur(self, letter: DeadLetter, incident: Incident, failure: Failure) -> None:
        """A closed letter that fails again is grouped anew and is unresolved again."""
        # A repair's failure belongs where its repair was asked for; anything else goes to the incident of its cause.
        target = incident if failure.is_failed_repair else self._target(failure)
        if target.id != incident.id:
            incident.letter_count -= 1
            target.letter_count += 1
        if target.is_resolved:
            reason = "repair_failed" if failure.is_failed_repair else "recurred"
            target.reopen(reason, self.now)
            self.reopened[target.id] = reason
        target.unresolved_count += 1
        target.note_occurrence(failure.happened_at)
        if failure.is_held:
            self._count_held(target, failure)
        else:
            self._break_acknowledgement(target, failure)
        self.changed.add(target.id)
        letter.incident = target
        letter.episode = target.episode
        if failure.is_failed_repair or letter.state != LetterState.RETRYING:
            # One whose repair is out still waits for its answer, and nobody may begin another.
            letter.state = LetterState.HELD if failure.is_held else LetterState.OPEN
        letter.hold_id = failure.hold_id
        letter.closed_at = None
        # A discarded letter has no message any more; the new delivery brought it again.
        self._adopt_message(letter, failure)

    def _adopt_message(self, letter: DeadLetter, failure: Failure) -> bool:
        """Take the message that an unresolved letter lacks from a later report of it; returns whether it did.

        A worker that was killed before it had written the message leaves a letter without; the broker sends the
        message again, and the second report of the same delivery brings it (C2: it adds nothing else). A closed letter
        stays without: its message was removed on purpose.
        """
        if letter.message_state != MessageState.MISSING or failure.is_failed_repair:
            return False
        if letter.is_closed(self.incidents[letter.incident_id]):
            return False
        blob = rebind_message(conf.sealer(), failure, letter.id)
        if not blob:
            return False
        self.messages.append((failure, letter.id, blob))
        letter.message_state = failure.message_state
        letter.payload_preview = failure.preview
        letter.expires_at, letter.arguments = failure.expires_at, failure.arguments
        if letter.outcome_class == failure.judgement.outcome:
            # Its reason said that there was no message.
            letter.outcome_reason = failure.judgement.reason[:300]
        return True

    def _replace_presumed_loss(self, known: _Known, letter: DeadLetter, failure: Failure) -> None:
        """A delivery presumed lost has been heard of after all, or one put aside was delivered again and has failed.

        What it said now replaces what was told of it.
        """
        if letter.state == LetterState.HELD:
            letter.state = LetterState.OPEN
        told: dict[str, Any] = {
            "caught": failure.caught,
            "error_class": failure.error_class,
            "error_text": failure.error_text,
            "outcome_class": failure.judgement.outcome,
            "outcome_reason": failure.judgement.reason[:300],
            "happened_at": failure.happened_at,
        }
        if failure.traceback_digest:
            TRACEBACKS.insert([(failure.traceback_digest, failure.traceback)])
            told["traceback_id"] = failure.traceback_digest
        Occurrence.objects.filter(id=known.id).update(**told)
        _describe(letter, failure, combine(_judgement_of(letter), failure.judgement))

    def _result(self, failure: Failure, letter_id: UUID, *, is_new_occurrence: bool) -> Recorded:
        letter = self.letters.get(self._identity(failure))
        return Recorded(
            failure=failure,
            letter_id=letter_id,
            incident_id=letter.incident_id if letter is not None else None,
            is_new_letter=False,
            is_new_occurrence=is_new_occurrence,
        )

    # Writing

    def _write(
        self,
        new_letters: list[Failure],
        new_occurrences: list[tuple[Failure, UUID, bool]],
        changed: list[DeadLetter],
    ) -> None:
        try:
            self._insert(new_letters, new_occurrences)
        except IntegrityError as error:
            if is_unique_violation(error):
                raise PlanOvertaken from error
            raise
        MESSAGES.insert(
            [
                (letter_id, blob, failure.key_id, failure.message_digest, self.now)
                for failure, letter_id, blob in self.messages
                if blob
            ]
        )
        _save_letters(changed)
        # The last lock of all, in the order of their ids.
        for hold_id, count in sorted(self.held.items()):
            Hold.objects.filter(id=hold_id).update(letter_count=F("letter_count") + count)
        Incident.objects.save_recorded([row for row in self.incidents.values() if row.id in self.changed])
        unused = self.opened - self.changed
        if unused:
            Incident.objects.filter(id__in=unused).delete()
        self._audit(new_letters)

    def _insert(self, new_letters: list[Failure], new_occurrences: list[tuple[Failure, UUID, bool]]) -> None:
        # Not ON CONFLICT DO NOTHING, which makes PostgreSQL look into each unique index twice: that another recorder
        # was first is rare, and then all of it is planned anew.
        LETTERS.insert([self._letter_row(failure) for failure in new_letters])
        tracebacks = {f.traceback_digest: f.traceback for f, _id, _late in new_occurrences if f.traceback_digest}
        # In the order of their digests: two recorders inserting the same ones would otherwise wait for each other.
        TRACEBACKS.insert(sorted(tracebacks.items()))
        OCCURRENCES.insert([self._occurrence_row(*item) for item in new_occurrences])

    def _letter_row(self, failure: Failure) -> tuple[Any, ...]:
        incident = self._target(failure)
        return (
            failure.letter_id, failure.tenant, failure.source, failure.fingerprint, incident.id, incident.episode,
            failure.job_type, failure.queue, failure.job_id, failure.task_id, failure.actor_type, failure.actor_id,
            HELD if failure.is_held else OPEN, str(failure.judgement.outcome), failure.judgement.reason[:300],
            str(failure.caught), _error_code(failure), failure.error_class, failure.error_text,
            failure.call_site, _attempts(failure), 1, failure.preview, str(failure.message_state),
            failure.exchange, failure.routing_key, failure.priority, failure.root_id, failure.parent_id,
            failure.group_id, failure.chord_id, failure.worker, failure.release, failure.trace_id,
            failure.sentry_id, failure.is_set_aside, failure.hold_id, bool(failure.report_id), bool(failure.outbox_id),
            failure.expires_at, failure.arguments, 1, failure.turn_at or failure.happened_at, failure.happened_at,
        )  # fmt: skip

    def _occurrence_row(self, failure: Failure, letter_id: UUID, is_late: bool) -> tuple[Any, ...]:
        return (
            new_id(), letter_id, failure.tenant, failure.source, failure.delivery, failure.task_id, failure.retries,
            failure.repair_id, failure.happened_at, failure.is_exact, self.now, is_late, str(failure.caught),
            str(failure.judgement.outcome), failure.judgement.reason[:300], failure.error_class,
            failure.error_text, failure.traceback_digest or None, failure.worker, failure.release,
        )  # fmt: skip

    def _audit(self, new_letters: list[Failure]) -> None:
        outcomes: dict[tuple[Any, ...], dict[str, JsonValue]] = {}
        events = [
            AuditEntry(
                action=LETTER_HELD if failure.is_held else LETTER_RECORDED,
                operator=SYSTEM,
                capability=SYSTEM_CAPABILITY,
                resource=Resource(
                    tenant=failure.tenant,
                    actor_type=failure.actor_type,
                    actor_id=failure.actor_id,
                    target_type="dead_letter",
                    target_id=str(failure.letter_id),
                ),
                key=f"dead-letter:{failure.source}:{failure.fingerprint}",
                outcome=self._outcome(failure, outcomes),
            )
            for failure in new_letters
        ]
        for incident_id in sorted(self.opened | set(self.reopened)):
            incident = self.incidents[incident_id]
            if incident_id not in self.changed:
                continue
            reason = self.reopened.get(incident_id, "")
            events.append(incident_event(incident, reason, self.now, held_by=self.relieved.get(incident_id, "")))
        audit.record_many(events, at=self.now)

    def _outcome(self, failure: Failure, known: dict[tuple[Any, ...], dict[str, JsonValue]]) -> dict[str, JsonValue]:
        """Return what the audit row of a new letter says (A5); the same mapping for all that say the same."""
        incident_id = self._target(failure).id
        key = (incident_id, failure.job_type, bool(failure.report_id), bool(failure.outbox_id))
        outcome = known.get(key)
        if outcome is None:
            outcome = known[key] = {
                "errorCode": _error_code(failure),
                "hasOutboxReference": bool(failure.outbox_id),
                "hasReportReference": bool(failure.report_id),
                "incident": str(incident_id),
                "jobType": failure.job_type,
                "version": 1,
            }
        return outcome


def _metadata(failure: Failure) -> dict[str, JsonValue]:
    """Return what A4 keeps with the incident: report and outbox are one job's, so only where it has one job."""
    shared: dict[str, JsonValue] = {"jobType": failure.job_type, "sourceQueue": failure.queue}
    if failure.grouping != GroupingMode.JOB:
        return shared
    return {**shared, "outboxId": failure.outbox_id or None, "reportId": failure.report_id or None}


def incident_event(incident: Incident, reason: str, now: datetime, *, held_by: str = "") -> AuditEntry:
    """Return the audit event of an incident that opened ("" as reason) or opened again (C8).

    ``held_by`` is who had it until then: the row forgets (C1).
    """
    outcome: dict[str, JsonValue] = {"episode": incident.episode, "number": incident.number, "reason": reason}
    if held_by:
        outcome["heldBy"] = held_by
    return AuditEntry(
        action=INCIDENT_REOPENED if reason else INCIDENT_OPENED,
        operator=SYSTEM,
        capability=SYSTEM_CAPABILITY,
        resource=incident.resource,
        key=f"opened:{incident.id}:{incident.episode}:{reason}:{now.isoformat()}",
        outcome=outcome,
    )


def _holds_of(failures: Sequence[Failure]) -> dict[UUID | None, Hold]:
    """Return the holds that have put messages aside, by id; one that is not there any more is left out."""
    wanted = {failure.hold_id for failure in failures if failure.hold_id is not None}
    return {hold.id: hold for hold in Hold.objects.filter(id__in=wanted)} if wanted else {}


def _is_better_known(told: str, now: Caught) -> bool:
    """Say whether a second report of one delivery is to replace the first.

    What was presumed lost gives way to what has happened. So does what was put aside, and was delivered again when no
    hold kept it; but not what may have run to its having been put aside the second time.
    """
    if told == Caught.WORKER_LOST:
        return now not in (Caught.WORKER_LOST, Caught.HELD)
    return told == Caught.HELD and now is not Caught.HELD


def _error_code(failure: Failure) -> str:
    return "held" if failure.is_held else "queue_retries_exhausted"


def _attempts(failure: Failure) -> int:
    """Return how many attempts have run: of what was put aside, the one that it was to be has not."""
    return failure.retries if failure.is_held else failure.retries + 1


def _judgement_of(letter: DeadLetter) -> Judgement:
    return Judgement(outcome=OutcomeClass(letter.outcome_class), reason=letter.outcome_reason)


def _describe(letter: DeadLetter, failure: Failure, judgement: Judgement) -> None:
    """Replace a letter's details by its newest failure's; when it was first seen stays (A3)."""
    letter.outcome_class = judgement.outcome
    letter.outcome_reason = judgement.reason[:300]
    letter.caught = failure.caught
    letter.error_class = failure.error_class
    letter.error_text = failure.error_text
    letter.call_site = failure.call_site
    letter.attempts = _attempts(failure)
    letter.worker = failure.worker
    letter.release = failure.release
    letter.last_seen_at = max(letter.last_seen_at, failure.happened_at)


CHANGED = (
    "incident_id", "episode", "state", "outcome_class", "outcome_reason", "caught", "error_class", "error_text",
    "call_site", "attempts", "message_state", "payload_preview", "expires_at", "arguments", "worker", "release",
    "hold_id", "occurrence_count", "last_seen_at", "closed_at",
)  # fmt: skip


def _save_letters(letters: list[DeadLetter]) -> None:
    """Write the changed columns of locked letters, one statement however many they are."""
    if not letters:
        return
    plain: Callable[[Any], Any] = lambda value: value  # noqa: E731
    if connection.vendor == "sqlite":
        plain = lambda value: plain_value(connection, value)  # noqa: E731
    assignments = ", ".join(f"{name} = %s" for name in CHANGED)
    with connection.cursor() as cursor:
        cursor.executemany(
            f"UPDATE {DeadLetter._meta.db_table} SET {assignments} WHERE id = %s",  # noqa: S608
            [[plain(getattr(letter, name)) for name in (*CHANGED, "id")] for letter in letters],
        )


def _draw_numbers(count: int) -> list[int]:
    """Return ``count`` fresh incident numbers; a number drawn in a transaction that fails is not used again."""
    rows = IncidentNumber.objects.bulk_create([IncidentNumber() for _ in range(count)])
    return sorted(row.id for row in rows)


INCIDENTS = RowWriter(
    Incident,
    (
        "id", "number", "tenant", "source", "key", "grouping", "severity", "category", "state", "title", "summary",
        "job_type", "entity_type", "entity_id", "metadata", "occurrence_count", "letter_count", "unresolved_count",
        "late_count", "first_seen_at", "last_seen_at", "episode", "opened_at",
    ),
    suffix="ON CONFLICT (tenant, source, key) DO NOTHING",
)  # fmt: skip
LETTERS = RowWriter(
    DeadLetter,
    (
        "id", "tenant", "source", "fingerprint", "incident", "episode", "job_type", "queue", "job_id", "task_id",
        "actor_type", "actor_id", "state", "outcome_class", "outcome_reason", "caught", "error_code", "error_class",
        "error_text", "call_site", "attempts", "payload_version", "payload_preview", "message_state", "exchange",
        "routing_key", "priority", "root_id", "parent_id", "group_id", "chord_id", "worker", "release", "trace_id",
        "sentry_id", "is_set_aside", "hold_id", "has_report", "has_outbox", "expires_at", "arguments",
        "occurrence_count", "first_seen_at", "last_seen_at",
    ),
)  # fmt: skip
TRACEBACKS = RowWriter(TracebackText, ("digest", "text"), suffix="ON CONFLICT (digest) DO NOTHING")
OCCURRENCES = RowWriter(
    Occurrence,
    (
        "id", "letter", "tenant", "source", "delivery", "task_id", "retries", "repair_id", "happened_at", "is_exact",
        "recorded_at", "is_late", "caught", "outcome_class", "outcome_reason", "error_class", "error_text",
        "traceback", "worker", "release",
    ),
)  # fmt: skip
MESSAGES = RowWriter(
    SealedMessage,
    ("letter", "blob", "key_id", "digest", "stored_at"),
    suffix="ON CONFLICT (letter_id) DO NOTHING",
)
