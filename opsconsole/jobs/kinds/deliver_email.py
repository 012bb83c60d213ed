"""``deliver_email``: a message about a report, as an e-mail through Django's ``EMAIL_BACKEND``."""

from __future__ import annotations

import re
import smtplib
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from email.utils import parseaddr
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.mail import EmailMessage, get_connection
from django.core.validators import validate_email

from opsconsole.core.effects import Effects
from opsconsole.jobs.bases import RecordKind
from opsconsole.jobs.errors import JobError, Refused, TryAgain, Unanswered
from opsconsole.jobs.kind import Work
from opsconsole.jobs.kinds.deliver_action import DELIVERY_STATES
from opsconsole.jobs.models import CaseMessage, DeliveryState, EmailDelivery, Job, MessageState
from opsconsole.jobs.querysets import TenantQuerySet

_DOMAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", re.ASCII)


class DeliverEmail(RecordKind):
    """Sends the e-mail; with the delivery goes its message (A6.7). Eight attempts, as the snapshot counts (A7).

    The ``Message-ID`` is made of the job's idempotency key, so that a mail server or a person can tell a second copy.
    Declared errors: ``TryAgain`` where no session came about (``connection_refused``, ``mail_server_away``,
    ``mail_server_refused_us``) and for a reply 4xx (``smtp_451``); ``Refused`` for a reply 5xx (``smtp_550``), for
    ``message_invalid`` and for ``record_missing``; ``Unanswered`` where the session broke off while the message was
    being handed over (``connection_lost``, ``timed_out``).
    """

    name = "deliver_email"
    runbook = "docs/runbooks.md#deliver_email"
    effects = Effects.OUTSIDE
    record_type = "email_delivery"
    max_attempts = 8
    lease = timedelta(seconds=90)  # EMAIL_TIMEOUT holds for each step of a session
    ids = ("outbox_id",)
    states = replace(DELIVERY_STATES, never_dead=(DeliveryState.DELIVERED,))  # A6.7

    def records(self) -> TenantQuerySet:
        return EmailDelivery.objects.select_related("message")

    def run(self, work: Work) -> None:
        delivery: EmailDelivery = self.load(work)
        if not self.is_done(delivery):
            send(make_message(delivery, work.idempotency_key))

    def complete(self, job: Job, result: Any, now: datetime) -> None:
        super().complete(job, result, now)
        self._tell_message(job, DeliveryState.DELIVERED, MessageState.DELIVERED)

    def mark_dead(self, job: Job, code: str, now: datetime) -> None:
        super().mark_dead(job, code, now)
        self._tell_message(job, DeliveryState.FAILED, MessageState.FAILED)

    def requeue(self, job: Job, now: datetime) -> None:
        super().requeue(job, now)
        self._tell_message(job, DeliveryState.PENDING, MessageState.PENDING)

    def _tell_message(self, job: Job, delivery: DeliveryState, state: MessageState) -> None:
        """Write the state of a delivery that is in ``delivery`` to its message, unless that has arrived."""
        messages = CaseMessage.objects.filter(id__in=self.row(job).filter(state=delivery).values("message_id"))
        messages.exclude(delivery_state=MessageState.DELIVERED).update(delivery_state=state)


def make_message(delivery: EmailDelivery, key: str) -> EmailMessage:
    """Return the e-mail; the domain of its ``Message-ID`` is the sender's."""
    domain = parseaddr(settings.DEFAULT_FROM_EMAIL)[1].rpartition("@")[2]
    if _DOMAIN.fullmatch(domain) is None:
        domain = "localhost"
    return EmailMessage(
        subject=delivery.subject,
        body=delivery.message.body,
        to=[delivery.to_address],
        headers={"Message-ID": f"<{key}@{domain}>"},
    )


def send(message: EmailMessage) -> None:
    """Send one e-mail, and say of an error whether the message may have been taken."""
    connection = get_connection()
    try:
        # What no server would take is found before one is asked.
        for address in message.to:
            validate_email(address)
        message.message()
    except (ValidationError, ValueError) as error:
        raise Refused("message_invalid", f"this is no e-mail: {type(error).__name__}") from error
    try:
        connection.open()
    except (OSError, smtplib.SMTPException) as error:
        raise _no_session(error) from error
    try:
        if not connection.send_messages([message]):
            raise Refused("message_invalid", "the mail backend has sent nothing")
    except (OSError, smtplib.SMTPException) as error:
        raise _broken_off(error) from error
    finally:
        # The message is taken by now, or it is known that it is not: how the session ends changes neither.
        with suppress(OSError, smtplib.SMTPException):
            connection.close()


def _no_session(error: Exception) -> JobError:
    if isinstance(error, ConnectionRefusedError):
        return TryAgain("connection_refused", "the mail server refused the connection")
    if isinstance(error, smtplib.SMTPResponseException):
        # Our greeting or our credentials: wrong for every e-mail alike, and set right without touching one of them.
        return TryAgain("mail_server_refused_us", f"the mail server answered {error.smtp_code}")
    return TryAgain("mail_server_away", f"no session with the mail server: {type(error).__name__}")


def _broken_off(error: Exception) -> JobError:
    codes: list[int] = []
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        codes = [code for code, _ in error.recipients.values()]
    elif isinstance(error, smtplib.SMTPResponseException):
        codes = [error.smtp_code]
    if codes and all(code >= 500 for code in codes):
        return Refused(f"smtp_{codes[0]}", "the mail server will not take this message")
    if codes and all(code >= 400 for code in codes):
        return TryAgain(f"smtp_{codes[0]}", "the mail server does not take this message now")
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return Refused("message_invalid", "the mail server cannot take such an address")
    if isinstance(error, TimeoutError):
        return Unanswered("timed_out", "the mail server did not answer while it had the message")
    return Unanswered("connection_lost", f"the session broke off: {type(error).__name__}")


KIND = DeliverEmail()
