"""Requests at the same moment, and requests in a project that opens a transaction around each."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from unittest import mock

import pytest
from django.db import connection
from django.test import override_settings
from django.urls import get_resolver

from deadletters.models import DeadLetter
from grants.models import AuditEvent
from opsconsole.core.rest import API_NAMESPACE
from repairs.models import RepairAction, RepairBatch
from tests.api.client import Api
from tests.api.test_lists import letters
from tests.cast import Cast
from tests.factories import dead_letter

THREADS = 20


def at_once(apis: list[Api], path: str, body: dict[str, Any], keys: list[str]) -> list[Any]:
    """Send one request per client, all at the same moment."""
    barrier = Barrier(len(apis))

    def send(index: int) -> Any:
        try:
            barrier.wait(timeout=60)
            return apis[index].post(path, body, key=keys[index])
        finally:
            connection.close()

    with ThreadPoolExecutor(len(apis)) as pool:
        return list(pool.map(send, range(len(apis))))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("many", [False, True], ids=["one letter", "an incident"])
def test_twenty_requests_with_one_key_act_once_and_answer_alike(cast: Cast, many: bool) -> None:
    """API-01: one repair; everybody gets the same body, all but one of them marked as replays; never a 5xx."""
    made = letters(3)
    incident_id = made[0].incident_id
    path, body = f"dead-letters/{made[0].id}/retry", {}
    if many:
        path, body = f"incidents/{incident_id}/retry", {"all": True, "expected_count": 3}
    answers = at_once([Api(cast.ada) for _ in range(THREADS)], path, body, ["K1"] * THREADS)
    assert {answer.status_code for answer in answers} == {202}
    documents = [answer.json() for answer in answers]
    assert [document.pop("idempotent_replay") for document in documents].count(False) == 1
    assert sum(answer.has_header("Idempotent-Replayed") for answer in answers) == THREADS - 1
    assert len({json.dumps(document, sort_keys=True) for document in documents}) == 1
    assert RepairAction.objects.count() == (3 if many else 1)
    assert RepairBatch.objects.count() == (1 if many else 0)
    # After a crash between commit and answer: the stored result comes back.
    again = Api(cast.ada).post(path, body, key="K1")
    assert again["Idempotent-Replayed"] == "true"
    assert again.json() == {**documents[0], "idempotent_replay": True}


@pytest.mark.django_db(transaction=True)
def test_two_operators_at_once_start_one_repair(cast: Cast) -> None:
    """B5, C17: one is planned, the other is told that the job is being retried."""
    letter = dead_letter()
    answers = at_once([Api(cast.ada), Api(cast.olga)], f"dead-letters/{letter.id}/retry", {}, ["K1", "K2"])
    assert sorted(answer.status_code for answer in answers) == [202, 409]
    assert RepairAction.objects.count() == 1
    assert AuditEvent.objects.filter(action="dead-letters.retry", verdict="allowed").count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_refusal_is_audited_in_a_project_with_a_transaction_around_each_request(cast: Cast) -> None:
    """DESIGN 9: our views stay outside of it, so that a service's commit is one."""
    letter = dead_letter()
    with mock.patch.dict(connection.settings_dict, {"ATOMIC_REQUESTS": True}):
        api = Api(cast.ada)
        assert api.get("incidents").status_code == 200
        assert api.get(f"dead-letters/{letter.id}/payload").status_code == 200
        assert api.post(f"dead-letters/{letter.id}/retry").status_code == 202
        assert Api(cast.nobody).get(f"dead-letters/{letter.id}").status_code == 404
    assert DeadLetter.objects.get(id=letter.id).state == "retrying"
    assert AuditEvent.objects.filter(operator_name="nobody", verdict="denied").count() == 1


def test_every_view_stays_outside_of_a_transaction_around_requests() -> None:
    _, resolver = get_resolver().namespace_dict[API_NAMESPACE]
    for pattern in resolver.url_patterns:
        if pattern.name not in ("schema", "docs"):  # they touch no database
            assert "default" in pattern.callback._non_atomic_requests, pattern.name


@pytest.mark.django_db
def test_the_api_does_not_depend_on_the_projects_own_rest_settings(cast: Cast) -> None:
    """A project that attaches has an API of its own, with settings of its own."""
    theirs = {
        "DEFAULT_AUTHENTICATION_CLASSES": [],
        "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.AllowAny"],
        "EXCEPTION_HANDLER": "nowhere.handler",
        "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.BrowsableAPIRenderer"],
        "UNAUTHENTICATED_USER": None,
        "DATETIME_FORMAT": "%d.%m.%Y",
    }
    letter = dead_letter()
    with override_settings(REST_FRAMEWORK=theirs, TIME_ZONE="Europe/Paris"):
        assert Api().get("me").status_code == 401
        row = Api(cast.ada).rows("dead-letters")[0]
    assert row["last_seen_at"] == letter.last_seen_at.isoformat().replace("+00:00", "Z")
