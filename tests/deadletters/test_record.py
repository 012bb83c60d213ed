"""Recording: what a batch of failures does to letters, occurrences, incidents and the audit trail."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from typing import Any

import pytest
from django.db import connection, connections, transaction

from deadletters import conf
from deadletters.grouping import GroupingMode
from deadletters.intake import open_message
from deadletters.journal.events import Caught, ErrorReport, MessageState
from deadletters.journal.message import unpack_message
from deadletters.models import DeadLetter, LetterState, Occurrence, SealedMessage, TracebackText
from deadletters.outcome import OutcomeClass
from deadletters.policy import TaskPolicySpec
from deadletters.recorder import record_failures
from grants.models import AuditEvent
from incidents.models import EpisodeEnd, Incident, IncidentState, Severity
from incidents.services import acknowledge_incident, resolve_incident
from opsconsole.core.database import database_now
from tests import factories
from tests.cast import Cast

pytestmark = pytest.mark.django_db

OTHER_ERROR = replace(factories.REFUSED, error_class="shop.errors.CardDeclined", text="card declined")


def counts(incident: Incident) -> tuple[int, int, int, int]:
    incident.refresh_from_db()
    return (
        incident.letter_count,
        incident.unresolved_count,
        incident.occurrence_count,
        incident.late_count,
    )


def test_failures_with_one_cause_are_letters_of_one_incident() -> None:
    """INC-01: five hundred jobs with five hundred ports in their errors are one incident with the right count."""
    failures = [
        factories.failure(replace(factories.REFUSED, text=f"Connection refused (127.0.0.1:{49152 + number})"))
        for number in range(500)
    ]
    factories.record(*failures)
    incident = Incident.objects.get()
    assert counts(incident) == (500, 500, 500, 0)
    assert DeadLetter.objects.unresolved().count() == 500
    assert incident.severity == Severity.HIGH
    assert incident.category == "queue_dead_letter"


def test_one_job_that_fails_twenty_times_is_one_letter_with_twenty_occurrences() -> None:
    """INC-01, A3: each delivery is an occurrence; first_seen_at stays, last_seen_at moves."""
    task_id = "11111111-1111-4111-8111-111111111111"
    for number in range(20):
        factories.record(factories.failure(task_id=task_id, retries=number, ago=20 - number))
    letter = DeadLetter.objects.get()
    incident = Incident.objects.get()
    assert letter.occurrence_count == 20
    assert counts(incident) == (1, 1, 20, 0)
    assert (letter.last_seen_at - letter.first_seen_at).total_seconds() > 18
    assert incident.first_seen_at == letter.first_seen_at
    assert incident.last_seen_at == letter.last_seen_at


def test_a_delivery_reported_twice_counts_once() -> None:
    """C2: a second report of one delivery changes nothing, in one batch or in two."""
    first = factories.failure(task_id="twice")
    factories.record(first, replace(first, error_text="another text"))
    factories.record(first)
    letter = DeadLetter.objects.get()
    assert letter.occurrence_count == 1
    assert Occurrence.objects.count() == 1
    assert counts(letter.incident) == (1, 1, 1, 0)
    assert letter.error_text == first.error_text


def test_two_error_classes_of_one_job_type_are_two_incidents() -> None:
    """INC-01: different causes do not hide each other."""
    factories.record(factories.failure(), factories.failure(OTHER_ERROR))
    assert Incident.objects.count() == 2


def test_an_unresolved_letter_keeps_its_incident_whatever_its_newest_error() -> None:
    factories.record(factories.failure(task_id="same"))
    factories.record(factories.failure(OTHER_ERROR, task_id="same", retries=1))
    letter = DeadLetter.objects.get()
    assert Incident.objects.count() == 1
    assert letter.error_class == "shop.errors.CardDeclined"
    assert counts(letter.incident) == (1, 1, 2, 0)


def test_recording_writes_one_audit_event_for_the_letter_and_one_for_the_incident() -> None:
    """A5, C8: the key is made of the fingerprint, the actor is the system, and a second recording adds none."""
    failure = factories.failure(task_id="once")
    factories.record(failure)
    factories.record(factories.failure(task_id="once", retries=1))
    events = AuditEvent.objects.filter(action="queue.dead_lettered")
    assert [event.idempotency_key for event in events] == [f"dead-letter:tests:{failure.fingerprint}"]
    assert events[0].operator_kind == "system"
    assert AuditEvent.objects.filter(action="operations.incident_opened").count() == 1


def test_the_letter_describes_the_failure_and_never_the_payload_in_its_audit_event() -> None:
    """A4, A5: queue, job, error code and class are readable; the arguments stand in no audit row."""
    factories.record(factories.failure(body=b'[["hunter2-in-clear"], {"password": "hunter2"}, {}]'))
    letter = DeadLetter.objects.get()
    assert letter.error_code == "queue_retries_exhausted"
    assert letter.queue == "celery"
    assert "[redacted]" in letter.payload_preview
    assert "password" in letter.payload_preview
    for event in AuditEvent.objects.all():
        assert "hunter2" not in event.outcome


def test_the_message_is_kept_sealed_for_its_letter_alone() -> None:
    factories.record(factories.failure(body=b'[[1], {"secret": "hunter2"}, {}]'), factories.failure())
    first, second = DeadLetter.objects.order_by("id")
    stored = SealedMessage.objects.get(letter=first)
    assert b"hunter2" not in bytes(stored.blob)
    raw = unpack_message(open_message(conf.sealer(), bytes(stored.blob), first.id))
    assert stored.digest == hashlib.sha256(raw.body).hexdigest()
    assert raw.body == b'[[1], {"secret": "hunter2"}, {}]'
    with pytest.raises(Exception, match="seal"):
        open_message(conf.sealer(), bytes(stored.blob), second.id)


def test_a_long_message_is_compressed_before_it_is_sealed() -> None:
    body = b'[["' + b"x" * 200_000 + b'"], {}, {}]'
    factories.record(factories.failure(body=body))
    letter = DeadLetter.objects.get()
    blob = bytes(SealedMessage.objects.get().blob)
    assert len(blob) < 5_000
    assert unpack_message(open_message(conf.sealer(), blob, letter.id)).body == body


def test_a_traceback_that_differs_in_the_errors_words_alone_is_stored_once() -> None:
    """The error's own text ends a traceback and is kept in its occurrence; together they are the whole again."""
    frames = (
        'Traceback (most recent call last):\n  File "shop.py", line 7, in pay\n    charge()\nshop.errors.Declined: '
    )
    for words in ("card 1 declined", "card 2\ndeclined"):
        error = replace(factories.REFUSED, text=words, traceback=f"{frames}{words}\n")
        factories.record(factories.failure(error))
    assert [row.text for row in TracebackText.objects.all()] == [frames]
    told = {one.traceback_text for one in Occurrence.objects.select_related("traceback")}
    assert told == {f"{frames}card 1 declined\n", f"{frames}card 2\ndeclined\n"}


