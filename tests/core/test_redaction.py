"""What is shown of arguments and errors: everything an operator needs, and no secret."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsconsole.core.redaction import DEFAULT_PATTERNS, REDACTED, Redactor

REDACTOR = Redactor()
SECRET = "hunter2horse"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
SPELLINGS = st.sampled_from([str.upper, str.lower, str.title, lambda name: name.replace("_", "-"),
                             lambda name: name.replace("_", ""), lambda name: f"user_{name}",
                             lambda name: f"{name}_2"])  # fmt: skip


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_read_like_the_call() -> None:
    shown = REDACTOR.preview([42, "a\nb", None, True], {"to": ["x"], "odd key": {"n": 1.5}})
    assert shown == r'42, "a\nb", null, true, to=["x"], "odd key"={"n": 1.5}'


@given(st.sampled_from(DEFAULT_PATTERNS), SPELLINGS, st.integers(0, 5))
def test_a_secret_is_known_by_its_name_however_it_is_spelt_and_nested(name: str, spell: Any, depth: int) -> None:
    value: Any = {spell(name): SECRET, "kept": "visible"}
    for _ in range(depth):
        value = [{"inner": value}]
    shown = REDACTOR.preview([value], {"also": value})
    assert SECRET not in shown
    assert shown.count("visible") == 2


@pytest.mark.parametrize(
    "value",
    [
        {"headers": [["Authorization", SECRET]]},
        {"field": {"name": "password", "value": SECRET}},
        {"secret": {"deep": [SECRET]}},
        {"apiKey": SECRET},
        {"dbPwd": SECRET},
        {"note": f'{{"password": "{SECRET}"}}'},
        {"url": f"postgres://app:{SECRET}@db/shop"},
        {"note": f"Bearer {SECRET}1"},
    ],
)
def test_a_secret_in_disguise_is_not_shown(value: dict[str, Any]) -> None:
    shown = REDACTOR.preview([value], value)
    assert SECRET not in shown
    assert REDACTED in shown


def test_a_secret_passed_by_position_is_known_by_the_parameters_name() -> None:
    assert REDACTOR.preview(["bob", SECRET], {}, names=["user", "password"]) == f'"bob", "{REDACTED}"'


@pytest.mark.parametrize("name", ["class_name", "author", "passenger", "otpauth_name", "monkey", "assertion"])
def test_a_name_that_only_resembles_a_secrets_is_shown(name: str) -> None:
    assert "visible" in REDACTOR.preview([], {name: "visible"})


def test_whether_there_is_a_secret_is_shown() -> None:
    shown = REDACTOR.preview([], {"password": None, "token_valid": False, "max_tokens": 4096})
    assert shown == "password=null, token_valid=false, max_tokens=4096"


@given(st.integers(-(2**80), -(10**17)) | st.integers(10**17, 2**80) | st.integers(-(10**12), 10**12))
def test_integers_are_shown_exactly(number: int) -> None:
    """API-05: no number passes through a float."""
    assert REDACTOR.preview([number], {"n": number}) == f"{number}, n={number}"


@given(st.lists(st.integers(-(10**10), 10**10) | st.booleans(), max_size=10), st.integers(1, 120))
def test_a_few_numbers_are_shown_as_any_arguments_are(args: list[int], limit: int) -> None:
    # With names they go the long way.
    assert REDACTOR.preview(args, {}, limit=limit) == REDACTOR.preview(args, {}, names=["order"], limit=limit)


def test_the_ids_that_a_float_would_round_are_shown_exactly() -> None:
    """API-05."""
    shown = REDACTOR.preview([], {"doc_id": 9221939555730002819, "order": 9007199254740993})
    assert shown == "doc_id=9221939555730002819, order=9007199254740993"


def test_an_integer_too_long_for_decimals_is_shown_in_hexadecimal() -> None:
    assert REDACTOR.preview([1 << 20_000], {}) == hex(1 << 20_000)


def test_what_json_has_no_form_for_is_shown() -> None:
    """CAP-01: NaN and the infinities."""
    values = [float("nan"), float("inf"), float("-inf"), Decimal("1.10"), UUID(int=1), datetime(2026, 3, 1, tzinfo=UTC)]
    assert REDACTOR.preview(values, {}) == (
        'NaN, Infinity, -Infinity, "1.10", "00000000-0000-0000-0000-000000000001", "2026-03-01 00:00:00+00:00"'
    )


def test_bytes_are_shown_as_their_length_and_hash() -> None:
    assert REDACTOR.preview([b"abc"], {}) == "<3 bytes, sha256 ba7816bf8f01>"


def test_an_unknown_object_is_named_and_its_own_code_not_run() -> None:
    class Trap:
        def __repr__(self) -> str:
            raise AssertionError("must not be called")

        __str__ = __repr__

    assert "Trap>" in REDACTOR.preview([Trap()], {})


def test_markup_stays_text() -> None:
    """SEC-01: nothing is decided here about markup; whoever renders it escapes it."""
    assert REDACTOR.preview(["<script>alert(1)</script>"], {}) == '"<script>alert(1)</script>"'


def test_a_value_that_contains_itself_is_shown_to_a_bounded_depth() -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    assert REDACTOR.preview([cycle], {}).count("[") < 50


@given(JSON, JSON, st.integers(1, 400))
def test_no_value_ever_raises_or_overflows(args: Any, kwargs: Any, limit: int) -> None:
    """CAP-01: arguments that cannot be shown must not cost the letter."""
    shown = REDACTOR.preview(args, kwargs, limit=limit)
    assert len(shown) <= limit
    assert "\x00" not in shown
    shown.encode("utf-8")


def test_an_argument_that_raises_when_it_is_looked_at_is_survived() -> None:
    class Hostile(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError

    assert REDACTOR.preview([], Hostile(a=1)) == "[arguments could not be shown: RuntimeError]"


def test_a_nul_in_a_key_is_visible() -> None:
    """CAP-01: the same text on both databases."""
    assert REDACTOR.preview([], {"note": "a\x00b", "k\x00": 1}) == r'note="a\u0000b", "k\u0000"=1'


def test_a_million_arguments_cost_no_more_than_what_is_shown() -> None:
    args = [list(range(1_000))] * 1_000
    began = time.process_time()
    shown = REDACTOR.preview(args, {})
    assert time.process_time() - began < 0.5
    assert shown.endswith("… more left out")
    assert len(shown) <= 8_000


def test_a_secret_at_the_cut_is_not_half_shown() -> None:
    shown = REDACTOR.preview(["x" * 20, f"password={SECRET}"], {}, limit=40)
    assert "hunter" not in shown


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET} for bob",
        f"Key (email, password)=(a@b, {SECRET}) already exists.",
        f"('password', '{SECRET}')",
        f"pass={SECRET}",
        f"login with passcode: {SECRET}",
        f"PASSWORD = {SECRET}",
        f"{{'password': '{SECRET}', 'n': 1}}",
        f'{{"api_key": "{SECRET}"}}',
        f'body: "{{\\"api-key\\": \\"{SECRET}\\"}}"',
        f"api key: {SECRET}",
        f"environ['DB_PASSWORD']='{SECRET}'",
        f"user[password]={SECRET}&x=1",
        f"GET /?access_token={SECRET}&page=2",
        f"secret: {{'a': '{SECRET}'}}",
        f"pg_dump --password {SECRET} shop",
        f"['pg_dump', '--password', '{SECRET}']",
        f"<password>{SECRET}</password>",
        f"Authorization: Basic {SECRET}=",
        f"Cookie: a={SECRET}; b={SECRET}",
        f"curl -H 'Authorization: Bearer {SECRET}'",
        f"sent Bearer {SECRET}7 to them",
        f"redis://:{SECRET}@cache:6379/0",
        f"amqp://app:{SECRET}/with/slashes@mq//",
        f"password='it\\'s {SECRET}'",
        f"password='unfinished {SECRET}",
        f"eyJhbGciOiJIUzI1NiJ9.eyJ{SECRET}.sig{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\nMIIE{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\nMIIE{SECRET}",
        f"MIIE{SECRET}\n-----END OPENSSH PRIVATE KEY-----",
        f"ghp_{SECRET}{SECRET}",
        f"sk_live_{SECRET}",
        f"https://{SECRET}{SECRET}@git.example/x",
    ],
)
def test_a_secret_in_an_error_text_is_not_shown(text: str) -> None:
    shown = REDACTOR.text(f"before {text}\nafter" if "unfinished" not in text and "BEGIN PR" not in text else text)
    assert SECRET not in shown
    assert REDACTED in shown


def test_what_stands_around_a_secret_stays_readable() -> None:
    assert REDACTOR.text(f"login failed: password={SECRET}, user=bob") == f"login failed: password={REDACTED}, user=bob"
    assert REDACTOR.text(f"redis://:{SECRET}@cache:6379/0") == f"redis://:{REDACTED}@cache:6379/0"


@pytest.mark.parametrize("number", ["4111111111111111", "4111 1111 1111 1111", "3782-822463-10005", "5555555555554444"])
def test_a_card_number_is_not_shown(number: str) -> None:
    assert REDACTOR.text(f"card {number} declined") == f"card {REDACTED} declined"
    assert number not in REDACTOR.preview([number], {})
    if number.isdigit():
        assert number not in REDACTOR.preview([int(number)], {})


def test_an_aws_key_is_not_shown() -> None:
    assert REDACTOR.text("denied for AKIAIOSFODNN7EXAMPLE") == f"denied for {REDACTED}"


@pytest.mark.parametrize(
    "text",
    [
        "Connection refused (127.0.0.1:49152)",
        "Key (email, passenger)=(a@b, c) already exists.",
        "('email', 'a@b')",
        "the parcel is shipping, spinning and passing",
        "GET http://cache:8080/status?mail=a@b.example failed",
        "card 4111111111111112 is no card",
        "id 9221939555730002819",
        "1700000000000000 microseconds",
        "    session = self.session",
        "    token = get_token()",
        "    if token == expected:",
        "Basic authentication failed",
        "password is wrong",
        "password: None",
        "max_tokens=4096",
        "class_name=Order author: Ann",
        "<img src=x onerror=alert(1)>",
    ],
)
def test_a_text_without_secrets_stays(text: str) -> None:
    assert REDACTOR.text(text) == text


PIECES = st.sampled_from(
    [*"ab:=\"'\\{}[]()<>@/-., \n\x00\ud800 12", "password", "Bearer ", "://", "token", "eyJ", "max_"]
)


@given(st.lists(PIECES, max_size=40).map("".join))
def test_no_text_ever_raises_and_redacting_twice_changes_nothing_more(text: str) -> None:
    once = REDACTOR.text(text, limit=10_000)
    once.encode("utf-8")
    assert "\x00" not in once
    assert len(REDACTOR.text(text, limit=50)) <= 50
    assert REDACTOR.text(once, limit=10_000) == once


@pytest.mark.parametrize("position", [0, 4_000, 8_000, 12_000, 500_000, 990_000, 999_950])
def test_a_secret_anywhere_in_a_long_text_is_not_shown(position: int) -> None:
    text = "line of text\n" * 80_000
    text = f"{text[:position]} password={SECRET} {text[position:1_000_000]}"
    shown = REDACTOR.text(text, limit=4_000)
    assert len(shown) <= 4_000
    assert "hunter" not in shown
    assert "characters left out" in shown


@pytest.mark.parametrize(
    "pattern", ["://", "eyJ", "password='\\", "4111 ", "AKIA", "SG.", "token(", "--token ", "x", "-"]
)
def test_hostile_text_takes_no_more_than_its_share_of_time(pattern: str) -> None:
    text = pattern * (24_000 // len(pattern))
    began = time.process_time()
    REDACTOR.text(text)
    assert time.process_time() - began < 0.5


def test_names_of_ones_own_are_redacted() -> None:
    redactor = Redactor([*DEFAULT_PATTERNS, "health_record"])
    assert redactor.preview([], {"healthRecord": SECRET}) == f'healthRecord="{REDACTED}"'
    assert redactor.text(f"health-record: {SECRET}") == f"health-record: {REDACTED}"


@pytest.mark.parametrize("patterns", [[""], ["password", "--"]])
def test_a_pattern_that_would_match_everything_is_refused(patterns: list[str]) -> None:
    with pytest.raises(ValueError, match="patterns"):
        Redactor(patterns)


def test_the_decision_modules_do_without_django() -> None:
    modules = "opsconsole.core.safe_text, opsconsole.core.redaction, deadletters.grouping, deadletters.outcome"
    code = f"import sys, {modules}, deadletters.policy, deadletters.arguments; sys.exit('django' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
