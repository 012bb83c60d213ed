"""``fetch_evidence``."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from hashlib import sha256
from typing import Any

import pytest

from opsconsole.core.effects import Effects
from opsconsole.jobs.conf import EvidenceReach
from opsconsole.jobs.errors import JobError, Refused, TryAgain
from opsconsole.jobs.kinds.fetch_evidence import KIND
from tests.jobs import records
from tests.jobs.records import EXHAUSTED, NOW, columns, evidence, job
from tests.jobs.server import (
    Behaviour,
    TestServer,
    closed_port,
    drips,
    hangs,
    hangs_up,
    redirects,
    resets,
    status,
    stops_short,
    streams,
)

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=1)


@pytest.fixture(autouse=True)
def loopback_allowed(settings: Any) -> None:
    settings.OPSCONSOLE_EVIDENCE_ALLOW = ["127.0.0.1"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsconsole.jobs.kinds.fetch_evidence.ANSWER_WITHIN_SECONDS", 0.5)


@pytest.mark.parametrize("state", ["pending", "fetching", "unavailable", "failed"])
def test_the_request_of_a_dead_job_has_failed(state: str) -> None:
    """A6.3."""
    made = evidence(state=state)
    KIND.mark_dead(job("fetch_evidence", made), EXHAUSTED, LATE)
    found = columns(made)
    assert (found["state"], found["last_error_code"], found["updated_at"]) == ("failed", EXHAUSTED, LATE)


def test_available_evidence_does_not_fail() -> None:
    """A6.3."""
    made = evidence(state="available", content=b"x", size=1)
    before = columns(made)
    KIND.mark_dead(job("fetch_evidence", made), EXHAUSTED, LATE)
    assert columns(made) == before


def test_what_was_found_is_kept_with_its_hash(server: TestServer) -> None:
    content = bytes(range(256)) * 40
    made = evidence(url=server.on("/photo", status(200, content, Content_Type="image/png")), state="fetching")
    of = job("fetch_evidence", made)
    KIND.complete(of, records.run(of), LATE)
    found = columns(made)
    assert (found["state"], found["size"], found["content_type"]) == ("available", 10_240, "image/png")
    assert bytes(found["content"]) == content
    assert found["sha256"] == sha256(content).hexdigest()
    assert found["fetched_at"] == LATE


def test_a_hostile_content_type_is_made_safe(server: TestServer) -> None:
    def answer(handler: Any) -> None:
        handler.wfile.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: a\x1b\x00" + b"b" * 500 + b"\r\nContent-Length: 0\r\n\r\n"
        )

    made = evidence(url=server.on("/x", answer))
    of = job("fetch_evidence", made)
    KIND.complete(of, records.run(of), LATE)
    kept = columns(made)["content_type"]
    assert len(kept) <= 100
    assert "\x00" not in kept


@pytest.mark.parametrize("code", [404, 410])
def test_what_the_server_says_is_not_there_is_unavailable(server: TestServer, code: int) -> None:
    made = evidence(url=server.on("/gone", status(code)), state="fetching")
    of = job("fetch_evidence", made)
    KIND.complete(of, records.run(of), LATE)
    found = columns(made)
    assert (found["state"], found["last_error_code"], found["content"]) == ("unavailable", f"http_{code}", None)


@pytest.mark.parametrize(
    ("behaviour", "meaning", "code"),
    [
        (status(500), TryAgain, "http_500"),
        (status(503), TryAgain, "http_503"),
        (status(429), TryAgain, "http_429"),
        (status(504), TryAgain, "http_504"),
        (status(401), Refused, "http_401"),
        (status(403), Refused, "http_403"),
        (status(304), Refused, "http_304"),
        (hangs, TryAgain, "timed_out"),
        (drips, TryAgain, "timed_out"),
        (hangs_up, TryAgain, "connection_lost"),
        (resets, TryAgain, "connection_lost"),
        (stops_short, TryAgain, "answer_malformed"),
        (redirects("http://169.254.169.254/latest/meta-data/"), Refused, "address_forbidden"),
        (redirects("http://[::ffff:10.0.0.1]/"), Refused, "address_forbidden"),
        (redirects("file:///etc/passwd"), Refused, "scheme_refused"),
        (redirects("http://ada:secret@127.0.0.1/"), Refused, "credentials_in_url"),
        (redirects("/x"), Refused, "too_many_redirects"),
    ],
)
def test_what_came_of_it_says_whether_to_ask_again(
    server: TestServer, behaviour: Behaviour, meaning: type[JobError], code: str
) -> None:
    with pytest.raises(meaning) as caught:
        records.run(job("fetch_evidence", evidence(url=server.on("/x", behaviour))))
    assert caught.value.code == code


@pytest.mark.parametrize("make", [lambda size: status(200, b"x" * size), streams])
def test_more_than_the_setting_allows_is_not_kept(server: TestServer, settings: Any, make: Any) -> None:
    settings.OPSCONSOLE_EVIDENCE_BYTES = 20_000
    with pytest.raises(Refused) as caught:
        records.run(job("fetch_evidence", evidence(url=server.on("/x", make(20_001)))))
    assert caught.value.code == "too_large"
    fits = records.run(job("fetch_evidence", evidence(url=server.on("/y", make(20_000)))))
    assert len(fits.content) == 20_000


def test_nobody_listening_is_asked_again_later() -> None:
    with pytest.raises(TryAgain) as caught:
        records.run(job("fetch_evidence", evidence(url=f"http://127.0.0.1:{closed_port()}/")))
    assert caught.value.code == "connection_refused"


def test_a_name_without_an_address_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    with pytest.raises(TryAgain) as caught:
        records.run(job("fetch_evidence", evidence(url="http://photos.example/")))
    assert caught.value.code == "dns_failed"


def test_private_addresses_are_refused_unless_the_setting_names_them(server: TestServer, settings: Any) -> None:
    made = evidence(url=server.on("/x", status(200, b"inside")))
    settings.OPSCONSOLE_EVIDENCE_ALLOW = []
    with pytest.raises(Refused) as caught:
        records.run(job("fetch_evidence", made))
    assert caught.value.code == "address_forbidden"
    assert server.asked == []
    for allowed in ("127.0.0.0/8", "127.0.0.1"):
        settings.OPSCONSOLE_EVIDENCE_ALLOW = [allowed]
        assert records.run(job("fetch_evidence", made)).content == b"inside"


@pytest.mark.parametrize(
    ("allowed", "host", "address", "is_allowed"),
    [
        ("photos.internal", "photos.internal", "10.0.0.1", True),
        ("Photos.Internal", "photos.internal", "10.0.0.1", True),
        ("photos.internal", "other.internal", "10.0.0.1", False),
        ("photos.internal", "x.photos.internal", "10.0.0.1", False),
        ("10.0.0.0/24", "anything", "10.0.0.9", True),
        ("10.0.0.0/24", "anything", "10.0.1.9", False),
        ("10.0.0.0/24", "anything", "::ffff:10.0.0.9", True),
        ("fd00::/8", "anything", "fd00::1", True),
        ("fd00::/8", "anything", "fe80::1", False),
        ("photos.internal", "example.org", "93.184.216.34", True),
    ],
)
def test_the_setting_names_hosts_addresses_and_networks(
    settings: Any, allowed: str, host: str, address: str, is_allowed: bool
) -> None:
    settings.OPSCONSOLE_EVIDENCE_ALLOW = [allowed]
    assert EvidenceReach.from_settings()(host, ipaddress.ip_address(address)) is is_allowed


@pytest.mark.parametrize("url", ["", "no url", "file:///etc/passwd", "http://a:b@example.org/", "http://\ud800/"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    of = job("fetch_evidence", evidence())
    of_record = evidence(url=url.encode("utf-8", "replace").decode())
    of.record_id = str(of_record.id)
    with pytest.raises(Refused):
        records.run(of)


def test_to_ask_twice_does_no_harm() -> None:
    assert KIND.effects is Effects.IDEMPOTENT
