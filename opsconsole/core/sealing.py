"""Seals bytes that only this installation may read again: AES-256-GCM under named keys.

A sealed blob describes itself: version, key id, salt, nonce, ciphertext. The salt turns the named key into one that
belongs to this process alone, and under it the nonces count up from a random start (NIST SP 800-38D, 8.2.1): however
many workers seal under the same named key for years, no nonce comes twice, and none costs a question to the kernel.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from itertools import count
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES: Final = 32
DERIVED_KEY: Final = "derived"
"""Id of the key that is made from ``SECRET_KEY`` when no other is configured."""

_VERSION: Final = 1
_SALT_BYTES: Final = 8
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_KEPT_CIPHERS: Final = 512


class SealError(Exception):
    """Something sealed cannot be made readable."""


class UnknownSealKey(SealError):
    """The blob names a key that is not configured here: add it to ``OPSCONSOLE_KEYS`` behind the first one."""

    def __init__(self, key_id: str) -> None:
        self.key_id = key_id
        super().__init__(f"sealed with the key {key_id!r}, which is not configured here")


class BrokenSeal(SealError):
    """The blob was changed, cut off, or belongs to another context."""


def derive_key(secret: str, salt: str) -> bytes:
    """Make a 32-byte key from a secret text; the salt says what the key is for (HKDF, RFC 5869)."""
    return _stretch(secret.encode("utf-8", "surrogatepass"), salt.encode())


def _stretch(secret: bytes, salt: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=b"opsconsole").derive(secret)


class _Sealing(NamedTuple):
    """What one process seals with. Replaced as a whole, for another thread may be sealing just then."""

    pid: int
    head: bytes
    cipher: AESGCM
    nonces: count[int]


class Sealer:
    """Seals with the primary key and opens with any of the keys it was given; threads and forks may share it."""

    def __init__(self, keys: Mapping[str, bytes], primary: str) -> None:
        if primary not in keys:
            raise ValueError(f"the primary sealing key {primary!r} is not among the keys given")
        for name, key in keys.items():
            if not 1 <= len(name.encode()) <= 64:
                raise ValueError(f"a sealing key's id has 1 to 64 bytes: {name!r}")
            if len(key) != KEY_BYTES:
                raise ValueError(f"the sealing key {name!r} has {len(key)} bytes; it must have exactly {KEY_BYTES}")
        self._keys = dict(keys)
        self.primary = primary
        self._ciphers: dict[tuple[str, bytes], AESGCM] = {}
        self._sealing = self._renew()

    @classmethod
    def from_settings(cls, keys: str | Mapping[str, bytes | str] | None, secret: str) -> Sealer:
        """Read ``OPSCONSOLE_KEYS``: ``"id1:base64key,id2:base64key"`` or a mapping; the first seals, all open.

        One more key is made from ``secret``: it seals while there is no other, and opens ever after. Its id has a hash
        in it, so that another secret is an unknown key and not a broken seal. Raises ``ValueError`` with the id of a
        bad key.
        """
        derived = derive_key(secret, "sealing")
        derived_id = f"{DERIVED_KEY}-{hashlib.sha256(derived).hexdigest()[:8]}"
        pairs: list[tuple[str, bytes | str]]
        if isinstance(keys, str):
            pairs = []
            for part in filter(None, (part.strip() for part in keys.split(","))):
                name, colon, text = part.partition(":")
                if not colon:
                    raise ValueError("OPSCONSOLE_KEYS is a list of id:base64key separated by commas")
                pairs.append((name.strip(), text.strip()))
        else:
            pairs = list((keys or {}).items())
        if not pairs:
            return cls({derived_id: derived}, derived_id)
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise ValueError("OPSCONSOLE_KEYS names one id twice")
        found = {name: _key_bytes(name, key) for name, key in pairs}
        # What was sealed before a project had keys of its own has to open still; nothing new is sealed with it.
        found.setdefault(derived_id, derived)
        return cls(found, names[0])

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of the keys this sealer can open."""
        return tuple(self._keys)

    def seal(self, data: bytes, context: bytes = b"") -> bytes:
        """Return ``data`` sealed; it opens only with the same ``context``."""
        pid, head, cipher, nonces = self._sealing
        if pid != os.getpid():
            # A fork would use its parent's nonces over again.
            self._sealing = self._renew()
            _, head, cipher, nonces = self._sealing
        nonce = next(nonces).to_bytes(_NONCE_BYTES)
        return head + nonce + cipher.encrypt(nonce, data, context)

    def open(self, blob: bytes, context: bytes = b"") -> bytes:
        """Return what was sealed, or raise ``UnknownSealKey`` or ``BrokenSeal``."""
        name, at = _parse_head(blob)
        if name not in self._keys:
            raise UnknownSealKey(name)
        salt, nonce = blob[at : at + _SALT_BYTES], blob[at + _SALT_BYTES : at + _SALT_BYTES + _NONCE_BYTES]
        try:
            return self._cipher_for(name, bytes(salt)).decrypt(nonce, blob[at + _SALT_BYTES + _NONCE_BYTES :], context)
        except InvalidTag:
            raise BrokenSeal("the sealed data was changed or belongs to another context") from None

    def key_id(self, blob: bytes) -> str:
        """Return the id of the key a blob was sealed with, whether or not that key is configured here."""
        return _parse_head(blob)[0]

    def _renew(self) -> _Sealing:
        salt = os.urandom(_SALT_BYTES)
        name = self.primary.encode()
        return _Sealing(
            pid=os.getpid(),
            head=bytes((_VERSION, len(name))) + name + salt,
            cipher=self._cipher_for(self.primary, salt),
            # One bit short of all, so that it cannot run over.
            nonces=count(int.from_bytes(os.urandom(_NONCE_BYTES)) >> 1),
        )

    def _cipher_for(self, name: str, salt: bytes) -> AESGCM:
        cipher = self._ciphers.get((name, salt))
        if cipher is None:
            if len(self._ciphers) >= _KEPT_CIPHERS:
                self._ciphers.clear()
            cipher = self._ciphers[name, salt] = AESGCM(_stretch(self._keys[name], salt))
        return cipher


def _key_bytes(name: str, key: bytes | str) -> bytes:
    if isinstance(key, bytes):
        return key
    try:
        # Both alphabets are in use for keys in environment variables, and padding is often lost on the way.
        return base64.b64decode(key.replace("-", "+").replace("_", "/") + "=" * (-len(key) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"the sealing key {name!r} is not base64") from None


def _parse_head(blob: bytes) -> tuple[str, int]:
    if len(blob) < 2 or blob[0] != _VERSION:
        raise BrokenSeal("this is not something we sealed")
    end = 2 + blob[1]
    if len(blob) < end + _SALT_BYTES + _NONCE_BYTES + _TAG_BYTES:
        raise BrokenSeal("the sealed data is cut off")
    try:
        return bytes(blob[2:end]).decode(), end
    except UnicodeDecodeError:
        raise BrokenSeal("this is not something we sealed") from None
