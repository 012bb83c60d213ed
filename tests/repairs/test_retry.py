"""Planning a retry: what it writes, what it refuses, and that it happens once."""

from __future__ import annotations

import json
import threading
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from deadletters import conf
from deadletters.journal.events import MessageState
from deadletters.models import DeadLetter, LetterState, SealedMessage, TaskPolicy, WorkerNode
from deadletters.outcome import OutcomeClass
from grants.actions import Action
from grants.errors import AccessDenied, IdempotencyKeyReused
from grants.models import AuditEvent, ScopeUserGrant
from incidents.errors import IncidentChanged, IncidentNotFound, IncidentResolved
from incidents.models import Incident, IncidentState
from incidents.services import resolve_incident
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from repairs.errors import (
    ArgumentsDoNotFit,
    IncidentNotRepairable,
    JobNotServed,
    JobOvertaken,
    LetterNotFound,
    LetterTooOld,
    MessageExpired,
    MessageNotCaptured,
    MessageSealedWithUnknownKey,
    MessageTooDeep,
    ProviderOutcomeUnknown,
    SelectionDrifted,
    SelectionInvalid,
    TooMany,
)
from repairs.models import ActionState, RepairAction, RepairBatch
from repairs.prospects import Prospect, judge_jobs, prospect_of, select_open
from repairs.refusals import Served
from repairs.selectors import preview_retry
from repairs.services import (
    INCIDENT_RETRIED,
    cancel_repair,
    close_letter_as_done,
    close_letters_as_done,
    discard_letter,
    retry_incident,
    retry_letter,
)
from tests import factories
from tests.cast import Cast, give

pytestmark = pytest.mark.django_db


def node(*, tasks: str = '{"shop.send_mail": ""}', queues: str = '["celery"]', **fields: Any) -> WorkerNode:
    now = database_now()
    values: dict[str, Any] = {
        "id": "w1", "source": "tests", "host": "h", "pid": 1, "tasks": tasks, "queues": queues, "started_at": now,
        "seen_at": now,
    }  # fmt: skip
    return WorkerNode.objects.create(**{**values, **fields})


def test_a_retry_is_planned_under_a_new_id_and_takes_the_incident(cast: Cast) -> None:
    """B5, A12, C11, C17: the letter is retrying, not done; the incident that nobody had has a holder."""
    letter = factories.dead_letter()
    done = retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    letter.refresh_from_db()
    action = RepairAction.objects.get()
    assert (done.state, letter.state, action.state) == ("retrying", LetterState.RETRYING, ActionState.PLANNED)
    assert action.new_task_id not in ("", letter.task_id)
    incident = Incident.objects.get()
    assert (incident.state, incident.acknowledged_by_name) == (IncidentState.ACKNOWLEDGED, "olga")
    assert incident.unresolved_count == 1
    event = AuditEvent.objects.get(action="dead-letters.retry")
    assert event.operator_name == "olga"
    for part in (letter.task_id, action.new_task_id, "shop.send_mail", '"providerChecked":false'):
        assert part in event.outcome
    assert "a@example.org" not in event.outcome


def _close_all(by: Any, chosen: list[UUID], **more: Any) -> Any:
    values: dict[str, Any] = {"key": "k", "reason": "it had happened", "reference": "log 4711", **more}
    return close_letters_as_done(incident_id=Incident.objects.get().id, letter_ids=chosen, by=by, **values)


def test_several_jobs_that_had_already_happened_are_closed_each_with_its_row(cast: Cast, monkeypatch: Any) -> None:
    """C19, C11: over several pages; with the last job the incident closes by itself; a key closes nothing twice."""
    monkeypatch.setattr("repairs.services.PAGE", 2)
    chosen = letters(5)
    done = _close_all(cast.olga, chosen)
    assert (done.closed, done.incident_state, done.idempotent_replay) == (5, "resolved", False)
    assert set(DeadLetter.objects.values_list("state", flat=True)) == {"already_done"}
    assert Incident.objects.get().resolution_code == "already_done"
    events = AuditEvent.objects.filter(action="dead-letters.close-as-done")
    assert {event.target_id for event in events} == {str(letter_id) for letter_id in chosen}
    again = _close_all(cast.olga, chosen)
    assert again.idempotent_replay
    assert again.results == done.results
    assert (events.count(), RepairAction.objects.count()) == (5, 5)
    with pytest.raises(IdempotencyKeyReused):
        _close_all(cast.olga, chosen, reason="another")


def test_a_crash_between_two_pages_is_made_good_by_the_same_request(cast: Cast, monkeypatch: Any) -> None:
    """C4: what was closed stays closed once, and the rest follows."""
    monkeypatch.setattr("repairs.services.PAGE", 2)
    chosen = letters(3)
    version = Incident.objects.get().version
    _close_all(cast.olga, sorted(chosen)[:2], version=version)
    done = _close_all(cast.olga, sorted(chosen), version=version)
    assert (done.closed, done.idempotent_replay, done.incident_state) == (3, False, "resolved")
    assert RepairAction.objects.count() == 3


