"""One HTTP request, bounded in time and size, to an address that was looked at before anything was sent to it.

Written on ``http.client`` because two things are needed that the well-kept clients do not give: the connection goes to
exactly the address that was checked, so that a name which resolves differently a moment later changes nothing, and the
whole exchange has one deadline, so that a server which sends a byte now and then cannot hold a worker. Proxies of the
environment are not used, nothing is decompressed, and only ``fetch`` follows redirects.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, NoReturn
from urllib.parse import quote, urljoin, urlsplit

from opsconsole.core.clock import wall_now
from opsconsole.jobs.errors import JobError, Refused, TryAgain, Unanswered

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
MayReach = Callable[[str, Address], bool]  # host name as asked for, address that it has

MOST_REDIRECTS = 5
LONGEST_URL = 2_000
_HEADERS = {"User-Agent": "opsconsole", "Connection": "close"}
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 64 << 10
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class HttpError(Exception):
    """The base of what can go wrong with a request, with a stable ``code``."""

    def __init__(self, code: str, text: str = "") -> None:
        self.code = code
        super().__init__(text or code)


class UrlRefused(HttpError):
    """The URL is none, or leads where we do not go; nothing was sent, and trying again does not help."""


class NotSent(HttpError):
    """No connection came about; nothing was sent."""


class NoAnswer(HttpError):
    """The request was sent, at least in part, and no whole answer came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server has answered; ``body`` is read for a 2xx only."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    is_cut: bool = False  # there is more of the body than was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A URL in parts that can be asked for."""

    scheme: str
    host: str  # in ASCII and lower case, an IPv6 address without brackets
    port: int
    target: str  # path and query


def parse_url(url: str) -> Place:
    """Return the parts of an http or https URL; raises ``UrlRefused`` for any other and for one with credentials."""
    # Checked here, because urlsplit silently takes line breaks out of what it is given.
    if len(url) > LONGEST_URL or not url.isprintable() or " " in url or "\\" in url:
        raise UrlRefused("url_invalid", "the URL is too long, or holds characters that no URL has")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if not host.isascii():
            host = host.encode("idna").decode()
    except (ValueError, UnicodeError):
        raise UrlRefused("url_invalid", "the URL cannot be read") from None
    if parts.scheme not in _PORTS:
        raise UrlRefused("scheme_refused", "only http and https are asked")
    if parts.username is not None or parts.password is not None:
        raise UrlRefused("credentials_in_url", "a URL with credentials is not asked")
    if not host or port == 0:
        raise UrlRefused("url_invalid", "the URL names no host or no port")
    path = quote(parts.path or "/", safe="/%:=&~+!$,;'@()*[]")
    query = f"?{quote(parts.query, safe='/%:=&?~+!$,;@()*[]')}" if parts.query else ""
    return Place(scheme=parts.scheme, host=host, port=port or _PORTS[parts.scheme], target=path + query)


def anywhere(_host: str, _address: Address) -> bool:
    """Allow every address: for endpoints that the installation itself has chosen."""
    return True


