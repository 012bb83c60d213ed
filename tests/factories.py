"""The smallest valid rows and events, and named traits for situations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction

from deadletters import conf
from deadletters.grouping import GroupingMode
from deadletters.intake import Failure, HostClock, Intake
from deadletters.journal.events import Caught, Delivery, ErrorReport, Failed, MessageState
from deadletters.journal.frames import MESSAGE_CONTEXT
from deadletters.journal.message import pack_parts
from deadletters.models import DeadLetter
from deadletters.policy import PolicyBook, TaskPolicySpec
from deadletters.recorder import Recorded, record_failures
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.database import database_now
from opsconsole.core.ids import new_id

_numbers = itertools.count(1)

REFUSED = ErrorReport(
    error_class="shop.errors.MailhubDown",
    text="connection refused by 127.0.0.1:2525",
    traceback='Traceback (most recent call last):\n  File "shop/mail.py", line 7, in send\nshop.errors.MailhubDown',
    call_site="shop.mail:send",
    classes=("shop.errors.MailhubDown", "builtins.ConnectionRefusedError", "builtins.OSError"),
)
TIMED_OUT = ErrorReport(
    error_class="requests.exceptions.ReadTimeout",
    text="read timed out after 10 s",
    call_site="shop.mail:send",
    classes=("requests.exceptions.ReadTimeout", "builtins.OSError"),
)


def delivery(**fields: Any) -> Delivery:
    """Return a received delivery of ``shop.send_mail`` with its whole message sealed."""
    task_id = fields.pop("task_id", None)
    if task_id is None:
        task_id = str(new_id())
    task = fields.pop("task", "shop.send_mail")
    queue = fields.pop("queue", "celery")
    args = fields.pop("body", b'[["a@example.org"], {"order": 7}, {"callbacks": null}]')
    packed, state, digest = pack_parts(
        body=args,
        content_type="application/json",
        content_encoding="utf-8",
        properties={"correlation_id": task_id, "priority": fields.get("priority")},
        headers={"lang": "py", "task": task, "id": task_id, "retries": 0, **fields.pop("headers", {})},
        delivery_info={"exchange": "", "routing_key": queue},
    )
    values: dict[str, Any] = {
        "token": f"t{next(_numbers)}",
        "task_id": task_id,
        "task": task,
        "queue": queue,
        "routing_key": queue,
        "received_boot": boot_now(),
        "received_wall": wall_now(),
        "acked": True,
        "sealed": conf.sealer().seal(packed, MESSAGE_CONTEXT),
        "message_state": state,
        "message_digest": digest,
    }
    if fields.get("message_state") == MessageState.MISSING:
        values["sealed"] = b""
    return Delivery(**{**values, **fields})


def failed(error: ErrorReport = REFUSED, *, ago: float = 0.0, caught: Caught = Caught.FAILURE, **fields: Any) -> Failed:
    """Return a final failure that happened ``ago`` seconds ago."""
    never_started = fields.pop("never_started", False)
    return Failed(
        delivery=fields.pop("delivery", None) or delivery(**fields),
        caught=caught,
        at_boot=boot_now() - ago,
        at_wall=wall_now() - ago,
        error=error,
        never_started=never_started,
    )


def intake(
    *, source: str = "tests", policies: Sequence[TaskPolicySpec] = (), mode: GroupingMode = GroupingMode.CAUSE
) -> Intake:
    return Intake(
        source=source,
        worker="celery@tests",
        release="1.0",
        sealer=conf.sealer(),
        redactor=conf.redactor(),
        policies=PolicyBook(list(policies)),
        mode=mode,
    )


def host_clock(now: datetime | None = None) -> HostClock:
    return HostClock(database_now=now or database_now(), boot_now=boot_now(), wall_now=wall_now(), boot_id=boot_id())


def failure(error: ErrorReport = REFUSED, *, letter_id: UUID | None = None, **fields: Any) -> Failure:
    """Return a prepared failure, ready for the recorder."""
    made = fields.pop("intake", None) or intake(
        source=fields.pop("source", "tests"), policies=fields.pop("policies", ()),
        mode=fields.pop("mode", GroupingMode.CAUSE),
    )  # fmt: skip
    return made.failure(failed(error, **fields), clock=host_clock(), boot_id=boot_id(), letter_id=letter_id)


def record(*failures: Failure) -> list[Recorded]:
    """Record prepared failures in a transaction of their own."""
    with transaction.atomic():
        return record_failures(failures, now=database_now())


def dead_letter(error: ErrorReport = REFUSED, *, ambiguous: bool = False, **fields: Any) -> DeadLetter:
    """Return a recorded letter of the default policy's task, or of one whose last attempt may have taken effect."""
    if "policies" not in fields:
        fields["policies"] = [TaskPolicySpec(pattern="shop.*", effects="outside")]  # type: ignore[arg-type]
    recorded = record(failure(TIMED_OUT if ambiguous else error, **fields))
    return DeadLetter.objects.select_related("incident").get(id=recorded[0].letter_id)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)