def test_closing_several_refuses_by_itself_what_is_on_its_way(cast: Cast) -> None:
    """C5, C17: and leaves it as it is."""
    chosen = letters(3)
    retry_letter(letter_id=chosen[1], by=cast.olga, key="r")
    done = _close_all(cast.olga, chosen)
    assert {result.letter_id: result.code for result in done.results} == {
        str(chosen[0]): "", str(chosen[1]): "operations_job_overtaken", str(chosen[2]): "",
    }  # fmt: skip
    assert DeadLetter.objects.get(id=chosen[1]).state == LetterState.RETRYING


def test_nothing_is_closed_if_one_is_not_of_the_incident_or_not_there(cast: Cast, monkeypatch: Any) -> None:
    """API-03, GRA-02: the answer is the same for both, whichever page it is on."""
    monkeypatch.setattr("repairs.services.PAGE", 1)
    chosen = letters(1)
    incident = Incident.objects.get()
    other = factories.dead_letter(task="shop.other", tenant="t-b")
    for stranger in (other.id, uuid4()):
        with pytest.raises(LetterNotFound):
            close_letters_as_done(
                incident_id=incident.id, letter_ids=[*chosen, stranger], by=cast.olga, key="k", reason="done"
            )
    for wrong in ([], chosen * 2):
        with pytest.raises(SelectionInvalid):
            close_letters_as_done(incident_id=incident.id, letter_ids=wrong, by=cast.olga, key="k", reason="done")
    assert not RepairAction.objects.exists()
    with pytest.raises(IncidentNotFound):
        close_letters_as_done(incident_id=incident.id, letter_ids=chosen, by=cast.nobody, key="k", reason="done")


def test_a_list_that_is_out_of_date_closes_nothing(cast: Cast) -> None:
    """A10"""
    chosen = letters(2)
    with pytest.raises(IncidentChanged):
        _close_all(cast.olga, chosen, version=Incident.objects.get().version - 1)
    assert not RepairAction.objects.exists()


def test_the_same_key_plans_once_and_another_body_is_refused(cast: Cast) -> None:
    """A9, C4"""
    letter = factories.dead_letter()
    first = retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    again = retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    assert again.idempotent_replay
    assert (again.repair_id, again.new_task_id) == (first.repair_id, first.new_task_id)
    with pytest.raises(IdempotencyKeyReused):
        retry_letter(letter_id=letter.id, by=cast.olga, key="k", provider_checked=True)
    assert RepairAction.objects.count() == 1


def test_a_letter_that_is_being_retried_is_not_retried_again(cast: Cast) -> None:
    """C5, C17: 409 operations_job_overtaken, and nothing changed."""
    letter = factories.dead_letter()
    retry_letter(letter_id=letter.id, by=cast.olga, key="a")
    with pytest.raises(JobOvertaken) as refused:
        retry_letter(letter_id=letter.id, by=cast.ada, key="b")
    assert (refused.value.code, refused.value.status) == ("operations_job_overtaken", 409)
    assert RepairAction.objects.count() == 1


def test_an_outcome_that_may_have_happened_needs_the_providers_word(cast: Cast) -> None:
    """B6, C19: 409 naming the job until the operator has looked; then the earlier attempts no longer count."""
    letter = factories.dead_letter(ambiguous=True)
    with pytest.raises(ProviderOutcomeUnknown) as refused:
        retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    assert letter.job_id in refused.value.detail
    assert RepairAction.objects.count() == 0
    retry_letter(letter_id=letter.id, by=cast.olga, key="k", provider_checked=True, reference="mailhub log 4711")
    letter.refresh_from_db()
    action = RepairAction.objects.get()
    assert (action.provider_answer, action.reference) == ("did_not_happen", "mailhub log 4711")
    assert letter.outcome_class == OutcomeClass.SAFE
    event = AuditEvent.objects.get(action="dead-letters.retry")
    assert '"providerChecked":true' in event.outcome
    assert event.reason == "It had not happened: mailhub log 4711"


def test_already_happened_closes_the_letter_without_a_run(cast: Cast) -> None:
    """C19, C11: the answer is a repair of its own kind, and with the last letter the incident closes by itself."""
    letter = factories.dead_letter(ambiguous=True)
    done = close_letter_as_done(letter_id=letter.id, by=cast.olga, key="k", reason="mailhub has it", reference="4711")
    incident = Incident.objects.get()
    assert (done.state, done.incident_state) == ("already_done", "resolved")
    assert (incident.resolution_code, incident.resolved_by) == ("already_done", "system:system")
    assert RepairAction.objects.get().state == ActionState.SUCCEEDED


def test_discarding_removes_the_message_and_keeps_the_row(cast: Cast) -> None:
    """B8: the audit row keeps job, attempts, ambiguity and cause, never the payload."""
    letter = factories.dead_letter(body=b'[["hunter2-in-clear"], {}, {}]')
    discard_letter(letter_id=letter.id, by=cast.olga, key="k", reason="customer left")
    letter.refresh_from_db()
    assert letter.state == LetterState.DISCARDED
    assert letter.closed_at is not None
    assert letter.payload_preview == ""
    assert not SealedMessage.objects.exists()
    event = AuditEvent.objects.get(action="dead-letters.discard")
    assert event.reason == "customer left"
    assert "shop.errors.MailhubDown" in event.outcome
    assert "hunter2" not in event.outcome
    assert Incident.objects.get().resolution_code == "discarded"


