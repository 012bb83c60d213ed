"""The relay: what it sends, that it sends it once, and what it does while the broker is away."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection, Message

from deadletters import conf
from deadletters.journal.hooks import REPAIR_HEADER
from deadletters.models import DeadLetter, SealedMessage
from grants.models import AuditEvent
from opsconsole.core.database import database_now
from repairs.models import ActionState, RepairAction
from repairs.relay import Outbox, Relay, repair_message
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
    relay = Relay(app, source="tests", owner="w")
    assert [relay.send_due(), relay.send_due()] == [1, 0]
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
    relay = Relay(app, source="tests", owner="w")

    def refuse(self: Outbox, outgoing: object) -> None:
        raise ConnectionRefusedError("nobody listens")

    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "publish", refuse)
        relay.send_due()
    assert "nobody listens" in relay.trouble
    assert list(RepairAction.objects.values_list("state", flat=True)) == ["planned"] * 3
    assert RepairAction.objects.exclude(lease_owner="").count() == 0
    assert RepairAction.objects.filter(send_error__contains="nobody listens").count() == 1
    RepairAction.objects.update(due_at=database_now())
    assert relay.send_due() == 3
    assert relay.trouble == ""
    assert len(received(app, queue)) == 3


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
        relay = Relay(app, source="tests", owner=f"w{index}")
        while relay.send_due():
            pass

    assert race(4, run) == [None] * 4
    ids = [message.headers["id"] for message in received(app, queue)]
    assert sorted(ids) == sorted(action.new_task_id for action in actions)
    assert set(RepairAction.objects.values_list("state", flat=True)) == {"sent"}
    assert DeadLetter.objects.filter(state="retrying").count() == 30
    assert AuditEvent.objects.filter(action="dead-letters.retry").count() == 30
