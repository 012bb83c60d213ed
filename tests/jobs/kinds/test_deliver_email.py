"""``deliver_email``, against a real mail server."""

from __future__ import annotations

import email as email_package
import smtplib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from opsconsole.core.effects import Effects
from opsconsole.jobs.errors import JobError, Refused, TryAgain, Unanswered
from opsconsole.jobs.kinds import deliver_email
from opsconsole.jobs.kinds.deliver_email import KIND
from opsconsole.jobs.models import EmailDelivery
from tests.jobs import records
from tests.jobs.mail_server import HANG, HANG_UP, MailServer, taking_mail
from tests.jobs.records import EXHAUSTED, NOW, columns, email, job
from tests.jobs.server import closed_port

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=1)


@pytest.fixture
def mail(settings: Any) -> Iterator[MailServer]:
    with taking_mail() as server:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_TIMEOUT = "127.0.0.1", server.port, 0.5
        settings.DEFAULT_FROM_EMAIL = "Desk <desk@example.org>"
        yield server


def states(delivery: EmailDelivery) -> tuple[str, str]:
    """Return the states of delivery and message."""
    found = EmailDelivery.objects.select_related("message").get(id=delivery.id)
    return found.state, found.message.delivery_state


@pytest.mark.parametrize("state", ["pending", "delivering", "retrying", "failed"])
def test_with_the_delivery_of_a_dead_job_its_message_has_failed(state: str) -> None:
    """A6.7."""
    delivery = email(state=state, lease_expires_at=NOW)
    KIND.mark_dead(job("deliver_email", delivery), EXHAUSTED, LATE)
    assert states(delivery) == ("failed", "failed")
    assert columns(delivery)["last_error_code"] == EXHAUSTED


def test_a_delivered_email_is_left_alone_with_its_message() -> None:
    """A6.7."""
    delivery = email(state="delivered")
    before = columns(delivery)
    KIND.mark_dead(job("deliver_email", delivery), EXHAUSTED, LATE)
    assert columns(delivery) == before
    assert states(delivery) == ("delivered", "pending")


def test_a_message_that_has_arrived_in_another_way_stays_delivered() -> None:
    """A6.7."""
    delivery = email(message_state="delivered")
    KIND.mark_dead(job("deliver_email", delivery), EXHAUSTED, LATE)
    assert states(delivery) == ("failed", "delivered")


def test_a_retried_email_is_pending_again_with_its_message() -> None:
    """A12."""
    delivery = email(state="failed", message_state="failed")
    KIND.requeue(job("deliver_email", delivery), LATE)
    assert states(delivery) == ("pending", "pending")


def test_there_are_eight_attempts() -> None:
    """A7."""
    assert KIND.max_attempts == 8
    assert KIND.effects is Effects.OUTSIDE


def test_an_email_arrives_with_an_id_made_of_its_key(mail: MailServer) -> None:
    delivery = email(subject="Your report R-1", to_address="ada@example.org")
    of = job("deliver_email", delivery)
    result = records.run(of)
    [text] = mail.taken
    taken = email_package.message_from_string(text)
    assert taken["Message-ID"] == f"<{of.id}@example.org>"
    assert (taken["Subject"], taken["To"], taken["From"]) == (
        "Your report R-1",
        "ada@example.org",
        "Desk <desk@example.org>",
    )
    assert "We have looked at it." in text
    KIND.complete(of, result, LATE)
    assert states(delivery) == ("delivered", "delivered")


@pytest.mark.parametrize(
    ("replies", "meaning", "code"),
    [
        ({"GREETING": "421 busy"}, TryAgain, "mail_server_refused_us"),
        ({"GREETING": "554 go away"}, TryAgain, "mail_server_refused_us"),
        ({"GREETING": HANG_UP}, TryAgain, "mail_server_away"),
        ({"GREETING": HANG}, TryAgain, "mail_server_away"),
        ({"MAIL": "451 later"}, TryAgain, "smtp_451"),
        ({"MAIL": "550 not from you"}, Refused, "smtp_550"),
        ({"RCPT": "450 later"}, TryAgain, "smtp_450"),
        ({"RCPT": "550 nobody of this name"}, Refused, "smtp_550"),
        ({"DATA": "451 later"}, TryAgain, "smtp_451"),
        ({"DATA": "554 no"}, Refused, "smtp_554"),
        ({"END": "452 full"}, TryAgain, "smtp_452"),
        ({"END": "552 too big"}, Refused, "smtp_552"),
        ({"END": HANG_UP}, Unanswered, "connection_lost"),
        ({"END": HANG}, Unanswered, "connection_lost"),
    ],
)
def test_what_the_mail_server_says_tells_whether_it_may_have_happened(
    mail: MailServer, replies: dict[str, str], meaning: type[JobError], code: str
) -> None:
    mail.replies = replies
    with pytest.raises(meaning) as caught:
        records.run(job("deliver_email", email()))
    assert caught.value.code == code
    assert mail.taken == []


@pytest.mark.parametrize("reply", [HANG_UP, HANG, "500 what"])
def test_a_message_that_was_taken_is_sent_however_the_session_ends(mail: MailServer, reply: str) -> None:
    mail.replies = {"QUIT": reply}
    records.run(job("deliver_email", email()))
    assert len(mail.taken) == 1


def test_nothing_has_happened_where_no_mail_server_listens(mail: MailServer, settings: Any) -> None:
    settings.EMAIL_PORT = closed_port()
    with pytest.raises(TryAgain) as caught:
        records.run(job("deliver_email", email()))
    assert caught.value.code == "connection_refused"


@pytest.mark.parametrize("fields", [{"subject": "two\nlines"}, {"to_address": "ada@example.org\nBcc: all@example.org"}])
def test_a_header_with_a_line_break_is_refused_before_anybody_is_asked(mail: MailServer, fields: Any) -> None:
    with pytest.raises(Refused) as caught:
        records.run(job("deliver_email", email(**fields)))
    assert caught.value.code == "message_invalid"
    assert mail.taken == []


@pytest.mark.parametrize("address", ["", "no address", "@", "a@", "a@b@c.example", "<a@b.example>"])
def test_an_address_that_is_none_is_refused_before_anybody_is_asked(mail: MailServer, address: str) -> None:
    with pytest.raises(Refused) as caught:
        records.run(job("deliver_email", email(to_address=address)))
    assert caught.value.code == "message_invalid"
    assert mail.taken == []


def test_hostile_text_is_sent_as_text(mail: MailServer) -> None:
    records.run(job("deliver_email", email(subject="Grüße ‮ 🎉")))
    assert len(mail.taken) == 1


def test_refused_recipients_of_both_sorts_leave_it_open() -> None:
    """One address may get it later: a refusal for good would be wrong for that one."""
    mixed = smtplib.SMTPRecipientsRefused({"a@example.org": (550, b"no"), "b@example.org": (450, b"later")})
    assert isinstance(deliver_email._broken_off(mixed), TryAgain)
