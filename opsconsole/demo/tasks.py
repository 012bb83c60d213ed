"""The jobs of the demo. They fail because something they need is broken, not because they were told to raise.

Each takes ``tenant`` and ``customer`` as keyword arguments; ``opsconsole.demo.identity`` reads whose job it is there.
"""

# ruff: noqa: ARG001  (what a job does not look at is still part of its message)

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from celery import shared_task
from django.conf import settings

from opsconsole.demo.flaky import HOST
from opsconsole.demo.folder import DemoFolder

ANSWER_WITHIN_SECONDS = 3.0
PATIENT_SECONDS = 300.0
STATEMENT_LIMIT_SECONDS = 6


class ServiceMissing(ConnectionError):
    """The demo's services are not running at all; ``manage.py up`` starts them."""


class ServiceRefused(Exception):
    """A service has answered that it will not do it."""


@lru_cache(maxsize=1)
def demo_folder() -> DemoFolder:
    """Return the folder of this installation's demo."""
    return DemoFolder(Path(settings.VAR_DIR) / "demo")


def call(service: str, method: str, path: str, document: Any = None, *, timeout: float = ANSWER_WITHIN_SECONDS) -> Any:
    """Ask a service and return its answer.

    Raises ``ConnectionRefusedError`` where nothing was sent, ``TimeoutError`` where it was and nobody answered.
    """
    port = demo_folder().ports().get(service)
    if port is None:
        raise ServiceMissing(f"the {service} service of the demo is not running")
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request(method, path, body=json.dumps(document), headers={"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status >= 400:
            raise ServiceRefused(f"{service} answered {answer.status} to {method} {path}")
        return json.loads(answer.read())
    finally:
        connection.close()


@shared_task(name="demo.send_receipt")
def send_receipt(*, order: int, tenant: str, customer: str) -> None:
    """Mail a receipt. While the mail service is down its connection is refused, so nothing was sent."""
    call("mail", "POST", "/messages", {"to": f"{customer}@{tenant}.example", "subject": f"Receipt for order {order}"})


@shared_task(name="demo.charge_card")
def charge_card(*, reference: str, amount: str, tenant: str, customer: str) -> None:
    """Charge a card. While the payment service hangs, the charge may have been made, and only the service knows."""
    call("payments", "POST", "/charges", {"reference": reference, "amount": amount})


@shared_task(name="demo.build_statement", time_limit=STATEMENT_LIMIT_SECONDS)
def build_statement(*, month: str, tenant: str, customer: str) -> None:
    """Fetch a month's charges. It waits longer for an answer than its time limit lets it, and is killed."""
    call("payments", "GET", f"/statements/{month}", timeout=PATIENT_SECONDS)


@shared_task(name="demo.render_label")
def render_label(*, order: int, tenant: str, customer: str) -> None:
    """Render a label. While things are broken the process dies the way a process out of memory does."""
    if demo_folder().condition().is_broken:
        os.kill(os.getpid(), signal.SIGKILL)


@shared_task(
    name="demo.import_stock",
    autoretry_for=(ConnectionError,),
    max_retries=2,
    retry_backoff=1,
    retry_backoff_max=2,
    retry_jitter=False,
)
def import_stock(*, warehouse: str, tenant: str, customer: str) -> None:
    """Ask for stock figures by mail, with two retries of Celery's own before it counts as failed."""
    call("mail", "POST", "/messages", {"to": f"{warehouse}@{tenant}.example", "subject": "Stock, please"})


@shared_task(name="demo.update_address")
def update_address(*, street: str, tenant: str, customer: str) -> None:
    """Change an address; the demo also sends one with a misspelt argument, which no retry can help."""
    time.sleep(0.05)


@shared_task(name="demo.refresh_prices")
def refresh_prices(*, tenant: str, customer: str) -> int:
    """Work that is always well."""
    time.sleep(0.05)
    return 1


@shared_task(name="demo.count_visits")
def count_visits(*, page: str, tenant: str, customer: str) -> int:
    """Work that is always well."""
    return len(page)