@pytest.mark.parametrize(
    ("text", "traceback"),
    [
        ("", "Traceback\nshop.errors.Declined\n"),
        ("declined", "Traceback\nshop.errors.Declined: declined\nTried twice."),
        ("x" * 5_000, f"Traceback\nshop.errors.Declined: {'x' * 5_000}"),
    ],
)
def test_a_traceback_that_does_not_end_in_the_errors_words_is_stored_whole(text: str, traceback: str) -> None:
    factories.record(factories.failure(replace(factories.REFUSED, text=text, traceback=traceback)))
    occurrence = Occurrence.objects.select_related("traceback").get()
    assert occurrence.traceback_text == f"{traceback.rstrip()}\n"


def test_one_traceback_is_stored_once() -> None:
    factories.record(*[factories.failure() for _ in range(10)])
    assert TracebackText.objects.count() == 1
    assert Occurrence.objects.filter(traceback__isnull=False).count() == 10


@pytest.mark.parametrize(
    "text",
    ["cannot parse \x00\x01 header", "lone \ud800 surrogate", "x" * 30_000_000, "<script>alert(1)</script>"],
    ids=["nul", "surrogate", "30 MB", "markup"],
)
def test_a_hostile_error_text_is_one_letter_on_both_databases(text: str) -> None:
    """CAP-01: what a database refuses is altered visibly and costs no letter."""
    factories.record(factories.failure(replace(factories.REFUSED, text=text)))
    letter = DeadLetter.objects.get()
    assert 0 < len(letter.error_text) <= 4_000
    assert "\x00" not in letter.error_text


