"""The HTTP client of jobs, against a real server: what was sent, what came, and where it does not go."""

from __future__ import annotations

import ipaddress
import pickle
import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsconsole.jobs import http
from opsconsole.jobs.errors import Refused, TryAgain, Unanswered
from opsconsole.jobs.http import (
    Answer,
    HttpError,
    NoAnswer,
    NotSent,
    UrlRefused,
    as_job_errors,
    expect_success,
    fetch,
    is_public,
    json_object,
    parse_url,
    request,
    retry_after,
)
from tests.jobs.certificates import certificate_for
from tests.jobs.server import (
    TestServer,
    answers,
    closed_port,
    drips,
    hangs,
    hangs_up,
    redirects,
    resets,
    serving,
    status,
    stops_short,
    streams,
    talks_nonsense,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def loopback(_host: str, address: Address) -> bool:
    return address.is_loopback


def public_only(_host: str, address: Address) -> bool:
    return is_public(address)


def get(url: str, *, timeout: float = 5, most_bytes: int = 1_000) -> Answer:
    return fetch(url, timeout=timeout, most_bytes=most_bytes, may_reach=loopback)


def test_an_answer_has_status_headers_and_body(server: TestServer) -> None:
    url = server.on("/a?b=c", status(200, b"hello", X_Colour="red"))
    answer = get(url)
    assert (answer.status, answer.body, answer.headers["x-colour"]) == (200, b"hello", "red")
    assert server.asked[0].headers["host"] == f"127.0.0.1:{server.port}"
    assert server.asked[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("behaviour", [hangs_up, resets])
def test_a_connection_that_ends_without_an_answer_leaves_the_outcome_open(server: TestServer, behaviour: Any) -> None:
    with pytest.raises(NoAnswer) as caught:
        get(server.on("/x", behaviour))
    assert caught.value.code == "connection_lost"


@pytest.mark.parametrize("behaviour", [hangs, drips])
def test_the_whole_exchange_has_one_deadline(server: TestServer, behaviour: Any) -> None:
    before = time.monotonic()
    with pytest.raises(NoAnswer) as caught:
        get(server.on("/x", behaviour), timeout=0.4)
    assert caught.value.code == "timed_out"
    assert time.monotonic() - before < 2


def test_a_body_that_drips_is_held_to_the_deadline_too(server: TestServer) -> None:
    def slow_body(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        drips(handler)

    with pytest.raises(NoAnswer) as caught:
        get(server.on("/x", slow_body), timeout=0.4)
    assert caught.value.code == "timed_out"


def test_a_body_that_stops_short_is_no_answer(server: TestServer) -> None:
    with pytest.raises(NoAnswer) as caught:
        get(server.on("/x", stops_short))
    assert caught.value.code == "answer_malformed"


def test_something_else_than_http_is_no_answer(server: TestServer) -> None:
    with pytest.raises(NoAnswer) as caught:
        get(server.on("/x", talks_nonsense))
    assert caught.value.code == "answer_malformed"


@pytest.mark.parametrize("make", [lambda size: status(200, b"x" * size), streams])
def test_no_more_is_read_than_was_asked_for(server: TestServer, make: Callable[[int], Any]) -> None:
    answer = get(server.on("/x", make(5_000_000)), most_bytes=100_000)
    assert len(answer.body) == 100_000
    assert answer.is_cut
    exact = get(server.on("/y", make(100_000)), most_bytes=100_000)
    assert len(exact.body) == 100_000
    assert not exact.is_cut


@pytest.mark.parametrize("size", [0, 100, 1_000_000])
def test_a_server_that_closes_after_its_answer_is_read_to_the_end(server: TestServer, size: int) -> None:
    """As servers do when they are asked to; without a length the end of the connection is the end of the body."""

    def announced(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size)
        handler.wfile.flush()
        time.sleep(0.05)
        handler.wfile.write(b"x" * size)

    def old(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        handler.wfile.flush()
        time.sleep(0.05)
        handler.wfile.write(b"x" * size)

    assert len(get(server.on("/x", announced), most_bytes=2_000_000).body) == size
    assert len(get(server.on("/y", old), most_bytes=2_000_000).body) == size


def test_without_a_wanted_body_an_answer_counts_from_its_status_on(server: TestServer) -> None:
    assert request("POST", server.on("/x", stops_short), body=b"{}", timeout=5).status == 200


def test_a_refused_connection_means_that_nothing_was_sent() -> None:
    with pytest.raises(NotSent) as caught:
        get(f"http://127.0.0.1:{closed_port()}/")
    assert caught.value.code == "connection_refused"


def test_a_name_without_an_address_means_that_nothing_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    with pytest.raises(NotSent) as caught:
        get("http://nowhere.example/")
    assert caught.value.code == "dns_failed"


# -- Where it does not go ----------------------------------------------------------------------------------------------

FORBIDDEN = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.16.0.1",
    "192.0.2.1", "192.168.1.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::", "2002:a00:1::1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "::127.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("text", FORBIDDEN)
def test_an_address_that_is_not_of_the_open_internet_is_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_an_address_of_the_open_internet_is_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@given(st.ip_addresses(v=4))
def test_an_address_is_judged_the_same_however_it_is_written(address: Any) -> None:
    assert is_public(ipaddress.IPv6Address(f"::ffff:{address}")) == is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost"]
)
def test_a_private_address_is_not_asked_however_it_is_spelt(server: TestServer, host: str) -> None:
    with pytest.raises((UrlRefused, NotSent)) as caught:
        fetch(f"http://{host}:{server.port}/", timeout=2, most_bytes=10, may_reach=public_only)
    assert caught.value.code in ("address_forbidden", "dns_failed")
    assert server.asked == []


def test_a_redirect_to_a_private_address_is_not_followed(server: TestServer) -> None:
    inner = server.on("/secret", status(200, b"secret"))
    url = server.on("/x", redirects(inner))

    def only_the_first(host: str, _: Address) -> bool:
        return host == "localhost"

    with pytest.raises(UrlRefused) as caught:
        fetch(url.replace("127.0.0.1", "localhost"), timeout=5, most_bytes=10, may_reach=only_the_first)
    assert caught.value.code == "address_forbidden"
    assert [asked.path for asked in server.asked] == ["/x"]


@pytest.mark.parametrize(
    "to", ["file:///etc/passwd", "ftp://example.org/", "gopher://127.0.0.1/", "javascript:alert(1)"]
)
def test_a_redirect_to_another_scheme_is_not_followed(server: TestServer, to: str) -> None:
    with pytest.raises(UrlRefused) as caught:
        get(server.on("/x", redirects(to)))
    assert caught.value.code == "scheme_refused"


def test_five_redirects_are_followed_and_a_sixth_is_not(server: TestServer) -> None:
    for number in range(6):
        server.on(f"/{number}", redirects(f"/{number + 1}", (301, 302, 303, 307, 308, 302)[number]))
    server.on("/6", status(200, b"there"))
    assert get(server.url("/1")).body == b"there"
    with pytest.raises(UrlRefused) as caught:
        get(server.url("/0"))
    assert caught.value.code == "too_many_redirects"


def test_redirects_share_the_deadline(server: TestServer) -> None:
    def late(handler: Any) -> None:
        time.sleep(0.25)
        redirects("/x")(handler)

    before = time.monotonic()
    with pytest.raises(NoAnswer):
        get(server.on("/x", late), timeout=0.6)
    assert time.monotonic() - before < 2


def test_a_name_is_looked_up_once_and_the_address_that_was_checked_is_asked(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to something else a moment later (DNS rebinding) changes nothing."""
    looked_up: list[Any] = []
    real = socket.getaddrinfo

    def rebinding(host: Any, port: Any, *rest: Any, **named: Any) -> Any:
        looked_up.append(host)
        return real("127.0.0.1" if len(looked_up) == 1 else "127.0.0.2", port, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    checked: list[str] = []

    def note(host: str, address: Address) -> bool:
        checked.append(f"{host} {address}")
        return True

    server.on("/x", status(200, b"here"))
    answer = fetch(server.url("/x", "rebinding.example"), timeout=5, most_bytes=10, may_reach=note)
    assert answer.body == b"here"
    assert looked_up == ["rebinding.example"]
    assert checked == ["rebinding.example 127.0.0.1"]
    assert server.asked[0].headers["host"] == f"rebinding.example:{server.port}"


def test_a_name_with_one_private_address_among_public_ones_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, 80)) for text in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(UrlRefused) as caught:
        fetch("http://mixed.example/", timeout=1, most_bytes=1, may_reach=public_only)
    assert caught.value.code == "address_forbidden"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("", "scheme_refused"),
        ("example.org", "scheme_refused"),
        ("ftp://example.org/", "scheme_refused"),
        ("http://", "url_invalid"),
        ("http:///path", "url_invalid"),
        ("http://example.org:99999/", "url_invalid"),
        ("http://example.org:0/", "url_invalid"),
        ("http://[::1/", "url_invalid"),
        ("http://ada:secret@example.org/", "credentials_in_url"),
        ("http://ada@example.org/", "credentials_in_url"),
        ("http://@example.org/", "credentials_in_url"),
        ("http://example.org/a\r\nX-Evil: 1", "url_invalid"),
        ("http://example.org\\@evil.example/", "url_invalid"),
        ("http://exa mple.org/", "url_invalid"),
        ("http://example.org/\x00", "url_invalid"),
        ("http://example.org/" + "a" * 2_000, "url_invalid"),
        ("http://" + "ü" * 80 + ".example/", "url_invalid"),
    ],
)
def test_what_is_no_url_to_ask_is_refused(url: str, code: str) -> None:
    with pytest.raises(UrlRefused) as caught:
        parse_url(url)
    assert caught.value.code == code


@given(st.text())
def test_any_text_is_a_url_or_refused(text: str) -> None:
    for url in (text, f"http://{text}", f"http://example.org/{text}"):
        try:
            place = parse_url(url)
        except UrlRefused:
            continue
        assert place.target.isascii()
        assert place.target.isprintable()
        assert place.host.isascii()


def test_letters_outside_ascii_are_escaped(server: TestServer) -> None:
    server.on("/b%C3%A4r?q=%C3%BC", status(200, b"found"))
    assert get(server.url("/bär?q=ü")).body == b"found"


# -- a pause that is asked for -----------------------------------------------------------------------------------------

DATE = "Tue, 01 Dec 2026 10:00:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "120"}, 120),
        ({"retry-after": " 0 "}, 0),
        ({"retry-after": "Tue, 01 Dec 2026 10:02:00 GMT", "date": DATE}, 120),
        ({"retry-after": "Tuesday, 01-Dec-26 10:02:00 GMT", "date": DATE}, 120),
        ({"retry-after": "Tue, 01 Dec 2026 09:00:00 GMT", "date": DATE}, 0),
        ({"retry-after": "Tue, 01 Dec 2026 10:02:00 -0000", "date": DATE}, 120),
        ({}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "1.5"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "9" * 400}, None),
        ({"retry-after": "\u0661"}, None),
    ],
)
def test_a_pause_is_read_as_seconds_or_from_the_clock_of_whoever_asks(
    headers: dict[str, str], seconds: int | None
) -> None:
    """RFC 9110, 10.2.3."""
    found = retry_after(Answer(status=429, headers=headers))
    assert found == (None if seconds is None else timedelta(seconds=seconds))


def test_a_moment_without_a_clock_beside_it_is_measured_by_our_own() -> None:
    moment = datetime.now(UTC) + timedelta(minutes=10)
    asked = retry_after(Answer(status=503, headers={"retry-after": format_datetime(moment, usegmt=True)}))
    assert asked is not None
    assert timedelta(minutes=9, seconds=50) < asked <= timedelta(minutes=10)


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_is_a_pause_or_none(asked: str, date: str) -> None:
    found = retry_after(Answer(status=429, headers={"retry-after": asked, "date": date}))
    assert found is None or found >= timedelta()


def test_the_pause_goes_with_the_error_also_from_process_to_process() -> None:
    with pytest.raises(TryAgain) as caught:
        expect_success(Answer(status=429, headers={"retry-after": "90"}))
    assert (caught.value.code, caught.value.after) == ("http_429", timedelta(seconds=90))
    assert str(caught.value) == "http_429: the server answered 429 and asks for a pause of 90 s"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.code, again.text, again.after) == (caught.value.code, caught.value.text, caught.value.after)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tls_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server with a certificate for ``evidence.example``, whose authority is trusted."""
    certificate, key = certificate_for("evidence.example", tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    names: list[Any] = []
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    monkeypatch.setattr(http, "tls_context", lambda: ssl.create_default_context(cafile=str(certificate)))
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _host, *rest, **named: real("127.0.0.1", *rest, **named))
    with serving(context) as running:
        yield running, names


def test_the_certificate_is_that_of_the_name_and_not_of_the_address(tls_server: Any) -> None:
    server, names = tls_server
    server.on("/x", status(200, b"private"))
    assert get(server.url("/x", "evidence.example")).body == b"private"
    assert names == ["evidence.example"]


def test_a_certificate_of_another_name_is_not_trusted(tls_server: Any) -> None:
    server, _ = tls_server
    with pytest.raises(NotSent) as caught:
        get(server.url("/x", "other.example"))
    assert caught.value.code == "tls_untrusted"
    assert server.asked == []


def test_a_server_without_tls_is_not_asked_with_it(server: TestServer) -> None:
    with pytest.raises(NotSent) as caught:
        get(server.url("/x").replace("http:", "https:"))
    assert caught.value.code == "tls_failed"


# -- What it means for a job -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "meaning"),
    [(UrlRefused("url_invalid"), Refused), (NotSent("dns_failed"), TryAgain), (NoAnswer("timed_out"), Unanswered)],
)
def test_an_error_says_whether_anything_may_have_happened(error: HttpError, meaning: type[Exception]) -> None:
    with pytest.raises(meaning) as caught, as_job_errors():
        raise error
    assert getattr(caught.value, "code", "") == error.code


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (301, Refused),
        (400, Refused),
        (401, Refused),
        (404, Refused),
        (422, Refused),
        (429, TryAgain),
        (500, TryAgain),
        (503, TryAgain),
        (504, Unanswered),
    ],
)
def test_a_status_says_whether_to_try_again(code: int, meaning: type[Exception]) -> None:
    with pytest.raises(meaning) as caught:
        expect_success(Answer(status=code))
    assert getattr(caught.value, "code", "") == f"http_{code}"


def test_every_2xx_is_a_success() -> None:
    for code in (200, 201, 202, 204, 299):
        expect_success(Answer(status=code))


@pytest.mark.parametrize(
    "body",
    [b"", b"no", b"[]", b"null", b'{"a": NaN}', b'{"a": 1' + b"0" * 10_000 + b"}", b"\xff", b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the sentences differ)
        json_object(Answer(status=200, body=body))


def test_a_json_object_is_returned(server: TestServer) -> None:
    assert json_object(get(server.on("/x", answers({"a": [1]})))) == {"a": [1]}
