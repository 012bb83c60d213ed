"""Signed calls: what receivers can check, and what a provider is asked afterwards."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from opsconsole.jobs import conf, webhooks
from opsconsole.jobs.errors import JobError, Refused, TryAgain, Unanswered
from tests.jobs.server import (
    Behaviour,
    TestServer,
    answers,
    closed_port,
    hangs,
    hangs_up,
    redirects,
    resets,
    status,
    talks_nonsense,
)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + base64.b64encode(b"another secret of 32 characters!").decode()
TENANT = "harbour"


def post(endpoint: str, **fields: Any) -> Any:
    values: dict[str, Any] = {"tenant": TENANT, "key": "key-1", "document": {"type": "test", "data": {"ü": 1.5}}}
    return webhooks.post(endpoint=endpoint, **{**values, "timeout": 0.5, **fields})


def test_the_signature_is_that_of_the_specification() -> None:
    [secret] = conf.read_secrets(SECRET)
    signed = webhooks.signature(
        secret, key="msg_p5jXN8AQM9LWM0D4loKWxJek", timestamp=1614265330, body=b'{"test": 2432232314}'
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_receiver_can_check_who_sent_what(server: TestServer, settings: Any) -> None:
    settings.OPSCONSOLE_WEBHOOK_SECRET = SECRET
    post(server.on("/hook", status(202)))
    [asked] = server.asked
    headers = asked.headers
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + asked.body
    expected = hmac.new(base64.b64decode(SECRET.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"
    assert headers["webhook-id"] == "key-1"
    assert headers["content-type"] == "application/json"
    assert asked.document == {"type": "test", "data": {"ü": 1.5}}


def test_two_secrets_sign_side_by_side_while_receivers_change_over(server: TestServer, settings: Any) -> None:
    settings.OPSCONSOLE_WEBHOOK_SECRET = f"{OTHER}, {SECRET}"
    post(server.on("/hook", status(200)))
    signatures = server.asked[0].headers["webhook-signature"].split(" ")
    assert len(set(signatures)) == 2
    assert all(one.startswith("v1,") for one in signatures)


def test_a_tenant_can_have_a_secret_of_its_own(settings: Any) -> None:
    settings.OPSCONSOLE_WEBHOOK_SECRET = SECRET
    settings.OPSCONSOLE_WEBHOOK_SECRETS = {"meadow": OTHER}
    assert conf.webhook_secrets("meadow") == conf.read_secrets(OTHER)
    assert conf.webhook_secrets(TENANT) == conf.read_secrets(SECRET)


def test_without_a_secret_one_is_derived_that_is_not_the_secret_key(settings: Any) -> None:
    settings.OPSCONSOLE_WEBHOOK_SECRET = ""
    [derived] = conf.webhook_secrets(TENANT)
    assert len(derived) == 32
    assert settings.SECRET_KEY.encode() not in derived


@pytest.mark.parametrize("text", ["whsec_", "whsec_c2hvcnQ=", "not base64!", f"{SECRET},whsec_c2hvcnQ="])
def test_a_secret_that_is_none_is_said_by_the_name_of_its_setting(settings: Any, text: str) -> None:
    settings.OPSCONSOLE_WEBHOOK_SECRET = text
    with pytest.raises(ImproperlyConfigured, match="OPSCONSOLE_WEBHOOK_SECRET: a secret is whsec_") as caught:
        conf.webhook_secrets(TENANT)
    assert "c2hvcnQ" not in str(caught.value)


@pytest.mark.parametrize(
    ("behaviour", "meaning", "code"),
    [
        (status(500), TryAgain, "http_500"),
        (status(503), TryAgain, "http_503"),
        (status(429), TryAgain, "http_429"),
        (status(504), Unanswered, "http_504"),
        (status(400), Refused, "http_400"),
        (status(422), Refused, "http_422"),
        (redirects("http://127.0.0.1:1/elsewhere"), Refused, "http_302"),
        (hangs, Unanswered, "timed_out"),
        (hangs_up, Unanswered, "connection_lost"),
        (resets, Unanswered, "connection_lost"),
        (talks_nonsense, Unanswered, "answer_malformed"),
    ],
)
def test_what_came_of_a_call_says_whether_it_may_have_happened(
    server: TestServer, behaviour: Behaviour, meaning: type[JobError], code: str
) -> None:
    with pytest.raises(meaning) as caught:
        post(server.on("/hook", behaviour))
    assert caught.value.code == code
    assert len(server.asked) == 1


def test_a_call_that_nobody_takes_can_be_made_again() -> None:
    with pytest.raises(TryAgain) as caught:
        post(f"http://127.0.0.1:{closed_port()}/")
    assert caught.value.code == "connection_refused"


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        post("mailto:ada@example.org")
    assert caught.value.code == "scheme_refused"


# -- The probe (C13) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "happened", "evidence"),
    [
        (answers({"status": "done"}), True, "200 done"),
        (answers({"status": "applied"}), True, "200 applied"),
        (answers({"status": "rejected"}), False, "200 rejected"),
        (status(404), False, "404"),
        (answers({"status": "pending"}), None, "200 pending"),
        (answers({"status": ["done"]}), None, "200 ['done']"),
        (answers({}), None, "200 None"),
        (status(200, b"<html>"), None, "200, but"),
        (status(401), None, "401"),
        (status(503), None, "503"),
        (hangs_up, None, "connection"),
    ],
)
def test_the_provider_says_whether_it_knows_the_key(
    server: TestServer, settings: Any, behaviour: Behaviour, happened: bool | None, evidence: str
) -> None:
    """C13."""
    settings.OPSCONSOLE_WEBHOOK_PROBES = [server.url("/hook")]
    server.on("/hook/key-1", behaviour)
    answer = webhooks.probe(endpoint=server.url("/hook"), tenant=TENANT, key="key-1")
    assert answer.happened is happened
    assert evidence in answer.evidence
    assert f"GET {server.url('/hook')}/key-1" in answer.evidence
    assert server.asked[0].method == "GET"
    assert server.asked[0].headers["webhook-id"] == "key-1"


def test_evidence_is_short_and_safe_whatever_the_provider_says(server: TestServer, settings: Any) -> None:
    """C13."""
    settings.OPSCONSOLE_WEBHOOK_PROBES = [server.url()]
    server.on("/hook/key-1", answers({"status": "\x00\u202e" * 1_000}))
    answer = webhooks.probe(endpoint=server.url(), tenant=TENANT, key="key-1")
    assert answer.happened is None
    assert len(answer.evidence) <= 300
    assert "\x00" not in answer.evidence


def test_an_endpoint_that_is_not_said_to_have_a_probe_is_not_asked(server: TestServer, settings: Any) -> None:
    """C13: a 404 from a server that keeps no keys would say that nothing has happened."""
    settings.OPSCONSOLE_WEBHOOK_PROBES = [server.url("/hooks"), server.url("/hook/inner")]
    answer = webhooks.probe(endpoint=server.url("/hook"), tenant=TENANT, key="key-1")
    assert answer.happened is None
    assert server.asked == []


def test_a_probe_keeps_the_query_of_its_endpoint(server: TestServer, settings: Any) -> None:
    """C13."""
    settings.OPSCONSOLE_WEBHOOK_PROBES = [server.url("/hook")]
    server.on("/hook/key-1?site=a", answers({"status": "done"}))
    assert webhooks.probe(endpoint=server.url("/hook?site=a"), tenant=TENANT, key="key-1").happened is True
