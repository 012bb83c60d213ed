"""The schedule of celery beat, as the console shows it."""

from __future__ import annotations

import json

import pytest
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from tests.admin.conftest import SignIn
from tests.admin.tools import text_of
from tests.cast import Cast

pytestmark = pytest.mark.django_db(transaction=True)


def _periodic(name: str, **fields: object) -> PeriodicTask:
    every, _made = IntervalSchedule.objects.get_or_create(every=10, period=IntervalSchedule.SECONDS)
    return PeriodicTask.objects.create(name=name, task="shop.sweep", interval=every, **fields)


def test_the_schedule_says_what_is_sent_and_when_it_was_sent_last(cast: Cast, sign_in: SignIn) -> None:
    _periodic("sweep", description="repairs what hangs", total_run_count=1_234, queue="sweeps")
    _periodic("old", enabled=False)
    text = text_of(sign_in(cast.vera).get("/ops/schedule/").content.decode())
    for part in ("sweep", "repairs what hangs", "shop.sweep", "queue sweeps", "every 10 seconds", "1,234", "never"):
        assert part in text
    assert text.index("old shop.sweep") < text.index("repairs what hangs"), "the newest first"
    assert "Off" in text[text.index("old shop.sweep") : text.index("repairs what hangs")]


def test_the_arguments_of_a_periodic_task_are_not_shown(cast: Cast, sign_in: SignIn) -> None:
    """SEC-01: nothing redacts them, so nobody sees them."""
    _periodic("sweep", args=json.dumps(["s3cret-token"]), kwargs=json.dumps({"password": "s3cret-token"}))
    assert "s3cret-token" not in sign_in(cast.ada).get("/ops/schedule/").content.decode()


def test_the_schedule_is_not_for_who_may_read_nothing(cast: Cast, sign_in: SignIn) -> None:
    """GRA-01"""
    client = sign_in(cast.nobody)
    assert client.get("/ops/schedule/").status_code == 403
    assert "Schedule" not in client.get("/ops/").content.decode()


def test_a_hostile_name_is_text(cast: Cast, sign_in: SignIn) -> None:
    """SEC-01"""
    _periodic("<script>alert(1)</script>\u202e", description="<b>")
    page = sign_in(cast.vera).get("/ops/schedule/").content.decode()
    assert "<script>alert" not in page
    assert "‹U+202E›" in page