@pytest.mark.parametrize("reason", ["", "   ", "x" * 501])
def test_giving_up_needs_a_reason(cast: Cast, reason: str) -> None:
    """B4"""
    letter = factories.dead_letter()
    for service in (discard_letter, close_letter_as_done):
        with pytest.raises(OpsError) as refused:
            service(letter_id=letter.id, by=cast.olga, key="k", reason=reason)
        assert refused.value.code == "reason_invalid"
    assert not RepairAction.objects.exists()


def test_a_discarded_letter_can_be_neither_retried_nor_discarded(cast: Cast) -> None:
    letter = factories.dead_letter()
    discard_letter(letter_id=letter.id, by=cast.olga, key="k", reason="customer left")
    with pytest.raises(JobOvertaken):
        retry_letter(letter_id=letter.id, by=cast.olga, key="r")
    with pytest.raises(JobOvertaken):
        discard_letter(letter_id=letter.id, by=cast.ada, key="d", reason="once more")


def test_a_task_that_no_live_worker_has_is_refused(cast: Cast) -> None:
    """B7, CAP-03: 503, the letter stays; once a worker has it, the retry is planned."""
    letter = factories.dead_letter()
    served = node(tasks='{"shop.other": ""}')
    with pytest.raises(JobNotServed) as refused:
        retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    assert refused.value.status == 503
    letter.refresh_from_db()
    assert letter.state == LetterState.OPEN
    served.tasks = '{"shop.send_mail": ""}'
    served.save()
    assert retry_letter(letter_id=letter.id, by=cast.olga, key="k").warnings == ()


def test_a_queue_that_no_worker_of_the_task_listens_on_is_refused(cast: Cast) -> None:
    letter = factories.dead_letter(queue="slow")
    node(queues='["celery"]')
    with pytest.raises(JobNotServed, match="slow"):
        retry_letter(letter_id=letter.id, by=cast.olga, key="k")


def test_a_worker_that_has_gone_serves_nothing(cast: Cast) -> None:
    letter = factories.dead_letter()
    node(seen_at=database_now() - factories.seconds(120))
    with pytest.raises(JobNotServed):
        retry_letter(letter_id=letter.id, by=cast.olga, key="k")


def test_where_no_worker_was_ever_seen_the_retry_is_planned_with_a_warning(cast: Cast) -> None:
    letter = factories.dead_letter()
    assert retry_letter(letter_id=letter.id, by=cast.olga, key="k").warnings == ("no_worker_seen",)


def test_arguments_that_do_not_fit_the_live_signature_are_refused(cast: Cast) -> None:
    from celery import Celery

    from deadletters.arguments import describe_signature

    app = Celery(set_as_current=False)

    @app.task(name="shop.send_mail")
    def send_mail(to: str, *, subject: str) -> None: ...

    letter = factories.dead_letter()
    node(tasks=json.dumps({"shop.send_mail": describe_signature(send_mail)}))
    with pytest.raises(ArgumentsDoNotFit, match=r"subject|order"):
        retry_letter(letter_id=letter.id, by=cast.olga, key="k")


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        (MessageState.MISSING, MessageNotCaptured),
        (MessageState.TOO_LARGE, MessageNotCaptured),
        (MessageState.TOO_DEEP, MessageTooDeep),
    ],
)
def test_what_was_not_fully_captured_is_never_sent(cast: Cast, state: MessageState, refusal: type[OpsError]) -> None:
    """RET-01: a retry sends the original or nothing."""
    letter = factories.dead_letter(message_state=state)
    with pytest.raises(refusal):
        retry_letter(letter_id=letter.id, by=cast.olga, key="k")


def test_a_message_under_an_unknown_key_is_kept_and_not_retried(cast: Cast) -> None:
    letter = factories.dead_letter()
    conf.sealer.cache_clear()
    try:
        with override_settings(OPSCONSOLE_KEYS="new:" + "QUJD" * 10 + "QUI=", SECRET_KEY="another"):
            with pytest.raises(MessageSealedWithUnknownKey) as refused:
                retry_letter(letter_id=letter.id, by=cast.olga, key="k")
            assert refused.value.status == 409
    finally:
        conf.sealer.cache_clear()
    assert retry_letter(letter_id=letter.id, by=cast.olga, key="k").state == "retrying"


def test_an_original_that_has_expired_runs_only_when_asked_for(cast: Cast) -> None:
    """RET-02"""
    letter = factories.dead_letter(headers={"expires": "2026-01-01T00:00:00+00:00"})
    with pytest.raises(MessageExpired):
        retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    assert retry_letter(letter_id=letter.id, by=cast.olga, key="k", run_expired=True).state == "retrying"


def aged(*letter_ids: UUID, seconds: float) -> None:
    """Let these letters have failed first so long ago."""
    since = database_now() - factories.seconds(seconds)
    DeadLetter.objects.filter(id__in=letter_ids).update(first_seen_at=since)


