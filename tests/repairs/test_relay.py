"""The relay: what it sends, that it sends it once, and what it does while the broker is away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from django.db import connection
from django.test.utils import CaptureQueriesContext
from kombu import Connection, Message

from deadletters import conf
from deadletters.journal.hooks import REPAIR_HEADER
from deadletters.models import DeadLetter, SealedMessage
from grants.models import AuditEvent
from opsconsole.core.database import database_now
from opsconsole.core.outbox import Outbox, Outgoing
from opsconsole.core.publishing import Delivery, Published, not_sent, unknown
from repairs import relay
from repairs.models import ActionState, RepairAction
from repairs.relay import Relay, repair_message
from repairs.services import retry_letter
from tests import factories
from tests.cast import Cast
from tests.repairs.test_retry import race

pytestmark = pytest.mark.django_db


@pytest.fixture
def app() -> Celery:
    """An app on kombu's in-memory broker."""
    app = Celery("tests", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = "celery"
    return app


def received(app: Celery, queue: str) -> list[Message]:
    """Take every message off a queue."""
    messages: list[Message] = []
    with app.connection_for_read() as connection:
        simple = connection.SimpleQueue(app.amqp.queues[queue], no_ack=True)
        while True:
            try:
                messages.append(simple.get(block=False))
            except simple.Empty:
                return messages


def planned(cast: Cast, **fields: Any) -> RepairAction:
    letter = factories.dead_letter(**fields)
    retry_letter(letter_id=letter.id, by=cast.ada, key=str(uuid4()))
    return RepairAction.objects.get(letter=letter)


def test_the_original_is_sent_under_a_new_id_with_its_queue_priority_headers_and_stamps(
    app: Celery, cast: Cast
) -> None:
    """RET-02, RET-01: body, queue, priority, headers and stamps are the original's; eta, expiry and retries are not."""
    queue = f"slow-{uuid4()}"
    action = planned(
        cast,
        queue=queue,
        priority=7,
        body=b'[["a"], {"doc_id": 9221939555730002819}, {"callbacks": null}]',
        headers={
            "tenant": "t-a",
            "stamped_headers": ["trace"],
            "stamps": {"trace": "abc"},
            "eta": "2026-01-01T00:00:00+00:00",
            "retries": 3,
            "group": "g1",
        },
    )
    assert Relay(app, source="tests", owner="w").send_due() == 1
    (message,) = received(app, queue)
    assert message.body == b'[["a"], {"doc_id": 9221939555730002819}, {"callbacks": null}]'
    assert message.headers["id"] == action.new_task_id == message.properties["correlation_id"]
    assert message.headers["parent_id"] == action.letter.task_id
    assert (message.headers["tenant"], message.headers["stamps"]) == ("t-a", {"trace": "abc"})
    assert (message.headers["retries"], message.headers["eta"], message.headers["expires"]) == (0, None, None)
    assert message.headers["group"] is None
    assert message.headers[REPAIR_HEADER] == str(action.id)
    assert message.properties["priority"] == 7
    action.refresh_from_db()
    assert (action.state, action.send_count, action.lease_owner) == (ActionState.SENT, 1, "")
    assert action.answer_due_at is not None


def test_a_sent_repair_is_not_sent_again(app: Celery, cast: Cast) -> None:
    planned(cast, queue=(queue := f"q-{uuid4()}"))
    sender = Relay(app, source="tests", owner="w")
    assert [sender.send_due(), sender.send_due()] == [1, 0]
    assert len(received(app, queue)) == 1


def test_a_relay_sends_the_repairs_of_its_own_source_alone(app: Celery, cast: Cast) -> None:
    action = planned(cast, source="elsewhere")
    assert Relay(app, source="tests", owner="w").send_due() == 0
    action.refresh_from_db()
    assert action.state == ActionState.PLANNED


def test_a_broker_that_refuses_leaves_every_repair_planned_with_the_reason(
    app: Celery, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost and nothing is sent twice: the page is given back, and sent once the broker answers."""
    queue = f"q-{uuid4()}"
    for _ in range(3):
        planned(cast, queue=queue)
    sender = Relay(app, source="tests", owner="w")

    def refuse(self: Outbox, messages: Sequence[Outgoing], **_: Any) -> Published:
        return Published((not_sent("broker_unreachable", "nobody listens"),) * len(messages))

    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "publish_many", refuse)
        sender.send_due()
    assert "nobody listens" in sender.trouble
    assert list(RepairAction.objects.values_list("state", flat=True)) == ["planned"] * 3
    assert RepairAction.objects.exclude(lease_owner="").count() == 0
    assert RepairAction.objects.filter(send_error__contains="nobody listens").count() == 3
    RepairAction.objects.update(due_at=database_now())
    assert sender.send_due() == 3
    assert sender.trouble == ""
    assert len(received(app, queue)) == 3


def fail_at(number: int, monkeypatch: pytest.MonkeyPatch, then: Any = None) -> None:
    """Let the broker be lost at the message of this number, counted from 0; ``then`` is called before each one."""
    publish, count = Outbox.publish_many, iter(range(10_000))

    def publish_or_fail(self: Outbox, messages: Sequence[Outgoing], **options: Any) -> Published:
        deliveries: list[Delivery] = []
        for outgoing in messages:
            if then is not None:
                then(outgoing)
            if deliveries and not deliveries[-1].is_sent:
                deliveries.append(not_sent("not_attempted"))
            elif next(count) == number:
                deliveries.append(unknown("connection_lost", "gone in the middle"))
            else:
                deliveries += publish(self, [outgoing], **options).deliveries
        return Published(tuple(deliveries))

    monkeypatch.setattr(Outbox, "publish_many", publish_or_fail)


def test_a_broker_that_fails_in_the_middle_of_a_page_has_sent_what_is_marked_and_no_more(
    app: Celery, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the failure comes within a few that are marked together, and some were marked before."""
    queue = f"q-{uuid4()}"
    ids = [planned(cast, queue=queue).new_task_id for _ in range(8)]
    monkeypatch.setattr(relay, "TOGETHER", 3)
    sender = Relay(app, source="tests", owner="w")
    with monkeypatch.context() as patched:
        fail_at(4, patched)
        sender.send_due()
    assert "gone in the middle" in sender.trouble
    sent = RepairAction.objects.filter(state=ActionState.SENT)
    assert sorted(sent.values_list("new_task_id", flat=True)) == sorted(ids[:4])
    assert [message.headers["id"] for message in received(app, queue)] == ids[:4]
    assert list(RepairAction.objects.exclude(send_error="").values_list("new_task_id", flat=True)) == [ids[4]]
    assert not RepairAction.objects.exclude(lease_owner="", lease_expires_at=None).exists()
    RepairAction.objects.update(due_at=database_now())
    assert sender.send_due() == 4
    assert sorted(message.headers["id"] for message in received(app, queue)) == sorted(ids[4:])


def test_a_relay_that_is_stopped_gives_the_rest_of_its_page_back(
    app: Celery, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = f"q-{uuid4()}"
    for _ in range(4):
        planned(cast, queue=queue)
    sender = Relay(app, source="tests", owner="w")
    monkeypatch.setattr(relay, "TOGETHER", 1)
    fail_at(-1, monkeypatch, then=lambda _outgoing: sender.stop())
    sender.send_due()
    assert sorted(RepairAction.objects.values_list("state", "lease_owner")) == [*[("planned", "")] * 3, ("sent", "")]
    assert Relay(app, source="tests", owner="x").send_due() == 3


def test_a_slow_broker_does_not_make_a_page_outlast_its_lease(
    app: Celery, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be sent in time is free for every relay; sent with a lease that is over, it would go out twice."""
    queue = f"q-{uuid4()}"
    for _ in range(3):
        planned(cast, queue=queue)
    clock = [0.0]

    def hang(_outgoing: Outgoing) -> None:
        clock[0] += 45

    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(relay, "TOGETHER", 1)
    fail_at(-1, monkeypatch, then=hang)
    sender = Relay(app, source="tests", owner="w")
    assert [sender.send_due() for _ in range(4)] == [3, 2, 1, 0]
    assert len(received(app, queue)) == 3
    assert relay.LEASE.total_seconds() > relay.PAGE_SECONDS + 45


def test_what_happened_between_sending_and_marking_is_not_undone(
    app: Celery, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has started, one has succeeded, one was put back by its settlement, one is another relay's by now."""
    queue = f"q-{uuid4()}"
    started, succeeded, put_back, taken, plain = (planned(cast, queue=queue) for _ in range(5))
    now = database_now()

    def meanwhile(outgoing: Outgoing) -> None:
        if outgoing.headers["id"] != plain.new_task_id:
            return
        rows = RepairAction.objects
        rows.filter(id=started.id).update(state=ActionState.STARTED, started_at=now, sent_at=now)
        rows.filter(id=succeeded.id).update(state=ActionState.SUCCEEDED, settled_at=now)
        later = now + factories.seconds(5)
        rows.filter(id=put_back.id).update(
            lease_owner="", lease_expires_at=None, due_at=later, send_error="no database"
        )
        rows.filter(id=taken.id).update(lease_owner="other", lease_expires_at=later)

    fail_at(-1, monkeypatch, then=meanwhile)
    Relay(app, source="tests", owner="w").send_due()
    for action in (started, succeeded, put_back, taken, plain):
        action.refresh_from_db()
    assert [one.state for one in (started, succeeded, put_back, taken, plain)] == [
        "started", "succeeded", "planned", "planned", "sent",
    ]  # fmt: skip
    assert (started.sent_at, started.lease_owner, started.send_count) == (now, "", 1)
    assert started.answer_due_at is not None
    assert (put_back.send_error, put_back.answer_due_at) == ("no database", None)
    assert (taken.lease_owner, taken.sent_at) == ("other", None)
    assert plain.sent_at is not None


def test_a_page_takes_no_statement_for_each_message(app: Celery, cast: Cast) -> None:
    counts = []
    for count in (2, 20):
        queue = f"q-{uuid4()}"
        for _ in range(count):
            planned(cast, queue=queue)
        with CaptureQueriesContext(connection) as captured:
            assert Relay(app, source="tests", owner="w").send_due() == count
        assert len(received(app, queue)) == count
        counts.append(len(captured))
    assert counts[0] == counts[1]


@pytest.mark.django_db(transaction=True)
def test_no_transaction_is_open_while_the_broker_is_talked_to(
    app: Celery, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may hang for most of a minute: no row may be locked and no snapshot be held meanwhile."""
    for _ in range(3):
        planned(cast, queue="celery")
    seen: list[tuple[bool, bool]] = []
    fail_at(-1, monkeypatch, then=lambda _: seen.append((connection.in_atomic_block, connection.get_autocommit())))
    Relay(app, source="tests", owner="w").send_due()
    assert seen == [(False, True)] * 3


def test_a_broker_that_is_gone_is_given_up_within_the_timeout(cast: Cast) -> None:
    gone = Celery("tests", broker="redis://127.0.0.1:1/0", set_as_current=False)
    planned(cast)
    began = time.monotonic()
    Relay(gone, source="tests", owner="w").send_due()
    assert time.monotonic() - began < 15
    assert RepairAction.objects.get().state == ActionState.PLANNED


def test_planning_never_talks_to_the_broker(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung broker holds a publisher for most of a minute; no request may wait for that."""

    def never(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a request talked to the broker")

    monkeypatch.setattr(Connection, "ensure_connection", never)
    monkeypatch.setattr(Connection, "connect", never)
    assert planned(cast).state == ActionState.PLANNED


def test_a_relay_killed_after_claiming_leaves_the_repair_to_the_next(app: Celery, cast: Cast) -> None:
    action = planned(cast, queue=(queue := f"q-{uuid4()}"))
    Relay(app, source="tests", owner="killed")._claim()
    other = Relay(app, source="tests", owner="other")
    assert other.send_due() == 0
    RepairAction.objects.update(lease_expires_at=database_now() - factories.seconds(1))
    assert other.send_due() == 1
    assert [message.headers["id"] for message in received(app, queue)] == [action.new_task_id]


def test_a_relay_killed_before_marking_sends_again_under_the_same_id(app: Celery, cast: Cast) -> None:
    """The start guard then lets one of the two begin, because both carry the same repair and attempt."""
    planned(cast, queue=(queue := f"q-{uuid4()}"))
    killed = Relay(app, source="tests", owner="killed")
    for action in killed._claim():
        outbox = Outbox(app)
        outbox.publish(repair_message(action, factories_message(action)))
        outbox.close()
    RepairAction.objects.update(lease_expires_at=database_now() - factories.seconds(1))
    Relay(app, source="tests", owner="other").send_due()
    assert len({message.headers["id"] for message in received(app, queue)}) == 1


def factories_message(action: RepairAction) -> Any:
    from repairs.refusals import open_letter_message

    return open_letter_message(action.letter)


def test_a_message_whose_key_went_away_after_planning_waits(app: Celery, cast: Cast) -> None:
    action = planned(cast)
    SealedMessage.objects.update(key_id="gone", blob=b"\x01\x04gone" + bytes(SealedMessage.objects.get().blob)[20:])
    Relay(app, source="tests", owner="w").send_due()
    action.refresh_from_db()
    assert action.state == ActionState.PLANNED
    assert "gone" in action.send_error
    assert conf.sealer().primary != "gone"


@pytest.mark.django_db(transaction=True)
def test_two_relays_send_each_repair_once(app: Celery, cast: Cast) -> None:
    queue = f"q-{uuid4()}"
    actions = [planned(cast, queue=queue) for _ in range(30)]

    def run(index: int) -> None:
        sender = Relay(app, source="tests", owner=f"w{index}")
        while sender.send_due():
            pass

    assert race(4, run) == [None] * 4
    ids = [message.headers["id"] for message in received(app, queue)]
    assert sorted(ids) == sorted(action.new_task_id for action in actions)
    assert set(RepairAction.objects.values_list("state", flat=True)) == {"sent"}
    assert DeadLetter.objects.filter(state="retrying").count() == 30
    assert AuditEvent.objects.filter(action="dead-letters.retry").count() == 30