def test_over_long_names_stay_distinct() -> None:
    """CAP-01 d, A2, C10: job ids and queue names that are cut keep a hash beside them."""
    for last in "ab":
        factories.record(factories.failure(task_id="x" * 700 + last, queue="q" * 300 + last))
    letters = DeadLetter.objects.all()
    assert len({letter.fingerprint for letter in letters}) == 2
    assert len({letter.job_id for letter in letters}) == 2
    assert all(len(letter.fingerprint) <= 500 and len(letter.queue) <= 200 for letter in letters)


def test_a_body_that_is_no_message_is_a_letter_that_says_so() -> None:
    factories.record(
        factories.failure(body=b"[[NaN, Infinity, -Infinity], {}, {}]"), factories.failure(body=b"\x80\x04N.")
    )
    previews = list(DeadLetter.objects.order_by("id").values_list("payload_preview", flat=True))
    assert "NaN" in previews[0]
    assert "undecodable" in previews[1]


def test_a_message_without_a_task_is_invalid_and_names_no_job() -> None:
    """A1, A2: the fingerprint names the message instead of a job."""
    factories.record(factories.failure(task="", task_id="", caught=Caught.REJECTED_MESSAGE, message_digest="d" * 64))
    letter = DeadLetter.objects.get()
    assert letter.job_type == "invalid"
    assert letter.job_id == ""
    assert letter.fingerprint == f"celery:message:{'d' * 64}"


def test_a_tenant_named_like_the_wildcard_is_stored_under_the_default() -> None:
    factories.record(factories.failure(tenant="*", actor_type="*", actor_id="*"))
    letter = DeadLetter.objects.get()
    assert (letter.tenant, letter.actor_type, letter.actor_id) == ("default", "(any)", "(any)")


def test_a_new_letter_leaves_an_acknowledged_incident_acknowledged(cast: Cast) -> None:
    """C1: the acknowledgement holds while the same cause goes on; the count since then is readable."""
    factories.record(factories.failure())
    incident = Incident.objects.get()
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="take")
    factories.record(*[factories.failure() for _ in range(3)])
    incident.refresh_from_db()
    assert incident.state == IncidentState.ACKNOWLEDGED
    assert incident.since_acknowledged == 3
    assert incident.acknowledged_by == cast.ada.ref


def test_a_rise_in_severity_breaks_the_acknowledgement_and_clears_it(cast: Cast) -> None:
    """C1: the old holder does not stay written on an incident that is open again."""
    factories.record(factories.failure())
    incident = Incident.objects.get()
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="take")
    critical = [TaskPolicySpec(pattern="shop.*", severity="critical")]
    factories.record(factories.failure(policies=critical))
    incident.refresh_from_db()
    assert (incident.state, incident.severity) == (IncidentState.OPEN, Severity.CRITICAL)
    assert incident.reopened_reason == "severity_rose"
    assert (incident.acknowledged_by, incident.acknowledged_at) == ("", None)
    assert AuditEvent.objects.filter(action="operations.incident_reopened").count() == 1


def test_a_count_chosen_at_acknowledging_breaks_it_when_it_is_passed(cast: Cast) -> None:
    """C1"""
    factories.record(factories.failure())
    incident = Incident.objects.get()
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="take", further=2)
    factories.record(factories.failure(), factories.failure())
    incident.refresh_from_db()
    assert incident.state == IncidentState.ACKNOWLEDGED
    factories.record(factories.failure())
    incident.refresh_from_db()
    assert (incident.state, incident.reopened_reason) == (IncidentState.OPEN, "count_passed")