def is_public(address: Address) -> bool:
    """Say whether an address is one of the open internet, also when it is written inside another one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = embedded(address)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or address.is_link_local
        or address.is_loopback
        or address.is_private
    )


def embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which an IPv6 address leads in the end (mapped, 6to4, Teredo, NAT64)."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def request(
    method: str,
    url: str,
    *,
    timeout: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    most_bytes: int = 0,
    may_reach: MayReach = anywhere,
) -> Answer:
    """Send one request and return its answer, whatever its status; ``timeout`` is for all of it, in seconds.

    At most ``most_bytes`` of the body of a 2xx are read, none by default: then an answer counts from its status on,
    however its body fares. The resolver's own limits hold for looking up the name. Raises ``UrlRefused``, ``NotSent``
    or ``NoAnswer``.
    """
    place = parse_url(url)
    deadline = time.monotonic() + timeout
    with closing(_connect(place, deadline, may_reach)) as opened:
        connection = http.client.HTTPConnection(place.host, place.port)
        connection.default_port = _PORTS[place.scheme]  # which is left out of the Host header
        bounded: Any = _BoundedSocket(opened, deadline)
        connection.sock = bounded
        try:
            connection.request(method, place.target, body=body, headers={**_HEADERS, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            content, is_cut = b"", False
            if 200 <= response.status < 300 and most_bytes:
                content, is_cut = _read(response, most_bytes)
        except TimeoutError:
            raise NoAnswer("timed_out", f"no answer within {timeout:g} s") from None
        except http.client.RemoteDisconnected:
            raise NoAnswer("connection_lost", "the connection was closed before an answer") from None
        except http.client.HTTPException as error:
            raise NoAnswer("answer_malformed", f"the answer is no HTTP: {type(error).__name__}") from None
        except OSError as error:
            raise NoAnswer("connection_lost", f"the connection was lost: {type(error).__name__}") from None
    return Answer(status=response.status, headers=found, body=content, is_cut=is_cut)


def fetch(url: str, *, timeout: float, most_bytes: int, may_reach: MayReach) -> Answer:
    """GET a URL, through at most five redirects, each of which is checked like the URL itself.

    Raises as ``request`` does, and ``UrlRefused`` for one redirect too many.
    """
    deadline = time.monotonic() + timeout
    for _ in range(MOST_REDIRECTS + 1):
        left = max(deadline - time.monotonic(), 0.001)
        answer = request("GET", url, timeout=left, most_bytes=most_bytes, may_reach=may_reach)
        if answer.status not in _REDIRECTS or "location" not in answer.headers:
            return answer
        try:
            url = urljoin(url, answer.headers["location"])
        except ValueError:
            raise UrlRefused("url_invalid", "a redirect leads to no URL") from None
    raise UrlRefused("too_many_redirects", f"there are more than {MOST_REDIRECTS} redirects")


def json_object(answer: Answer) -> dict[str, Any]:
    """Return the JSON object that is the answer's body; raises ``ValueError`` if it is anything else."""
    if answer.is_cut:
        raise ValueError("the answer is too long")
    try:
        found = json.loads(answer.body, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


@contextmanager
def as_job_errors(*, no_answer: type[JobError] = Unanswered) -> Iterator[None]:
    """Say what a failed request means for a job; ``no_answer`` is ``TryAgain`` where asking twice does no harm."""
    try:
        yield
    except UrlRefused as error:
        raise Refused(error.code, str(error)) from error
    except NotSent as error:
        raise TryAgain(error.code, str(error)) from error
    except NoAnswer as error:
        raise no_answer(error.code, str(error)) from error


def expect_success(answer: Answer, *, no_answer: type[JobError] = Unanswered) -> None:
    """Return for a 2xx; else raise what the status means for a job, with the code ``http_<status>``.

    A pause that the server asks for goes with ``TryAgain``.
    """
    status = answer.status
    if 200 <= status < 300:
        return
    text = f"the server answered {status}"
    if status == 504:
        # Said by a gateway, about a server behind it that may have done what it was asked.
        raise no_answer("http_504", text)
    if status == 429 or status >= 500:
        after = retry_after(answer)
        if after is not None:
            text = f"{text} and asks for a pause of {after.total_seconds():.0f} s"
        raise TryAgain(f"http_{status}", text, after)
    raise Refused(f"http_{status}", text)


def retry_after(answer: Answer) -> timedelta | None:
    """Return for how long a server wants to be left alone; ``None`` if it does not say, or not so that it can be read.

    RFC 9110, 10.2.3: seconds, or a moment. A moment is the server's, so it is measured from the server's own ``Date``.
    """
    asked = answer.headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(asked):
        return timedelta(seconds=int(asked))
    moment = _http_date(asked)
    if moment is None:
        return None
    said_at = _http_date(answer.headers.get("date", "")) or datetime.fromtimestamp(wall_now(), UTC)
    return max(moment - said_at, timedelta())


_SECONDS = re.compile(r"[0-9]{1,9}", re.ASCII)


def _http_date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # "-0000" says that the zone is not known: it is read as what HTTP has everywhere.
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


@lru_cache(maxsize=1)
def tls_context() -> ssl.SSLContext:
    """Return what checks certificates, by the system's list of authorities (or ``SSL_CERT_FILE``)."""
    return ssl.create_default_context()


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _connect(place: Place, deadline: float, may_reach: MayReach) -> socket.socket:
    """Return a connection to an address that was checked; the certificate is that of the name."""
    plain = _open_socket(_addresses(place, may_reach), deadline)
    if place.scheme == "https":
        try:
            plain.settimeout(_left(deadline))
            plain = tls_context().wrap_socket(plain, server_hostname=place.host)
        except (OSError, ValueError) as error:
            plain.close()
            code = "tls_untrusted" if isinstance(error, ssl.SSLCertVerificationError) else "tls_failed"
            raise NotSent(code, f"no TLS with {place.host}: {type(error).__name__}") from None
    return plain


def _addresses(place: Place, may_reach: MayReach) -> list[tuple[socket.AddressFamily, Any]]:
    """Return where the host is; raises ``UrlRefused`` if any of its addresses is one we do not go to."""
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise UrlRefused("url_invalid", "the host has no name that can be looked up") from None
    except OSError as error:
        raise NotSent("dns_failed", f"{place.host} has no address: {error}") from None
    for *_, address in found:
        # A scope, as in fe80::1%eth0, is no part of what is judged.
        if not may_reach(place.host, ipaddress.ip_address(str(address[0]).partition("%")[0])):
            raise UrlRefused("address_forbidden", f"{place.host} has an address that is not asked")
    return [(family, address) for family, _, _, _, address in found]


def _open_socket(addresses: list[tuple[socket.AddressFamily, Any]], deadline: float) -> socket.socket:
    error = NotSent("connect_failed", "there is no address to connect to")
    for number, (family, address) in enumerate(addresses):
        where = f"{address[0]} port {address[1]}"
        opened: socket.socket | None = None
        try:
            opened = socket.socket(family, socket.SOCK_STREAM)
            # A share of the time for each: one address that swallows everything must not cost the others theirs.
            opened.settimeout(_left(deadline) / (len(addresses) - number))
            opened.connect(address)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as failed:
            if opened is not None:
                opened.close()
            error = _not_connected(failed, where)
        else:
            return opened
    raise error


def _not_connected(error: OSError, where: str) -> NotSent:
    if isinstance(error, TimeoutError):
        return NotSent("connect_timed_out", f"{where} does not accept the connection")
    if isinstance(error, ConnectionRefusedError):
        return NotSent("connection_refused", f"{where} refused the connection")
    return NotSent("connect_failed", f"{where}: {error.strerror or error}")


def _read(response: http.client.HTTPResponse, most: int) -> tuple[bytes, bool]:
    pieces = bytearray()
    while len(pieces) <= most:
        piece = response.read(min(_PIECE, most + 1 - len(pieces)))
        if not piece:
            break
        pieces += piece
    is_cut = len(pieces) > most
    # http.client says nothing of a body that ends before the length it was announced with.
    if not is_cut and response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(pieces[:most]), is_cut


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _BoundedSocket:
    """A socket as ``http.client`` uses one, on which everything together has to be done by a deadline."""

    def __init__(self, plain: socket.socket, deadline: float) -> None:
        self._plain = plain
        self._deadline = deadline

    def sendall(self, data: Any) -> None:
        self._plain.settimeout(_left(self._deadline))
        self._plain.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_BoundedReader(self._plain, self._deadline))

    def close(self) -> None:
        """Leave it open: ``http.client`` lets go of it before it has read the body of an answer."""


class _BoundedReader(io.RawIOBase):
    def __init__(self, plain: socket.socket, deadline: float) -> None:
        self._plain = plain
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._plain.settimeout(_left(self._deadline))
        return self._plain.recv_into(buffer)
