"""What ``manage.py check`` advises about capture; it changes no setting of anybody."""

from __future__ import annotations

from typing import Any

from celery import current_app
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured

from deadletters import conf


@register(Tags.compatibility)
def check_settings(**_: Any) -> list[CheckMessage]:
    """Refuse settings that make no sense, before a worker finds out at night."""
    messages: list[CheckMessage] = []
    for read, hint in (
        (conf.sealer, "See manage.py keys new."),
        (conf.source, "It names environment, service and broker, such as shop-production."),
        (conf.grouping_mode, "See docs/settings.md."),
        (conf.declared_policies, "See docs/settings.md."),
        (conf.identity, "OPSCONSOLE_IDENTITY is the dotted path of a function."),
    ):
        try:
            read()
        except (ImproperlyConfigured, ImportError) as error:
            messages.append(Error(str(error), hint=hint, id="ops_deadletters.E001"))
    return messages


@register(Tags.compatibility)
def check_journal_folder(**_: Any) -> list[CheckMessage]:
    """Warn where the journal lies on what a restart of the host may empty."""
    chosen = conf.journal_root()
    if chosen.kind != "temporary":
        return []
    return [
        Warning(
            f"Failures wait in {chosen.root.path}: {chosen.why}.",
            hint="Set OPSCONSOLE_JOURNAL_DIR to a local folder that outlives a restart.",
            id="ops_deadletters.W001",
        )
    ]


@register(Tags.security, deploy=True)
def check_keys(**_: Any) -> list[CheckMessage]:
    """Insist on own sealing keys in production: a derived one changes with SECRET_KEY and takes all messages along."""
    if getattr(settings, "OPSCONSOLE_KEYS", ""):
        return []
    return [
        Error(
            "Messages are sealed with a key derived from SECRET_KEY.",
            hint="Set OPSCONSOLE_KEYS; manage.py keys new prints one.",
            id="ops_deadletters.E002",
        )
    ]


RISKY_CELERY_SETTINGS: tuple[tuple[str, object, str, str], ...] = (
    (
        "task_reject_on_worker_lost",
        True,
        "W002",
        "A job that kills its worker is delivered again without end; task_retry_on_worker_lost is bounded.",
    ),
    (
        "task_track_started",
        True,
        "W003",
        "With the result backend down a job's body never runs, and its message is acknowledged all the same.",
    ),
    (
        "worker_cancel_long_running_tasks_on_connection_loss",
        False,
        "W004",
        "With late acknowledgements a lost connection runs a long job twice, once here and once elsewhere.",
    ),
)
"""Setting, the value that is risky, the message's number, and what happens then (Celery 5.7, measured)."""


@register(Tags.compatibility)
def check_celery(**_: Any) -> list[CheckMessage]:
    """Advise on settings of the project's Celery app that lose or multiply jobs."""
    app: Any = current_app
    return [
        Warning(f"Celery's {name} is {value!r}.", hint=hint, id=f"ops_deadletters.{number}")
        for name, value, number, hint in RISKY_CELERY_SETTINGS
        if app.configured and app.conf.get(name) is value and _is_relevant(name, app)
    ]


def _is_relevant(name: str, app: Any) -> bool:
    if name == "task_track_started":
        return bool(app.conf.result_backend)
    if name == "worker_cancel_long_running_tasks_on_connection_loss":
        return bool(app.conf.task_acks_late)
    return True