def test_one_incident_per_job_opens_again_with_every_recurrence(cast: Cast) -> None:
    """A3, C1: with INCIDENT_GROUPING = "job" each letter has an incident of its own that any recurrence opens."""
    factories.record(factories.failure(mode=GroupingMode.JOB, task_id="a"))
    factories.record(factories.failure(mode=GroupingMode.JOB, task_id="b"))
    assert Incident.objects.count() == 2
    incident = Incident.objects.get(letters__task_id="a")
    assert (incident.entity_type, incident.entity_id) == ("queue_job", "a")
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="take")
    factories.record(factories.failure(mode=GroupingMode.JOB, task_id="a", retries=1))
    incident.refresh_from_db()
    assert incident.state == IncidentState.OPEN
    assert incident.acknowledged_at is None
    resolve_incident(
        incident_id=incident.id, by=cast.ada, key="done", code="gone", summary="it went away", unrepaired=1
    )
    factories.record(factories.failure(mode=GroupingMode.JOB, task_id="a", retries=2))
    incident.refresh_from_db()
    assert (incident.state, incident.resolution_code, incident.resolved_at) == (IncidentState.OPEN, "", None)


def test_a_new_letter_reopens_a_resolved_incident_and_inherits_nothing(cast: Cast) -> None:
    """C3, C7: the old resolution stays readable with its episode; the old letters stay closed with it."""
    factories.record(factories.failure(), factories.failure())
    incident = Incident.objects.get()
    acknowledge_incident(incident_id=incident.id, by=cast.ada, key="take")
    resolve_incident(
        incident_id=incident.id, by=cast.ada, key="done", code="gone", summary="it went away", unrepaired=2
    )
    factories.record(factories.failure())
    incident.refresh_from_db()
    assert (incident.state, incident.episode, incident.reopened_reason) == (IncidentState.OPEN, 2, "recurred")
    assert (incident.acknowledged_by, incident.resolved_by, incident.resolution_summary) == ("", "", "")
    assert counts(incident) == (3, 1, 3, 0)
    assert DeadLetter.objects.unresolved().count() == 1
    end = EpisodeEnd.objects.get()
    assert (end.episode, end.resolution_summary, end.unrepaired_count) == (1, "[gone] it went away", 2)


def test_an_old_failure_of_a_closed_letter_is_late_and_changes_nothing(cast: Cast) -> None:
    """C3: it happened before the letter was closed, so it is counted and reopens nothing."""
    factories.record(factories.failure(task_id="late", ago=60))
    incident = Incident.objects.get()
    resolve_incident(
        incident_id=incident.id, by=cast.ada, key="done", code="gone", summary="it went away", unrepaired=1
    )
    factories.record(factories.failure(task_id="late", retries=1, ago=30))
    incident.refresh_from_db()
    assert incident.state == IncidentState.RESOLVED
    assert counts(incident) == (1, 0, 2, 1)
    assert Occurrence.objects.filter(is_late=True).count() == 1


def test_a_closed_letter_that_fails_again_is_unresolved_again(cast: Cast) -> None:
    """C3: it is grouped anew by its newest cause, and no resolved incident hides it."""
    factories.record(factories.failure(task_id="again"))
    first = Incident.objects.get()
    resolve_incident(incident_id=first.id, by=cast.ada, key="done", code="gone", summary="it went away", unrepaired=1)
    factories.record(factories.failure(OTHER_ERROR, task_id="again", retries=1))
    letter = DeadLetter.objects.get()
    assert letter.incident_id != first.id
    assert letter.state == LetterState.OPEN
    assert counts(first) == (0, 0, 1, 0)
    assert counts(letter.incident) == (1, 1, 1, 0)
    assert list(DeadLetter.objects.unresolved()) == [letter]


def test_the_outcome_class_is_the_worst_of_every_attempt() -> None:
    """C19: a safe failure after one that may have happened leaves the letter ambiguous, with the reason."""
    policies = [TaskPolicySpec(pattern="shop.*", effects="outside")]
    factories.record(factories.failure(factories.TIMED_OUT, task_id="worst", policies=policies))
    factories.record(factories.failure(factories.REFUSED, task_id="worst", retries=1, policies=policies))
    letter = DeadLetter.objects.get()
    assert letter.outcome_class == OutcomeClass.AMBIGUOUS
    assert letter.outcome_reason


