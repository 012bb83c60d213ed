"""The relay: the only sender of repair messages, one thread in each worker.

It claims planned repairs of its source by lease, sends them with the worker's own app, and marks them sent, a few at a
time. Killed between sending and marking, its lease expires and those few messages are sent again under the same task
ids; the start guard lets one of each begin. No transaction is open while the broker is talked to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from datetime import datetime, timedelta
from uuid import UUID

from celery import Celery
from django.db import connections, transaction
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Coalesce, Length

from deadletters.journal.hooks import ATTEMPTS_HEADER, REPAIR_HEADER, SINGLE
from deadletters.journal.message import RawMessage
from opsconsole.core.database import AnyOf, database_now, locked
from opsconsole.core.errors import OpsError
from opsconsole.core.forking import GATE
from opsconsole.core.outbox import Outbox, Outgoing
from opsconsole.core.publishing import Delivery
from opsconsole.core.sealing import SealError
from repairs.models import ActionState, ActionType, Redrive, RedriveState, RepairAction
from repairs.redrives.changing import NotPatchable, changed_body, changed_headers
from repairs.redrives.requests import RedriveChanges
from repairs.redrives.services import changes_of
from repairs.redrives.stepping import pause_by_itself
from repairs.redrives.withdrawing import fail_unsent
from repairs.refusals import load_messages, open_letter_message, unload_messages

logger = logging.getLogger(__name__)

LEASE = timedelta(seconds=60)
"""Longer than a page may take, even if the broker hangs at its end."""
ANSWER_WITHIN = timedelta(hours=1)
PAGE = 1_000
TOGETHER = 250
TOGETHER_BYTES = 4 << 20
"""Messages, and bytes of their bodies, that are sent together and then marked by one statement."""
NEEDED = (
    "id", "new_task_id", "redrive_id", "queue", "job_type", "is_single_attempt", "send_count", "letter__task_id",
    "letter__exchange", "letter__routing_key", "letter__queue", "letter__message_state",
)  # fmt: skip
"""The columns that a message is made from: the others, and reading them, would cost more than the message."""
PAGE_SECONDS = 10.0
"""After this long the rest of a page is given back: a slow broker must not make us send with a lease that is over."""
IDLE_SECONDS = 1.0
BUSY_SECONDS = 0.1
"""Between two pages while there is something to send: a redrive plans the next ones meanwhile."""
LONGEST_BACKOFF_SECONDS = 30.0


BROKER_TROUBLE = "broker_trouble"
OWN_FAULT = frozenset({"message_invalid", "queue_unknown", "exchange_refused", "message_refused"})
"""What a broker says of one message alone, and would say again."""
TRIES_IN_REDRIVE = 4
HELD_BACK = (RedriveState.PAUSED, RedriveState.CANCELLED)
"""States of a redrive in which nothing of it is sent."""


def repair_message(action: RepairAction, raw: RawMessage, changes: RedriveChanges | None = None) -> Outgoing:
    """Return what is sent: same body, queue, priority, headers and stamps; new id, attempt 0, no eta, no expiry.

    The old id stays readable as the message's parent. Group and chord ids are dropped: a second answer of one member
    could make a chord's counter run over. Of a redrive's repair the queue may be another one, and ``changes`` the
    task's name and its arguments; raises ``NotPatchable`` where these cannot be changed so.
    """
    letter = action.letter
    headers = {name: value for name, value in raw.headers.items() if name not in ("group", "group_index")}
    headers.update(
        {
            "id": action.new_task_id,
            "root_id": action.new_task_id,
            "parent_id": letter.task_id or None,
            "retries": 0,
            "eta": None,
            "expires": None,
            "group": None,
            REPAIR_HEADER: str(action.id),
        }
    )
    properties = {
        name: value
        for name, value in raw.properties.items()
        if name in ("priority", "reply_to", "delivery_mode", "message_id", "type", "app_id") and value is not None
    }
    properties["correlation_id"] = action.new_task_id
    if action.is_single_attempt:
        headers[ATTEMPTS_HEADER] = SINGLE
    body = raw.body
    if changes:
        body = changed_body(raw, changes)
        headers = changed_headers(headers, body, action.job_type, changes)
    is_elsewhere = bool(action.redrive_id) and action.queue != letter.queue
    return Outgoing(
        body=body,
        content_type=raw.content_type,
        content_encoding=raw.content_encoding,
        headers=headers,
        properties=properties,
        exchange="" if is_elsewhere else letter.exchange,
        routing_key=action.queue if is_elsewhere else letter.routing_key,
        queue=action.queue if is_elsewhere else letter.queue,
    )


def _first(waiting: deque[RepairAction]) -> list[RepairAction]:
    """Take off the queue what is sent together: bounded by what its messages take of memory."""
    few: list[RepairAction] = []
    size = 0
    while waiting and len(few) < TOGETHER and (not few or size + waiting[0].message_bytes <= TOGETHER_BYTES):  # type: ignore[attr-defined]
        few.append(waiting.popleft())
        size += few[-1].message_bytes  # type: ignore[attr-defined]
    return few


class Relay(threading.Thread):
    """Sends the planned repairs of one source until it is told to stop; outlives every outage."""

    def __init__(self, app: Celery, *, source: str, owner: str) -> None:
        super().__init__(name="opsconsole-relay", daemon=True)
        self.app = app
        self.source = source
        self.owner = owner
        self._troubles = {"database": "", "broker": ""}
        self._stop_asked = threading.Event()

    @property
    def trouble(self) -> str:
        """What keeps repairs from being sent, in words; "" while nothing does."""
        return "; ".join(f"{what}: {text}" for what, text in self._troubles.items() if text)

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        pause = IDLE_SECONDS
        while not self._stop_asked.wait(pause):
            try:
                sent = self.send_due()
                self._note("database", "")
                pause = 0.0 if sent == PAGE else BUSY_SECONDS if sent else IDLE_SECONDS
            except Exception as error:  # noqa: BLE001  (a relay that dies leaves every repair unsent)
                self._note("database", f"{type(error).__name__}: {error}")
                pause = min(max(pause, IDLE_SECONDS) * 2, LONGEST_BACKOFF_SECONDS / 3)
                with GATE:
                    # A kept connection would not follow a failover.
                    connections.close_all()
        with GATE:
            connections.close_all()

    def _note(self, what: str, trouble: str) -> None:
        if trouble and trouble != self._troubles[what]:
            logger.error("relay of %s: %s: %s", self.source, what, trouble)
        self._troubles[what] = trouble

    def send_due(self) -> int:
        """Send one page of due repairs and return how many were taken on; for the thread and for tests."""
        with GATE:
            claimed = self._claim()
        waiting = deque(claimed)
        ends_at = time.monotonic() + PAGE_SECONDS
        outbox = Outbox(self.app)
        try:
            while waiting and self._send_some(waiting, outbox, ends_at):
                pass
            if waiting:
                # A broker that refuses one refuses the next as well, and may take long to say so.
                self._release(list(waiting), delay=timedelta(seconds=1 if self._troubles["broker"] else 0))
        finally:
            outbox.close()
        return len(claimed)

    def _claim(self) -> list[RepairAction]:
        now = database_now()
        due = RepairAction.objects.filter(
            Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lt=now),
            source=self.source,
            state=ActionState.PLANNED,
            action_type=ActionType.RETRY_MESSAGE,
            due_at__lte=now,
        ).order_by("due_at", "id")
        # By a condition of its own, so that a repair that is of no redrive costs no look at any.
        due = due.filter(Q(redrive__isnull=True) | ~Q(redrive__state__in=HELD_BACK))
        if not due.exists():
            return []
        with transaction.atomic():
            ids = [row.id for row in locked(due.only("id"), skip=True)[:PAGE]]
            RepairAction.objects.filter(AnyOf("id", ids), state=ActionState.PLANNED).update(
                lease_owner=self.owner, lease_expires_at=now + LEASE
            )
        return list(
            RepairAction.objects.filter(AnyOf("id", ids))
            .select_related("letter")
            .only(*NEEDED)
            .annotate(message_bytes=Coalesce(Length("letter__message__blob"), 0))
            .order_by("due_at", "id")
        )

    def _send_some(self, waiting: deque[RepairAction], outbox: Outbox, ends_at: float) -> bool:
        """Take some claimed repairs off the queue, send them together and mark them; returns whether to go on."""
        actions: list[RepairAction] = []
        messages: list[Outgoing] = []
        if not self._stop_asked.is_set() and time.monotonic() <= ends_at:
            few = _first(waiting)
            for action, message in self._messages_of(few, waiting):
                actions.append(action)
                messages.append(message)
        published = outbox.publish_many(messages, within_seconds=max(ends_at - time.monotonic(), 0.0))
        told = list(zip(actions, published.deliveries, strict=True))
        self._mark_sent([action.id for action, delivery in told if delivery.is_sent])
        failed = [(action, delivery) for action, delivery in told if not delivery.is_sent]
        goes_on = self._give_back(failed, list(waiting))
        return goes_on and not self._stop_asked.is_set() and time.monotonic() <= ends_at

    def _messages_of(
        self, few: list[RepairAction], waiting: deque[RepairAction]
    ) -> list[tuple[RepairAction, Outgoing]]:
        """Return the messages of those of a few repairs that are to be sent; what is too much goes back to waiting."""
        letters = [action.letter for action in few]
        with GATE:
            load_messages(letters)
            redrives = self._redrives_of(few)
        made = []
        size = 0
        for number, action in enumerate(few):
            if size > TOGETHER_BYTES:
                # They were small as long as they were compressed.
                waiting.extendleft(reversed(few[number:]))
                break
            redrive = redrives.get(action.redrive_id)
            if redrive is not None and redrive.state in HELD_BACK:
                self._release([action], delay=timedelta(0))
            elif (message := self._message_of(action, redrive)) is not None:
                made.append((action, message))
                size += len(message.body)
        unload_messages(letters)
        return made

    def _give_back(self, failed: list[tuple[RepairAction, Delivery]], waiting: list[RepairAction]) -> bool:
        """Put off what is not known to be with the broker; returns whether it takes others.

        What went out unanswered may be there: it is sent again under the same task id, and the start guard lets one of
        the two begin. Those that were not even tried are only given back.
        """
        troubled: list[RepairAction] = []
        untried: list[RepairAction] = []
        trouble = ""
        for action, delivery in failed:
            text = f"{delivery.code}: {delivery.detail}".rstrip(": ")
            if delivery.code == "out_of_time" or (trouble and delivery.code == "not_attempted"):
                untried.append(action)
            elif delivery.code in OWN_FAULT or (action.redrive_id and action.send_count >= TRIES_IN_REDRIVE):
                self._cannot_be_sent(action, text)
            else:
                trouble = trouble or text
                troubled.append(action)
        if troubled:
            self._refused(troubled, trouble)
        if untried:
            self._release(untried, delay=timedelta(seconds=1 if trouble else 0))
        if trouble:
            self._pause_redrives([*troubled, *untried, *waiting], trouble)
        return not trouble and not untried

    def _cannot_be_sent(self, action: RepairAction, text: str) -> None:
        """The broker will never take this message: put it off, shown; a redrive's has failed with that."""
        if action.redrive_id is None:
            delay = min(2.0 ** min(action.send_count + 1, 5), LONGEST_BACKOFF_SECONDS)
            self._release([action], error=text, delay=timedelta(seconds=delay))
            return
        with GATE:
            fail_unsent(repair_id=action.id, owner=self.owner, text=text)

    def _redrives_of(self, actions: list[RepairAction]) -> dict[UUID | None, Redrive]:
        """Return the redrives of these repairs as they stand now: one may have been paused since they were claimed."""
        ids = {action.redrive_id for action in actions if action.redrive_id is not None}
        if not ids:
            return {}
        columns = ("id", "state", "changes", "sealed_values")
        return {redrive.id: redrive for redrive in Redrive.objects.filter(id__in=ids).only(*columns)}

    def _message_of(self, action: RepairAction, redrive: Redrive | None) -> Outgoing | None:
        """Return what to send, or put the repair off if that cannot be read now; a redrive's counts as failed then."""
        try:
            changes = changes_of(redrive) if redrive is not None else None
            return repair_message(action, open_letter_message(action.letter), changes)
        except (OpsError, NotPatchable, SealError) as refusal:
            text = str(refusal)
        except Exception as error:
            # A bug of ours about one message must not keep all the others of this source from being sent.
            logger.exception("the message of repair %s cannot be made", action.id)
            text = f"its message cannot be made: {type(error).__name__}"
        if redrive is not None:
            with GATE:
                fail_unsent(repair_id=action.id, owner=self.owner, text=text)
        else:
            # The key or the message went away after planning; it may come back, and the letter shows why it waits.
            self._release([action], error=text, delay=timedelta(seconds=LONGEST_BACKOFF_SECONDS))
        return None

    def _pause_redrives(self, actions: list[RepairAction], trouble: str) -> None:
        """Pause what the broker does not take: when it comes back, somebody looks before thousands go out."""
        ids = {action.redrive_id for action in actions if action.redrive_id is not None}
        if ids:
            with GATE:
                pause_by_itself(redrive_ids=ids, code=BROKER_TROUBLE, text=trouble)

    def _refused(self, actions: list[RepairAction], trouble: str) -> None:
        """Put off repairs that are not known to be with the broker, the longer the more often that has been tried."""
        self._note("broker", trouble)
        for tries in sorted({action.send_count for action in actions}):
            delay = min(2.0 ** min(tries + 1, 5), LONGEST_BACKOFF_SECONDS)
            alike = [action for action in actions if action.send_count == tries]
            self._release(alike, error=trouble, delay=timedelta(seconds=delay))

    def _mark_sent(self, sent: list[UUID]) -> None:
        """Mark what the broker has, unless somebody put it back or took it over meanwhile.

        What has started or is settled by now, which may be before it is marked, keeps its state.
        """
        if not sent:
            return
        self._note("broker", "")
        with GATE:
            now = database_now()
            RepairAction.objects.filter(AnyOf("id", sent), lease_owner=self.owner).update(
                state=Case(When(state=ActionState.PLANNED, then=Value(ActionState.SENT)), default=F("state")),
                sent_at=Case(When(state=ActionState.PLANNED, then=Value(now)), default=F("sent_at")),
                send_error=Case(When(state=ActionState.PLANNED, then=Value("")), default=F("send_error")),
                send_count=F("send_count") + 1,
                lease_owner="",
                lease_expires_at=None,
                answer_due_at=now + ANSWER_WITHIN,
            )

    def _release(self, actions: list[RepairAction], *, delay: timedelta, error: str = "") -> None:
        ids = [action.id for action in actions]
        with GATE:
            now: datetime = database_now()
            RepairAction.objects.filter(id__in=ids, state=ActionState.PLANNED, lease_owner=self.owner).update(
                lease_owner="",
                lease_expires_at=None,
                due_at=now + delay,
                send_error=error[:300],
                send_count=F("send_count") + (1 if error else 0),
            )
