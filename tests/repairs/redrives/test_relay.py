"""What the relay sends of a redrive: changed as asked, nothing while it is paused; and it pauses if that is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from deadletters.journal.hooks import ATTEMPTS_HEADER
from deadletters.models import SealedMessage, WorkerNode
from grants.models import AuditEvent
from opsconsole.core.outbox import Outbox, Outgoing
from opsconsole.core.publishing import Published, not_sent
from repairs import relay
from repairs.models import RedriveState, RepairAction
from repairs.redrives.changing import NotPatchable, changed_keywords
from repairs.redrives.requests import RedriveChanges, RedrivePace
from repairs.redrives.selectors import redrive_samples
from repairs.redrives.services import cancel_redrive, pause_redrive, resume_redrive
from repairs.relay import Relay
from tests import factories
from tests.cast import Cast
from tests.repairs.redrives.work import counted, items, letters, outstanding, started, step, worker
from tests.repairs.test_relay import received

pytestmark = pytest.mark.django_db


@pytest.fixture
def app() -> Celery:
    """An app on kombu's in-memory broker, whose queue is empty."""
    app = Celery("tests", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = "celery"
    received(app, "celery")
    return app


def send(celery: Celery) -> int:
    return Relay(celery, source="tests", owner="w").send_due()


def test_changes_are_made_to_what_is_sent_and_the_original_is_kept(app: Celery, cast: Cast) -> None:
    """RET-01: what the patch does not name is the original's, to the last digit; what was stored stays as it was."""
    worker(shop__post='{"varargs":true,"varkw":true}')
    queue = f"slow-{uuid4()}"
    body = b'[["a@example.org"], {"order": 9221939555730002819, "price": 1.10, "old": null}, {"callbacks": null}]'
    letter = factories.dead_letter(body=body)
    stored = bytes(SealedMessage.objects.get(letter=letter).blob)
    changes = RedriveChanges(
        tasks={"shop.send_mail": "shop.post"}, set={"note": "secret-7"}, remove=("old",), rename={"order": "number"}
    )

    WorkerNode.objects.update(queues=json.dumps(["celery", queue]))
    redrive = started(cast, changes=changes, target_queue=queue)
    assert "secret-7" not in redrive.changes
    step(redrive)
    assert send(app) == 1
    (message,) = received(app, queue)
    args, keywords, embed = json.loads(message.body)
    assert (args, embed) == (["a@example.org"], {"callbacks": None})
    assert list(keywords.items()) == [("number", 9221939555730002819), ("price", 1.10), ("note", "secret-7")]
    assert message.headers["task"] == "shop.post"
    assert message.headers["id"] == outstanding(redrive)[0].new_task_id
    assert ATTEMPTS_HEADER not in message.headers
    assert bytes(SealedMessage.objects.get(letter=letter).blob) == stored
    assert not AuditEvent.objects.filter(outcome__contains="secret-7").exists()


def test_samples_show_before_and_after_without_secrets(cast: Cast) -> None:
    worker()
    factories.dead_letter(body=b'[["a"], {"order": 7, "password": "hunter2"}, {}]')
    redrive = started(cast, changes=RedriveChanges(rename={"order": "number"}, set={"token": "t0ps3cret"}))
    (sample,) = redrive_samples(cast.ada, redrive.id)
    assert "order=7" in sample.arguments_before
    assert "number=7" in sample.arguments_after
    assert "hunter2" not in sample.arguments_before + sample.arguments_after
    assert "t0ps3cret" not in sample.arguments_after


@pytest.mark.parametrize(
    "changes",
    [RedriveChanges(remove=("b",)), RedriveChanges(rename={"b": "c"}), RedriveChanges(rename={"a": "z"})],
)
def test_a_patch_that_does_not_fit_is_refused(changes: RedriveChanges) -> None:
    with pytest.raises(NotPatchable):
        changed_keywords({"a": 1, "z": 2}, changes)


def test_a_canary_carries_the_mark_of_its_one_attempt(app: Celery, cast: Cast) -> None:
    worker()
    queue = f"q-{uuid4()}"
    letters(2, queue=queue)

    WorkerNode.objects.update(queues=json.dumps([queue]))
    redrive = started(cast, pace=RedrivePace(rate_per_second=100, max_outstanding=100, canary_size=1))
    step(redrive)
    assert send(app) == 1
    assert [message.headers[ATTEMPTS_HEADER] for message in received(app, queue)] == ["single"]


def test_nothing_of_a_paused_redrive_is_sent_until_somebody_lets_it_go_on(app: Celery, cast: Cast) -> None:
    worker()
    letters(3)
    redrive = started(cast)
    step(redrive)
    pause_redrive(redrive_id=redrive.id, by=cast.ada, key="p")
    assert send(app) == 0
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="r")
    assert send(app) == 3