def test_a_presumed_loss_gives_way_to_what_the_delivery_said_later() -> None:
    lost = ErrorReport(error_class="WorkerLost", text="the worker died")
    factories.record(factories.failure(lost, task_id="lost", caught=Caught.WORKER_LOST))
    factories.record(factories.failure(task_id="lost"))
    letter = DeadLetter.objects.get()
    assert (letter.caught, letter.error_class) == (Caught.FAILURE, "shop.errors.MailhubDown")
    assert letter.occurrence_count == 1


def test_a_second_report_brings_the_message_that_a_killed_worker_had_not_written() -> None:
    """C2: a redelivery's report of the same delivery adds the message it lacked, and nothing else."""
    whole = factories.failure(task_id="killed")
    lacking = replace(whole, blob=b"", key_id="", message_state=MessageState.MISSING, preview="")
    factories.record(lacking)
    letter = DeadLetter.objects.get()
    assert letter.message_state == MessageState.MISSING
    # Prepared anew, so sealed for a letter of its own.
    factories.record(factories.failure(task_id="killed"))
    letter.refresh_from_db()
    assert (letter.message_state, letter.occurrence_count, letter.payload_preview) == ("full", 1, whole.preview)
    assert counts(letter.incident) == (1, 1, 1, 0)
    stored = SealedMessage.objects.get(letter=letter)
    assert unpack_message(open_message(conf.sealer(), bytes(stored.blob), letter.id)).body


def test_a_second_report_does_not_bring_back_a_message_that_was_discarded() -> None:
    """C2: telling the database again what it knows leaves a discarded letter without its message."""
    whole = factories.failure(task_id="discarded")
    factories.record(whole)
    letter = DeadLetter.objects.get()
    SealedMessage.objects.all().delete()
    DeadLetter.objects.update(state="discarded", closed_at=database_now(), message_state="missing", payload_preview="")
    factories.record(whole)
    letter.refresh_from_db()
    assert (letter.message_state, letter.payload_preview) == ("missing", "")
    assert not SealedMessage.objects.exists()


def test_an_incomplete_message_is_a_letter_that_says_what_is_missing() -> None:
    factories.record(factories.failure(message_state=MessageState.TOO_LARGE))
    letter = DeadLetter.objects.get()
    assert letter.message_state == MessageState.TOO_LARGE
    assert "not fully captured" in letter.payload_preview


def test_the_database_refuses_a_resolved_incident_with_an_unresolved_letter() -> None:
    factories.record(factories.failure())
    with pytest.raises(Exception, match=r"ops_incident_hides_no_letter|CHECK"), transaction.atomic():
        Incident.objects.update(state=IncidentState.RESOLVED, resolved_at=database_now())


def test_a_batch_of_new_failures_takes_a_fixed_number_of_statements(django_assert_max_num_queries: Any) -> None:
    """A hundred failures cost as many statements as one, which is why a drainer keeps up."""
    failures = [factories.failure() for _ in range(100)]
    with django_assert_max_num_queries(20 if connection.vendor == "postgresql" else 230):
        factories.record(*failures)


@pytest.mark.django_db(transaction=True)
def test_eight_recorders_of_the_same_letters_count_exactly(cast: Cast) -> None:
    """INC-04: random orders, one incident, a bulk acknowledgement beside them: no error, every count exact."""
    import random

    rounds, recorders = 10, 8
    barrier = threading.Barrier(recorders)
    errors: list[BaseException] = []

    def run(recorder: int) -> None:
        try:
            barrier.wait()
            for number in range(rounds):
                batch = [
                    factories.failure(
                        replace(factories.REFUSED, error_class=f"shop.E{letter % 4}"),
                        task_id=f"job-{letter}",
                        retries=recorder * 1_000 + number,
                    )
                    for letter in range(20)
                ]
                random.shuffle(batch)
                with transaction.atomic():
                    record_failures(batch, now=database_now())
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(recorders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(DeadLetter.objects.values_list("occurrence_count", flat=True)) == [rounds * recorders] * 20
    for incident in Incident.objects.all():
        assert incident.occurrence_count == Occurrence.objects.filter(letter__incident=incident).count()
        assert incident.letter_count == incident.unresolved_count == 5