def test_a_job_older_than_its_policy_allows_is_refused_and_can_still_be_closed_or_discarded(cast: Cast) -> None:
    """The age counts from the first failure, by the most specific policy of its task; a younger job is retried."""
    TaskPolicy.objects.create(pattern="*", max_age_seconds=60)
    TaskPolicy.objects.create(pattern="shop.*", max_age_seconds=3600)
    old, done, young = (factories.dead_letter() for _ in range(3))
    aged(old.id, done.id, seconds=3700)
    aged(young.id, seconds=3000)
    for run_expired in (False, True):
        with pytest.raises(LetterTooOld) as refused:
            retry_letter(letter_id=old.id, by=cast.olga, key="k", run_expired=run_expired, provider_checked=True)
        assert (refused.value.code, refused.value.status) == ("letter_too_old", 409)
    assert "3600 seconds" in refused.value.detail
    assert not RepairAction.objects.exists()
    assert retry_letter(letter_id=young.id, by=cast.olga, key="k").state == "retrying"
    assert close_letter_as_done(letter_id=done.id, by=cast.olga, key="d", reason="it is there").state == "already_done"
    assert discard_letter(letter_id=old.id, by=cast.olga, key="g", reason="nobody wants it").state == "discarded"


def test_the_age_that_the_settings_declare_counts_as_well(cast: Cast) -> None:
    letter = factories.dead_letter()
    aged(letter.id, seconds=120)
    with override_settings(OPSCONSOLE_TASK_POLICIES=[{"pattern": "shop.*", "max_age_seconds": 60}]):
        with pytest.raises(LetterTooOld):
            retry_letter(letter_id=letter.id, by=cast.olga, key="k")
        # The table wins, and says that any age is right.
        TaskPolicy.objects.create(pattern="shop.*")
        assert retry_letter(letter_id=letter.id, by=cast.olga, key="k").state == "retrying"


def test_pages_say_of_a_job_that_is_too_old_that_it_cannot_be_retried(cast: Cast) -> None:
    TaskPolicy.objects.create(pattern="shop.send_mail", max_age_seconds=3600)
    old, young = letters(2)
    aged(old, seconds=3700)
    incident = Incident.objects.get()
    served = Served.by("tests", database_now())
    tiles = judge_jobs(incident, served).tiles
    assert (tiles.blocked, tiles.retriable) == (1, 1)
    ((reason, count),) = tiles.reasons["blocked"]
    assert count == 1
    assert "too old" in reason
    found = {one.letter.id: one for one in select_open(incident, served).checked}
    assert (found[old].prospect, found[young].prospect) == (Prospect.BLOCKED, Prospect.SAFE)
    assert isinstance(found[old].refusal, LetterTooOld)
    letter = DeadLetter.objects.select_related("incident").get(id=old)
    assert prospect_of(letter, served) == (Prospect.BLOCKED, reason)
    refusal, _warnings = preview_retry(letter)
    assert isinstance(refusal, LetterTooOld)


def test_of_several_only_those_that_are_too_old_are_refused(cast: Cast) -> None:
    TaskPolicy.objects.create(pattern="shop.send_mail", max_age_seconds=3600)
    old, young = letters(2)
    aged(old, seconds=3700)
    done = retry_incident(incident_id=Incident.objects.get().id, by=cast.olga, key="k", expected_count=2)
    assert {result.letter_id: result.code for result in done.results} == {str(old): "letter_too_old", str(young): ""}


def test_a_chord_member_says_that_the_body_will_not_run(cast: Cast) -> None:
    """RET-03"""
    letter = factories.dead_letter(chord_id="body-id")
    assert "chord_body_will_not_run" in retry_letter(letter_id=letter.id, by=cast.olga, key="k").warnings


def test_a_letter_of_another_tenant_is_not_there(cast: Cast) -> None:
    """B7, GRA-02"""
    letter = factories.dead_letter()
    for by in (cast.bram, cast.nobody):
        for letter_id in (letter.id, uuid4()):
            with pytest.raises(LetterNotFound):
                retry_letter(letter_id=letter_id, by=by, key="k")
    with pytest.raises(AccessDenied):
        retry_letter(letter_id=letter.id, by=cast.vera, key="k")
    letter.refresh_from_db()
    assert letter.state == LetterState.OPEN


def test_a_grant_for_one_actor_repairs_that_actor_alone(cast: Cast) -> None:
    """B1"""
    mine = factories.dead_letter(actor_type="order", actor_id="42")
    other = factories.dead_letter(actor_type="order", actor_id="43")
    give(cast.nobody, Action.DEAD_LETTERS_RETRY, tenant="default", actor_type="order", actor_id="42")
    assert retry_letter(letter_id=mine.id, by=cast.nobody, key="k").state == "retrying"
    with pytest.raises(LetterNotFound):
        retry_letter(letter_id=other.id, by=cast.nobody, key="k2")


def test_a_letter_of_a_closed_incident_can_still_be_retried(cast: Cast) -> None:
    """DESIGN 5: closed without repairing is not the end; the incident stays closed meanwhile."""
    letter = factories.dead_letter()
    resolve_incident(incident_id=letter.incident_id, by=cast.ada, key="z", code="gone", summary="gone", unrepaired=1)
    assert retry_letter(letter_id=letter.id, by=cast.ada, key="k").state == "retrying"
    incident = Incident.objects.get()
    assert (incident.state, incident.unresolved_count) == (IncidentState.RESOLVED, 0)


