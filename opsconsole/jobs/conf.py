"""The settings of jobs as typed values; read when they are used, so that a wrong one is said by name."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from opsconsole.jobs.http import Address, embedded, is_public

_PREFIX = "whsec_"
_SHORTEST_SECRET, _LONGEST_SECRET = 24, 64  # bytes, as the Standard Webhooks specification has it


def source() -> str:
    """Return whose jobs this project writes and sends: several may share one database."""
    return str(getattr(settings, "OPSCONSOLE_SOURCE", "default"))


def queue() -> str:
    """Return the queue of jobs whose kind names none."""
    return str(getattr(settings, "OPSCONSOLE_QUEUE", "opsconsole"))


def dispatched_for() -> timedelta:
    """Return how long a message may wait in its queue before its job is taken for undelivered and sent again."""
    return timedelta(seconds=int(getattr(settings, "OPSCONSOLE_DISPATCHED_FOR_SECONDS", 900)))


def webhook_secrets(tenant: str) -> list[bytes]:
    """Return what a tenant's webhooks are signed with: its own secrets, else everybody's, else one of SECRET_KEY's.

    Several, separated by commas, sign side by side while a receiver changes from one to the next. Raises
    ``ImproperlyConfigured``.
    """
    own = getattr(settings, "OPSCONSOLE_WEBHOOK_SECRETS", {}).get(tenant, "")
    name = "OPSCONSOLE_WEBHOOK_SECRETS" if own else "OPSCONSOLE_WEBHOOK_SECRET"
    text = str(own or getattr(settings, name, ""))
    if not text:
        return [hmac.new(settings.SECRET_KEY.encode(), b"opsconsole webhooks", hashlib.sha256).digest()]
    try:
        return read_secrets(text)
    except ValueError as error:
        raise ImproperlyConfigured(f"{name}: {error}") from None


def read_secrets(text: str) -> list[bytes]:
    """Return the secrets in a setting; raises ``ValueError`` with a sentence that repeats none of them."""
    try:
        found = [base64.b64decode(word.strip().removeprefix(_PREFIX), validate=True) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(_SHORTEST_SECRET <= len(secret) <= _LONGEST_SECRET for secret in found):
        raise ValueError(
            f"a secret is {_PREFIX} and the base64 of {_SHORTEST_SECRET} to {_LONGEST_SECRET} random bytes"
        )
    return found


def has_probe(endpoint: str) -> bool:
    """Say whether an endpoint is one of those that answer whether they know an idempotency key (C13)."""
    prefixes = getattr(settings, "OPSCONSOLE_WEBHOOK_PROBES", ())
    base = f"{endpoint.partition('?')[0].rstrip('/')}/"
    return any(base.startswith(f"{prefix.rstrip('/')}/") for prefix in prefixes)


def evidence_bytes() -> int:
    """Return how many bytes one piece of evidence may have."""
    return int(getattr(settings, "OPSCONSOLE_EVIDENCE_BYTES", 10 << 20))


@dataclass(frozen=True, slots=True)
class EvidenceReach:
    """Where evidence is fetched from: the open internet, and what OPSCONSOLE_EVIDENCE_ALLOW names."""

    hosts: frozenset[str]
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]

    @classmethod
    def from_settings(cls) -> EvidenceReach:
        """Return the reach that the setting describes: each word is a network or address, or else a host name."""
        hosts, networks = set(), []
        for word in getattr(settings, "OPSCONSOLE_EVIDENCE_ALLOW", ()):
            try:
                networks.append(ipaddress.ip_network(word, strict=False))
            except ValueError:
                hosts.add(word.lower())
        return cls(frozenset(hosts), tuple(networks))

    def __call__(self, host: str, address: Address) -> bool:
        """Say whether ``host`` may be asked at ``address``."""
        if is_public(address) or host in self.hosts:
            return True
        inner = embedded(address) if isinstance(address, ipaddress.IPv6Address) else None
        return any(address in network or (inner is not None and inner in network) for network in self.networks)
