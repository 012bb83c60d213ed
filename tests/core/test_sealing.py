"""What was sealed opens again with the right key and context, and with nothing else."""

from __future__ import annotations

import base64
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsconsole.core.sealing import BrokenSeal, Sealer, UnknownSealKey, derive_key

OLD, NEW = derive_key("old", "tests"), derive_key("new", "tests")


@pytest.fixture
def sealer() -> Sealer:
    return Sealer({"new": NEW, "old": OLD}, "new")


@given(data=st.binary(max_size=2000), context=st.binary(max_size=50))
def test_what_was_sealed_opens_again(data: bytes, context: bytes) -> None:
    sealer = Sealer({"new": NEW}, "new")
    assert sealer.open(sealer.seal(data, context), context) == data


def test_the_sealed_bytes_do_not_show_the_data(sealer: Sealer) -> None:
    assert b"card 4111" not in sealer.seal(b"card 4111 1111")


def test_sealing_twice_gives_different_bytes(sealer: Sealer) -> None:
    assert sealer.seal(b"same") != sealer.seal(b"same")


def test_no_nonce_comes_twice_however_many_threads_seal(sealer: Sealer) -> None:
    with ThreadPoolExecutor(8) as threads:
        blobs = list(threads.map(lambda _: sealer.seal(b"x"), range(4_000)))
    salted = 2 + len("new") + 8
    assert len({blob[: salted + 12] for blob in blobs}) == 4_000


def test_a_changed_byte_anywhere_breaks_the_seal(sealer: Sealer) -> None:
    blob = sealer.seal(b"data", b"context")
    for index in range(len(blob)):
        changed = bytearray(blob)
        changed[index] ^= 1
        with pytest.raises((BrokenSeal, UnknownSealKey)):
            sealer.open(bytes(changed), b"context")


def test_a_cut_off_blob_is_a_broken_seal(sealer: Sealer) -> None:
    blob = sealer.seal(b"data")
    for length in range(len(blob)):
        with pytest.raises(BrokenSeal):
            sealer.open(blob[:length])


def test_another_context_breaks_the_seal(sealer: Sealer) -> None:
    with pytest.raises(BrokenSeal):
        sealer.open(sealer.seal(b"data", b"message"), b"error")


def test_a_key_that_is_no_longer_primary_still_opens(sealer: Sealer) -> None:
    before = Sealer({"old": OLD}, "old").seal(b"data")
    assert sealer.open(before) == b"data"
    assert sealer.key_id(before) == "old"
    assert sealer.key_id(sealer.seal(b"data")) == "new"


def test_an_unknown_key_is_named() -> None:
    blob = Sealer({"gone": OLD}, "gone").seal(b"data")
    with pytest.raises(UnknownSealKey) as refusal:
        Sealer({"new": NEW}, "new").open(blob)
    assert refusal.value.key_id == "gone"


def test_another_key_under_the_same_id_breaks_the_seal() -> None:
    with pytest.raises(BrokenSeal):
        Sealer({"k": NEW}, "k").open(Sealer({"k": OLD}, "k").seal(b"data"))


def test_a_key_must_have_32_bytes() -> None:
    with pytest.raises(ValueError, match="'short' has 16 bytes; it must have exactly 32"):
        Sealer({"short": b"x" * 16}, "short")


def test_the_primary_key_must_be_among_the_keys() -> None:
    with pytest.raises(ValueError, match="primary"):
        Sealer({"new": NEW}, "old")


def test_a_fork_seals_under_a_key_of_its_own(sealer: Sealer) -> None:
    parent = sealer.seal(b"data")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns where another test left a thread; the child only seals and leaves.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.write(writing, sealer.seal(b"child"))
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    child = os.read(reading, 1000)
    os.close(reading)
    assert sealer.open(child) == b"child"
    salt = slice(2 + parent[1], 2 + parent[1] + 8)
    assert parent[salt] == sealer.seal(b"data")[salt]
    assert child[salt] != parent[salt]


@pytest.mark.parametrize("text", ["a:{0},b:{1}", " a:{0} , b:{1} ,"])
def test_settings_name_keys_of_which_the_first_seals(text: str) -> None:
    first, second = (base64.b64encode(key).decode() for key in (NEW, OLD))
    sealer = Sealer.from_settings(text.format(first, second), "secret")
    assert sealer.primary == "a"
    assert sealer.key_ids[:2] == ("a", "b")
    assert sealer.open(Sealer({"b": OLD}, "b").seal(b"data")) == b"data"


def test_settings_take_url_safe_base64_without_padding() -> None:
    key = b"\xff" * 32
    text = base64.urlsafe_b64encode(key).decode().rstrip("=")
    assert Sealer.from_settings(f"a:{text}", "").open(Sealer({"a": key}, "a").seal(b"data")) == b"data"


def test_settings_take_a_mapping() -> None:
    assert Sealer.from_settings({"a": NEW, "b": base64.b64encode(OLD).decode()}, "").key_ids[:2] == ("a", "b")


@pytest.mark.parametrize("keys", ["", None, {}])
def test_without_keys_one_is_derived_from_the_secret(keys: str | dict[str, bytes] | None) -> None:
    sealer = Sealer.from_settings(keys, "secret")
    assert sealer.primary.startswith("derived-")
    assert Sealer.from_settings("", "secret").open(sealer.seal(b"data")) == b"data"
    with pytest.raises(UnknownSealKey):
        Sealer.from_settings("", "another").open(sealer.seal(b"data"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nocolon", "id:base64key"),
        ("a:***", "'a' is not base64"),
        ("a:QUJD", "'a' has 3 bytes"),
        ("a:{0},a:{0}", "twice"),
    ],
)
def test_a_bad_key_in_the_settings_is_named_and_not_shown(text: str, complaint: str) -> None:
    good = base64.b64encode(NEW).decode()
    with pytest.raises(ValueError, match=complaint) as refusal:
        Sealer.from_settings(text.format(good), "secret")
    assert good not in str(refusal.value)


def test_deriving_depends_on_secret_and_purpose() -> None:
    assert len({derive_key("a", "x"), derive_key("a", "y"), derive_key("b", "x")}) == 3
    assert len(derive_key("a", "x")) == 32