def test_one_that_is_paused_after_the_relay_has_claimed_is_given_back(
    app: Celery,
    cast: Cast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker()
    letters(3)
    redrive = started(cast)
    step(redrive)
    sender = Relay(app, source="tests", owner="w")
    claim = sender._claim

    def claim_and_pause() -> list[RepairAction]:
        claimed = claim()
        pause_redrive(redrive_id=redrive.id, by=cast.ada, key="p")
        return claimed

    monkeypatch.setattr(sender, "_claim", claim_and_pause)
    assert sender.send_due() == 3
    assert received(app, "celery") == []
    assert set(RepairAction.objects.values_list("state", "lease_owner")) == {("planned", "")}


def test_what_is_cancelled_while_it_is_being_sent_stays_cancelled(
    app: Celery,
    cast: Cast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message is there, and the start guard refuses it; the job waits where it was."""
    worker()
    letters(2)
    redrive = started(cast)
    step(redrive)
    publish = Outbox.publish_many

    def publish_and_cancel(self: Outbox, messages: Sequence[Outgoing], **options: Any) -> Published:
        published = publish(self, messages, **options)
        cancel_redrive(redrive_id=redrive.id, by=cast.ada, key="c")
        return published

    monkeypatch.setattr(Outbox, "publish_many", publish_and_cancel)
    send(app)
    assert set(RepairAction.objects.values_list("state", flat=True)) == {"cancelled"}
    assert counted(redrive) == {"cancelled": 2}


def refuse(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Outbox,
        "publish_many",
        lambda _self, messages, **_options: Published((not_sent(code, "no room"),) * len(messages)),
    )


def test_a_broker_that_refuses_pauses_the_redrive_and_loses_nothing(
    app: Celery,
    cast: Cast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker()
    letters(3)
    redrive = started(cast)
    step(redrive)
    with monkeypatch.context() as patched:
        refuse("broker_unreachable", patched)
        send(app)
    redrive.refresh_from_db()
    assert (redrive.state, redrive.pause_code) == (RedriveState.PAUSED, "broker_trouble")
    assert "no room" in redrive.pause_text
    RepairAction.objects.update(due_at=factories.database_now())
    assert send(app) == 0, "it does not go on by itself"
    resume_redrive(redrive_id=redrive.id, by=cast.ada, key="r")
    assert send(app) == 3
    assert counted(redrive) == {"planned": 3}


def test_a_message_that_no_broker_takes_fails_alone(
    app: Celery,
    cast: Cast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker()
    letters(2)
    redrive = started(cast)
    step(redrive)
    refuse("message_invalid", monkeypatch)
    send(app)
    step(redrive)
    assert redrive.state == RedriveState.FINISHED
    assert items(redrive) == [("failed", "cannot_be_sent")] * 2


def test_a_message_that_we_fail_to_make_keeps_no_other_from_being_sent(
    app: Celery, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker()
    first, second = letters(2)
    redrive = started(cast)
    step(redrive)
    make = relay.repair_message

    def fails_for_one(action: RepairAction, *args: Any) -> Outgoing:
        if action.letter_id == first.id:
            raise KeyError("what nobody has thought of")
        return make(action, *args)

    monkeypatch.setattr(relay, "repair_message", fails_for_one)
    send(app)
    step(redrive)
    assert items(redrive) == [("failed", "cannot_be_sent"), ("planned", "")]
    assert RepairAction.objects.get(letter=second).state == "sent"
    assert "nobody" not in RepairAction.objects.get(letter=first).error_text