def test_a_planned_repair_can_be_withdrawn(cast: Cast) -> None:
    letter = factories.dead_letter()
    done = retry_letter(letter_id=letter.id, by=cast.olga, key="k")
    assert done.repair_id is not None
    withdrawn = cancel_repair(repair_id=done.repair_id, by=cast.olga, key="c")
    letter.refresh_from_db()
    assert (withdrawn.state, letter.state) == ("open", LetterState.OPEN)
    assert retry_letter(letter_id=letter.id, by=cast.olga, key="k2").state == "retrying"
    assert RepairAction.objects.newest_first().first().previous_id == done.repair_id


# Several at once


def letters(count: int, **fields: Any) -> list[UUID]:
    recorded = factories.record(*[factories.failure(**fields) for _ in range(count)])
    return [item.letter_id for item in recorded]


def test_all_open_letters_are_planned_and_the_set_is_counted(cast: Cast) -> None:
    """A12, API-03: all means exactly the number that was looked at."""
    letters(250)
    incident = Incident.objects.get()
    for number in (249, 251):
        with pytest.raises(SelectionDrifted):
            retry_incident(incident_id=incident.id, by=cast.olga, key="k", expected_count=number)
    done = retry_incident(incident_id=incident.id, by=cast.olga, key="k", expected_count=250)
    assert (done.planned, done.refused) == (250, 0)
    assert RepairAction.objects.filter(state=ActionState.PLANNED).count() == 250
    assert AuditEvent.objects.filter(action="dead-letters.retry").count() == 250
    again = retry_incident(incident_id=incident.id, by=cast.olga, key="k", expected_count=250)
    assert again.idempotent_replay
    assert again.results == done.results
    assert RepairAction.objects.count() == 250


def test_named_letters_are_planned_and_each_refusal_is_told(cast: Cast) -> None:
    safe = letters(2)
    (unsure,) = letters(1, error=factories.TIMED_OUT, task="shop.send_mail")
    incident = Incident.objects.get(letters__id=safe[0])
    retry_letter(letter_id=safe[0], by=cast.olga, key="first")
    done = retry_incident(incident_id=incident.id, by=cast.olga, key="k", letter_ids=safe)
    by_id = {result.letter_id: result for result in done.results}
    assert (by_id[str(safe[0])].status, by_id[str(safe[0])].code) == ("refused", "operations_job_overtaken")
    assert by_id[str(safe[1])].status == "planned"
    with pytest.raises(LetterNotFound):
        retry_incident(incident_id=incident.id, by=cast.olga, key="k2", letter_ids=[safe[1], unsure])


def test_letters_that_may_have_happened_are_left_unless_an_answer_is_given(cast: Cast) -> None:
    """B6: in a batch each letter is judged by itself."""
    letters(3, error=factories.TIMED_OUT)
    incident = Incident.objects.get()
    first = retry_incident(incident_id=incident.id, by=cast.olga, key="a", expected_count=3)
    assert {result.code for result in first.results} == {"provider_outcome_unknown"}
    second = retry_incident(incident_id=incident.id, by=cast.olga, key="b", expected_count=3, provider_checked=True)
    assert second.planned == 3


@pytest.mark.parametrize("named", [True, False])
def test_a_request_whose_jobs_are_all_refused_leaves_the_incident_to_whoever_takes_it(cast: Cast, named: bool) -> None:
    """A12, B3: taking it belongs to a repair; where nothing is planned, incident and version stay as they were."""
    chosen = letters(3, error=factories.TIMED_OUT)
    before = Incident.objects.get()
    fields: dict[str, Any] = {"letter_ids": chosen} if named else {"expected_count": 3}
    done = retry_incident(incident_id=before.id, by=cast.olga, key="k", **fields)
    assert (done.planned, done.refused, done.incident_state) == (0, 3, "open")
    after = Incident.objects.get()
    assert (after.state, after.acknowledged_by, after.acknowledged_at) == (IncidentState.OPEN, "", None)
    assert after.version == before.version


