"""The demo's ``EMAIL_BACKEND``: e-mails go to its mail service, which refuses connections while things are broken."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend

from opsconsole.demo.tasks import call


class Backend(BaseEmailBackend):
    """Hands e-mails over by HTTP; whether one was taken is as certain as with a mail server."""

    def open(self) -> bool:
        """Look whether the service is there; raises ``ConnectionError``."""
        call("mail", "GET", "/")
        return True

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        """Send each message; raises ``ConnectionError`` or ``TimeoutError``."""
        for message in email_messages:
            call("mail", "POST", "/messages", {"to": ", ".join(message.to), "subject": str(message.subject)})
        return len(email_messages)