def test_the_first_job_that_is_planned_takes_the_incident(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12: also when the page before it was refused as a whole; the audit row says so."""
    from repairs import services

    monkeypatch.setattr(services, "PAGE", 2)
    chosen = letters(4)
    DeadLetter.objects.filter(id__in=chosen[:2]).update(is_set_aside=True)
    incident = Incident.objects.get()
    done = retry_incident(incident_id=incident.id, by=cast.olga, key="k", letter_ids=chosen)
    assert (done.planned, done.incident_state) == (2, "acknowledged")
    incident.refresh_from_db()
    assert (incident.state, incident.acknowledged_by_name) == (IncidentState.ACKNOWLEDGED, "olga")
    for event in AuditEvent.objects.filter(action="dead-letters.retry"):
        assert '"incidentState":"acknowledged"' in event.outcome


def test_an_incident_that_opens_again_in_the_middle_is_not_taken_a_second_time(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: what broke the acknowledgement wants to be seen, and the pages that follow must not hide it."""
    from repairs import services

    letters(4)
    incident = Incident.objects.get()
    real = services._plan_page

    def plan_then_break(**fields: Any) -> None:
        real(**fields)
        if RepairAction.objects.count() == 2:
            broken = Incident.objects.get()
            assert broken.state == IncidentState.ACKNOWLEDGED
            broken.break_acknowledgement("repair_failed")
            broken.save()

    monkeypatch.setattr(services, "PAGE", 2)
    monkeypatch.setattr(services, "_plan_page", plan_then_break)
    assert retry_incident(incident_id=incident.id, by=cast.olga, key="k", expected_count=4).planned == 4
    assert Incident.objects.get().state == IncidentState.OPEN


def test_a_page_of_jobs_takes_no_more_statements_than_a_few(cast: Cast) -> None:
    """Measured at 20 ms a job before: a request for 1,000 would have to wait for most of a minute."""
    counts = []
    for count in (5, 25):
        DeadLetter.objects.update(state=LetterState.RETRYING)
        chosen = letters(count, error=factories.TIMED_OUT)
        incident = Incident.objects.get()
        with CaptureQueriesContext(
            connection,
        ) as captured:
            done = retry_incident(
                incident_id=incident.id, by=cast.olga, key=f"k{count}", letter_ids=chosen, provider_checked=True
            )
        assert done.planned == count
        counts.append(len(captured))
    assert counts[0] == counts[1]


def test_what_a_page_writes_is_what_one_retry_writes(cast: Cast) -> None:
    """B5, B6, C19: repair, letter and audit row, of a job that may have happened and was retried once before."""
    rows, events, states = [], [], []
    for batched in (False, True):
        letter = factories.dead_letter(ambiguous=True, queue="slow", actor_type="order", actor_id="42")
        first = retry_letter(letter_id=letter.id, by=cast.olga, key=f"f{batched}", provider_checked=True)
        assert first.repair_id is not None
        cancel_repair(repair_id=first.repair_id, by=cast.olga, key=f"c{batched}")
        DeadLetter.objects.filter(id=letter.id).update(outcome_class=OutcomeClass.AMBIGUOUS)
        said = {
            "by": cast.olga,
            "key": f"k{batched}",
            "provider_checked": True,
            "reason": "asked",
            "reference": "log 4",
        }
        if batched:
            retry_incident(incident_id=letter.incident_id, letter_ids=[letter.id], **said)
        else:
            retry_letter(letter_id=letter.id, **said)
        action = RepairAction.objects.filter(letter=letter).newest_first()[0]
        assert action.previous_id == first.repair_id
        assert (action.batch_id is not None) == batched
        own = {"id", "letter_id", "batch_id", "previous_id", "operation_key", "planned_at", "new_task_id", "due_at"}
        rows.append(
            {f.attname: getattr(action, f.attname) for f in action._meta.concrete_fields if f.attname not in own}
        )
        event = AuditEvent.objects.filter(action="dead-letters.retry", target_id=str(letter.id)).latest("id")
        outcome = json.loads(event.outcome)
        assert (outcome.pop("repair"), outcome.pop("newTask")) == (str(action.id), action.new_task_id)
        assert outcome.pop("oldTask") == letter.task_id
        names = ("tenant", "actor_type", "actor_id", "target_type", "capability", "reason", "operator_id", "verdict")
        events.append(({name: getattr(event, name) for name in names}, outcome))
        letter.refresh_from_db()
        states.append((letter.state, letter.outcome_class, letter.outcome_reason))
    assert rows[0] == rows[1]
    assert events[0] == events[1]
    assert states[0] == states[1]


def test_each_actor_of_a_page_is_authorised_by_itself(cast: Cast) -> None:
    """B1: a grant for the tenant as a whole begins it; a narrower one that comes first is what the audit row names."""
    give(cast.nobody, Action.DEAD_LETTERS_RETRY, Action.INSPECT, tenant="default", actor_type="order", actor_id="42")
    give(cast.nobody, Action.DEAD_LETTERS_RETRY, Action.INSPECT, tenant="default")
    chosen = [*letters(2, actor_type="order", actor_id="42"), *letters(2, actor_type="order", actor_id="43")]
    retry_incident(incident_id=Incident.objects.get().id, by=cast.nobody, key="k", letter_ids=chosen)
    events = AuditEvent.objects.filter(action="dead-letters.retry")
    assert {("actor_id=42" in event.capability, event.actor_id) for event in events} == {(True, "42"), (False, "43")}
    assert events.count() == 4


def test_an_actor_whose_grant_is_taken_away_under_the_lock_is_refused_by_itself(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1, B2: the incident's grant does not stand for each job's, and each refusal leaves its row."""
    from repairs import services

    chosen = [*letters(1, actor_type="order", actor_id="42"), *letters(2, actor_type="order", actor_id="43")]
    real = services.find_capability
    monkeypatch.setattr(
        services,
        "find_capability",
        lambda by, action, resource: None if resource.actor_id == "43" else real(by, action, resource),
    )
    done = retry_incident(incident_id=Incident.objects.get().id, by=cast.olga, key="k", letter_ids=chosen)
    assert {result.letter_id: result.code for result in done.results} == {
        str(chosen[0]): "", str(chosen[1]): "access_denied", str(chosen[2]): "access_denied",
    }  # fmt: skip
    assert RepairAction.objects.count() == 1
    events = AuditEvent.objects.filter(action="dead-letters.retry").values_list("verdict", "target_id")
    assert sorted(events) == sorted(
        [("allowed", str(chosen[0])), ("denied", str(chosen[1])), ("denied", str(chosen[2]))]
    )


def test_an_empty_choice_never_means_all(cast: Cast) -> None:
    """API-03"""
    (letter_id,) = letters(1)
    incident = Incident.objects.get()
    for chosen in ({"letter_ids": []}, {}, {"letter_ids": [letter_id, letter_id]}):
        with pytest.raises(SelectionInvalid):
            retry_incident(incident_id=incident.id, by=cast.olga, key="k", **chosen)
    with pytest.raises(TooMany):
        retry_incident(incident_id=incident.id, by=cast.olga, key="k", letter_ids=[uuid4() for _ in range(1_001)])


def test_a_resolved_incident_is_not_retried(cast: Cast) -> None:
    """A12"""
    letters(1)
    incident = Incident.objects.get()
    resolve_incident(incident_id=incident.id, by=cast.ada, key="z", code="gone", summary="gone", unrepaired=1)
    with pytest.raises(IncidentResolved):
        retry_incident(incident_id=incident.id, by=cast.ada, key="k", expected_count=0)


def test_a_batch_goes_on_where_a_crash_stopped_it(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """API-01: the same key takes up the same frozen set; what was planned stays planned once."""
    from repairs import services

    letters(250)
    incident = Incident.objects.get()
    real, calls = services._plan_page, iter([True, False])

    def crash_after_the_first(**fields: Any) -> None:
        if not next(calls):
            raise RuntimeError("killed")
        real(**fields)

    monkeypatch.setattr(services, "_plan_page", crash_after_the_first)
    with pytest.raises(RuntimeError):
        retry_incident(incident_id=incident.id, by=cast.olga, key="k", expected_count=250)
    assert RepairAction.objects.count() == 100
    monkeypatch.setattr(services, "_plan_page", real)
    letters(5)
    done = retry_incident(incident_id=incident.id, by=cast.olga, key="k", expected_count=250)
    assert (done.planned, RepairAction.objects.count(), RepairBatch.objects.count()) == (250, 250, 1)


def test_a_grant_taken_away_in_the_middle_stops_the_rest(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    from repairs import services

    letters(250)
    incident = Incident.objects.get()
    real = services._plan_page

    def revoke_then_plan(**fields: Any) -> None:
        if RepairAction.objects.exists():
            ScopeUserGrant.objects.filter(user_id=cast.olga.user_id).delete()
        real(**fields)

    monkeypatch.setattr(services, "_plan_page", revoke_then_plan)
    with pytest.raises(AccessDenied):
        retry_incident(incident_id=incident.id, by=cast.olga, key="k", expected_count=250)
    assert RepairAction.objects.count() == 100
    assert AuditEvent.objects.filter(verdict="denied").count() == 1


def test_the_incident_of_another_tenant_is_not_there(cast: Cast) -> None:
    letters(1)
    incident = Incident.objects.get()
    with pytest.raises(IncidentNotFound):
        retry_incident(incident_id=incident.id, by=cast.bram, key="k", expected_count=1)
    assert not AuditEvent.objects.filter(action=INCIDENT_RETRIED).exists()


def race(number: int, work: Any) -> list[Any]:
    """Run ``work(index)`` in threads that start together; returns each one's answer or exception."""
    barrier = threading.Barrier(number)
    answers: list[Any] = [None] * number

    def run(index: int) -> None:
        try:
            barrier.wait()
            answers[index] = work(index)
        except Exception as error:
            answers[index] = error
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.django_db(transaction=True)
def test_two_operators_and_one_letter_make_one_repair(cast: Cast) -> None:
    """B5, C5: fifty letters, two operators each at the same moment: fifty repairs, fifty refusals."""
    targets = letters(50)
    for letter_id in targets:
        answers = race(
            2,
            lambda index, letter_id=letter_id: retry_letter(
                letter_id=letter_id, by=(cast.ada, cast.olga)[index], key=f"{letter_id}-{index}"
            ),
        )
        assert sorted(type(answer).__name__ for answer in answers) == ["JobOvertaken", "LetterMutation"]
    assert RepairAction.objects.count() == 50


@pytest.mark.django_db(transaction=True)
def test_one_key_from_twenty_threads_has_one_effect(cast: Cast) -> None:
    """API-01: one repair; everyone else gets the same answer, marked as a replay."""
    (letter_id,) = letters(1)
    answers = race(20, lambda _index: retry_letter(letter_id=letter_id, by=cast.olga, key="k"))
    assert sum(not answer.idempotent_replay for answer in answers) == 1
    assert len({answer.repair_id for answer in answers}) == 1
    assert RepairAction.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_one_key_for_a_whole_incident_from_twenty_threads_has_one_effect(cast: Cast) -> None:
    """API-01"""
    letters(150)
    incident = Incident.objects.get()
    answers = race(
        20, lambda _index: retry_incident(incident_id=incident.id, by=cast.olga, key="k", expected_count=150)
    )
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert sum(not answer.idempotent_replay for answer in answers) == 1
    assert RepairAction.objects.count() == 150
    assert {DeadLetter.objects.get(id=answer.letter_id).state for answer in RepairAction.objects.all()} == {"retrying"}


def test_a_key_made_for_another_letter_hides_no_repair_from_the_audit_trail(cast: Cast) -> None:
    """Keys of a batch's letters are not a client's to choose: each planned repair has its own row."""
    first, second = letters(2)
    incident = Incident.objects.get()
    retry_letter(letter_id=first, by=cast.olga, key=f"K:{second}")
    retry_incident(incident_id=incident.id, by=cast.olga, key="K", letter_ids=[second])
    assert AuditEvent.objects.filter(action="dead-letters.retry", target_id=str(second)).count() == 1


def test_a_discarded_letter_that_fails_again_can_be_retried_with_its_new_message(cast: Cast) -> None:
    letter = factories.dead_letter(task_id="again")
    discard_letter(letter_id=letter.id, by=cast.olga, key="d", reason="customer left")
    factories.record(factories.failure(task_id="again", retries=1))
    letter.refresh_from_db()
    assert (letter.state, letter.message_state) == (LetterState.OPEN, MessageState.FULL)
    assert retry_letter(letter_id=letter.id, by=cast.olga, key="k").state == "retrying"


def test_a_message_recorded_without_its_key_can_be_sent_once_the_key_is_back(cast: Cast) -> None:
    """It lies there as the journal had sealed it, and is neither damaged nor lost."""
    conf.sealer.cache_clear()
    with override_settings(OPSCONSOLE_KEYS="old:" + "QUJD" * 10 + "QUI=", SECRET_KEY="another"):
        failed = factories.failed()
    conf.sealer.cache_clear()
    failure = factories.intake().failure(failed, clock=factories.host_clock(), boot_id="")
    (recorded,) = factories.record(failure)
    with pytest.raises(MessageSealedWithUnknownKey):
        retry_letter(letter_id=recorded.letter_id, by=cast.olga, key="k")
    with override_settings(OPSCONSOLE_KEYS="old:" + "QUJD" * 10 + "QUI="):
        conf.sealer.cache_clear()
        assert retry_letter(letter_id=recorded.letter_id, by=cast.olga, key="k").state == "retrying"
    conf.sealer.cache_clear()


def test_a_held_job_can_be_decided_about_alone_and_is_held_again_when_its_retry_is_withdrawn(cast: Cast) -> None:
    """C17: nothing has run, so that a withdrawn retry leaves it as it was; a retry of all open ones passes it by."""
    chosen = letters(3)
    DeadLetter.objects.filter(id__in=chosen).update(state=LetterState.HELD)
    incident = Incident.objects.get()
    with pytest.raises(SelectionDrifted):
        retry_incident(incident_id=incident.id, by=cast.ada, key="all", expected_count=3)
    sent = retry_letter(letter_id=chosen[0], by=cast.olga, key="k")
    assert sent.state == "retrying"
    assert sent.repair_id is not None
    assert cancel_repair(repair_id=sent.repair_id, by=cast.olga, key="c").state == "held"
    assert DeadLetter.objects.get(id=chosen[0]).standing(Incident.objects.get()) == "held"
    assert discard_letter(letter_id=chosen[1], by=cast.ada, key="d", reason="not wanted").state == "discarded"
    closed = close_letter_as_done(letter_id=chosen[2], by=cast.olga, key="e", reason="done by hand")
    assert closed.state == "already_done"
    with pytest.raises(JobOvertaken):
        retry_letter(letter_id=chosen[2], by=cast.olga, key="f")


def test_what_names_no_job_is_not_repaired(cast: Cast) -> None:
    """A1, A12: 409 operations_incident_not_repairable, alone and among several; nothing is planned."""
    letter = factories.dead_letter(task="")
    assert letter.job_type == "invalid"
    with pytest.raises(IncidentNotRepairable) as refused:
        retry_letter(letter_id=letter.id, by=cast.ada, key="k")
    assert (refused.value.code, refused.value.status) == ("operations_incident_not_repairable", 409)
    done = retry_incident(incident_id=letter.incident_id, by=cast.ada, key="k2", letter_ids=[letter.id])
    assert [result.code for result in done.results] == ["operations_incident_not_repairable"]
    assert not RepairAction.objects.exists()


def test_an_incident_without_a_job_is_not_repaired(cast: Cast) -> None:
    """A12: 404 operations_incident_not_repairable."""
    letter = factories.dead_letter()
    Incident.objects.update(letter_count=0)
    with pytest.raises(IncidentNotRepairable) as refused:
        retry_incident(incident_id=letter.incident_id, by=cast.ada, key="k", expected_count=0)
    assert (refused.value.code, refused.value.status) == ("operations_incident_not_repairable", 404)
