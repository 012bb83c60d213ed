"""Whether a job that ended badly may nevertheless have done its work."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import redis
import requests
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from deadletters.journal.events import Caught
from deadletters.outcome import Effects, Judgement, OutcomeClass, combine, judge

SAFE, NOT_DECLARED, AMBIGUOUS = OutcomeClass.SAFE, OutcomeClass.NOT_DECLARED, OutcomeClass.AMBIGUOUS

FAILURE: dict[str, Any] = {
    "caught": Caught.FAILURE,
    "error_class": "shop.errors.CardDeclined",
    "classes": ("shop.errors.CardDeclined", "shop.errors.ShopError", "builtins.Exception"),
    "text": "card declined",
    "effects": Effects.UNDECLARED,
    "safe_errors": (),
    "never_started": False,
    "message_missing": False,
}


def judged(**changes: Any) -> OutcomeClass:
    """The outcome class of a failure that differs from the usual one by ``changes``."""
    return judge(**FAILURE | changes).outcome


def as_reported(error: BaseException | None) -> dict[str, Any]:
    """An error as the journal reports it: the class, and all classes of the chain."""
    assert error is not None
    text, error_class = str(error), f"{type(error).__module__}.{type(error).__qualname__}"
    classes: list[str] = []
    while error is not None:
        classes += [f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]
        error = error.__cause__ or error.__context__
    return {"error_class": error_class, "classes": tuple(classes), "text": text}


def raised_by(action: Callable[[], object]) -> dict[str, Any]:
    """What the journal reports of the error that ``action`` raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the matter of the test
        action()
    return as_reported(caught.value)


# -- the rules of the policy -------------------------------------------------------------------------------------------


@given(
    st.sampled_from([Effects.NONE, Effects.IDEMPOTENT]),
    st.sampled_from(Caught),
    st.sampled_from(["builtins.ConnectionResetError", "billiard.exceptions.TimeLimitExceeded", "x.Y"]),
    st.booleans(),
)
def test_a_task_that_may_run_twice_is_always_safe(
    effects: Effects, caught: Caught, error_class: str, message_missing: bool
) -> None:
    assert judged(effects=effects, caught=caught, error_class=error_class, message_missing=message_missing) is SAFE


@given(st.sampled_from(Effects), st.sampled_from(Caught), st.sampled_from(["builtins.ConnectionResetError", "x.Y"]))
def test_what_never_started_is_always_safe(effects: Effects, caught: Caught, error_class: str) -> None:
    assert judged(effects=effects, caught=caught, error_class=error_class, never_started=True) is SAFE


def test_an_undeclared_error_of_a_task_with_outside_effects_is_ambiguous() -> None:
    assert judged(effects=Effects.OUTSIDE) is AMBIGUOUS


def test_an_error_of_a_foreign_task_without_a_policy_is_not_declared() -> None:
    assert judged() is NOT_DECLARED


@pytest.mark.parametrize("name", ["CardDeclined", "shop.errors.CardDeclined", "ShopError", "shop.errors.ShopError"])
def test_a_declared_error_is_safe_by_its_own_name_and_its_bases(name: str) -> None:
    assert judged(effects=Effects.OUTSIDE, safe_errors=(name,)) is SAFE


@pytest.mark.parametrize("name", ["Declined", "errors.CardDeclined", "other.CardDeclined"])
def test_an_error_is_not_declared_by_half_its_name(name: str) -> None:
    assert judged(effects=Effects.OUTSIDE, safe_errors=(name,)) is AMBIGUOUS


def test_a_declared_error_in_the_chain_does_not_excuse_a_broken_connection() -> None:
    classes = ("builtins.ConnectionResetError", "shop.errors.CardDeclined")
    outcome = judged(error_class="builtins.ConnectionResetError", classes=classes, safe_errors=("CardDeclined",))
    assert outcome is AMBIGUOUS


@pytest.mark.parametrize("error_class", ["shop.errors.RefundFailed", "builtins.TimeoutError"])
def test_an_error_raised_while_handling_a_declared_one_is_not_declared(error_class: str) -> None:
    classes = (error_class, "builtins.BaseException", "shop.errors.CardDeclined")
    outcome = judged(error_class=error_class, classes=classes, safe_errors=("CardDeclined",), effects=Effects.OUTSIDE)
    assert outcome is AMBIGUOUS


def test_no_attempt_left_is_judged_by_the_error_it_stands_for() -> None:
    error_class = "celery.exceptions.MaxRetriesExceededError"
    classes = (error_class, "builtins.BaseException", "shop.errors.CardDeclined")
    assert judged(error_class=error_class, classes=classes, safe_errors=("CardDeclined",)) is SAFE


def test_a_declared_error_is_believed_whatever_it_is() -> None:
    assert judged(error_class="builtins.TimeoutError", classes=(), safe_errors=("TimeoutError",)) is SAFE


# -- what never ran ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caught", [Caught.UNKNOWN, Caught.REJECTED_MESSAGE, Caught.EXPIRED])
def test_a_message_that_no_task_took_is_safe(caught: Caught) -> None:
    assert judged(caught=caught, effects=Effects.OUTSIDE, error_class="", classes=(), text="") is SAFE


def charge(order: int, *, amount: int = 0) -> None:
    """A task's function."""


@pytest.mark.parametrize(
    "call",
    [
        lambda: charge(),  # type: ignore[call-arg]
        lambda: charge(1, 2),  # type: ignore[call-arg]
        lambda: charge(1, 2, amount=3),  # type: ignore[misc]
        lambda: charge(1, order=1),  # type: ignore[misc]
        lambda: charge(1, colour="red"),  # type: ignore[call-arg]
        lambda: charge(*5),  # type: ignore[misc]
        lambda: charge(**5),  # type: ignore[arg-type]
    ],
)
def test_a_call_that_does_not_fit_the_task_is_safe(call: Callable[[], None]) -> None:
    error = raised_by(call)
    if error["text"].startswith("test"):  # Python names the function with its module for * and **
        error["text"] = error["text"].removeprefix("tests.deadletters.test_outcome.")
    assert judged(effects=Effects.OUTSIDE, call_site="", task="shop.tasks.charge", **error) is SAFE
    assert judged(effects=Effects.OUTSIDE, call_site="", **error) is SAFE


def test_a_call_inside_the_task_that_does_not_fit_is_not_safe() -> None:
    error = raised_by(lambda: charge())  # type: ignore[call-arg]
    assert judged(effects=Effects.OUTSIDE, call_site="shop.tasks:pay", **error) is AMBIGUOUS
    assert judged(effects=Effects.OUTSIDE, call_site="", task="shop.tasks.pay", **error) is AMBIGUOUS
    assert judged(effects=Effects.OUTSIDE, **error) is AMBIGUOUS


# -- connections -------------------------------------------------------------------------------------------------------


ONCE = Retry(NoBackoff(), 0)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def dropping_server() -> HTTPServer:
    """A server that reads a request and hangs up."""

    class HangUp(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *args: object) -> None:
            pass

    return HTTPServer(("127.0.0.1", 0), HangUp)


def test_a_refused_connection_is_safe_through_every_wrapper() -> None:
    port = free_port()
    for action in (
        lambda: socket.create_connection(("127.0.0.1", port)),
        lambda: requests.post(f"http://127.0.0.1:{port}/", timeout=5),
        lambda: redis.Redis(port=port, retry=ONCE).ping(),
    ):
        assert judged(effects=Effects.OUTSIDE, **raised_by(action)) is SAFE


def test_a_name_that_cannot_be_resolved_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=socket.gaierror(-2, "Name or service not known")))
    for action in (
        lambda: socket.create_connection(("no-such-host.invalid", 80)),
        lambda: requests.post("http://no-such-host.invalid/", timeout=5),
    ):
        assert judged(effects=Effects.OUTSIDE, **raised_by(action)) is SAFE


def test_a_request_without_an_answer_is_ambiguous() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        for action in (
            lambda: requests.post(f"http://127.0.0.1:{port}/", timeout=0.1),
            lambda: redis.Redis(port=port, socket_timeout=0.1, retry=ONCE).ping(),
        ):
            assert judged(**raised_by(action)) is AMBIGUOUS


def test_a_server_that_hangs_up_after_the_request_is_ambiguous() -> None:
    with dropping_server() as server:
        Thread(target=server.handle_request, daemon=True).start()
        error = raised_by(lambda: requests.post(f"http://127.0.0.1:{server.server_port}/", timeout=5))
    assert judged(**error) is AMBIGUOUS


@pytest.mark.parametrize(
    ("error_class", "outcome"),
    [
        ("httpx.ConnectError", SAFE),
        ("httpx.ConnectTimeout", SAFE),
        ("requests.exceptions.ConnectTimeout", SAFE),
        ("urllib3.exceptions.NewConnectionError", SAFE),
        ("builtins.ConnectionRefusedError", SAFE),
        ("ConnectionRefusedError", SAFE),
        ("socket.gaierror", SAFE),
        ("httpx.ReadTimeout", AMBIGUOUS),
        ("requests.exceptions.ReadTimeout", AMBIGUOUS),
        ("builtins.TimeoutError", AMBIGUOUS),
        ("builtins.ConnectionResetError", AMBIGUOUS),
        ("builtins.BrokenPipeError", AMBIGUOUS),
        ("http.client.RemoteDisconnected", AMBIGUOUS),
        ("billiard.exceptions.TimeLimitExceeded", AMBIGUOUS),
        ("celery.exceptions.SoftTimeLimitExceeded", AMBIGUOUS),
        ("billiard.exceptions.WorkerLostError", AMBIGUOUS),
        ("kombu.exceptions.EncodeError", AMBIGUOUS),
        ("celery.exceptions.NotRegistered", SAFE),
    ],
)
@pytest.mark.parametrize("effects", [Effects.OUTSIDE, Effects.UNDECLARED])
def test_an_error_is_judged_by_its_class(error_class: str, outcome: OutcomeClass, effects: Effects) -> None:
    assert judged(error_class=error_class, classes=(error_class,), text="", effects=effects) is outcome


def test_a_time_out_while_connecting_is_safe_although_its_cause_is_a_time_out() -> None:
    classes = ("httpx.ConnectTimeout", "httpcore.ConnectTimeout", "builtins.TimeoutError", "builtins.OSError")
    assert judged(error_class="httpx.ConnectTimeout", classes=classes, effects=Effects.OUTSIDE) is SAFE


def test_a_refusal_after_a_request_without_an_answer_is_ambiguous() -> None:
    """C19: the second try inside one run does not undo the first."""
    classes = ("builtins.ConnectionRefusedError", "requests.exceptions.ReadTimeout")
    assert judged(error_class="builtins.ConnectionRefusedError", classes=classes) is AMBIGUOUS


def test_a_time_out_after_a_refusal_is_ambiguous() -> None:
    classes = ("builtins.TimeoutError", "builtins.ConnectionRefusedError")
    assert judged(error_class="builtins.TimeoutError", classes=classes) is AMBIGUOUS


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ('connection to server at "127.0.0.1", port 1 failed: Connection refused', SAFE),
        ("server closed the connection unexpectedly", AMBIGUOUS),
        ("deadlock detected", NOT_DECLARED),
    ],
)
def test_a_database_error_is_judged_by_its_words(text: str, outcome: OutcomeClass) -> None:
    error_class = "django.db.utils.OperationalError"
    assert judged(error_class=error_class, classes=(error_class, "psycopg.OperationalError"), text=text) is outcome


def test_the_words_of_any_other_error_prove_nothing() -> None:
    assert judged(text="upstream said: Connection refused", effects=Effects.OUTSIDE) is AMBIGUOUS


def test_a_lost_worker_is_ambiguous_and_the_reason_says_what_is_unknown() -> None:
    judgement = judge(**FAILURE | {"caught": Caught.WORKER_LOST, "error_class": "", "classes": ()})
    assert judgement.outcome is AMBIGUOUS
    assert judgement.reason == "The worker died while it was running; what it had sent by then is unknown."


def test_a_failure_around_the_task_is_ambiguous() -> None:
    assert judged(caught=Caught.INTERNAL) is AMBIGUOUS


def test_the_reason_says_when_the_message_is_missing() -> None:
    with_message, without = judge(**FAILURE), judge(**FAILURE | {"message_missing": True})
    assert without.outcome is with_message.outcome
    assert without.reason == f"{with_message.reason} Its message was not fully captured."


@given(
    st.sampled_from(Caught),
    st.sampled_from(
        ["", "x.Y", "TimeoutError", "x.TypeError", "psycopg.OperationalError", "kombu.exceptions.EncodeError"]
    ),
    st.text(max_size=50),
    st.sampled_from(Effects),
    st.booleans(),
    st.sampled_from([None, "", "a:b"]),
)
def test_every_failure_is_judged_with_a_sentence(
    caught: Caught, error_class: str, text: str, effects: Effects, never_started: bool, call_site: str | None
) -> None:
    judgement = judge(
        **FAILURE
        | {
            "caught": caught,
            "error_class": error_class,
            "text": text,
            "effects": effects,
            "never_started": never_started,
            "call_site": call_site,
        }
    )
    assert judgement.reason.endswith(".")
    assert judgement.reason[0].isupper() or judgement.reason.startswith(error_class.rpartition(".")[2])
    assert len(judgement.reason) < 150


# -- several attempts --------------------------------------------------------------------------------------------------

JUDGEMENTS = st.builds(Judgement, st.sampled_from(OutcomeClass), st.text(max_size=3))


def test_severity_rises_from_safe_over_not_declared_to_ambiguous() -> None:
    assert sorted(OutcomeClass, key=lambda outcome: outcome.severity) == [SAFE, NOT_DECLARED, AMBIGUOUS]


def test_the_first_judgement_stands_alone() -> None:
    assert combine(None, Judgement(SAFE, "x")) == Judgement(SAFE, "x")


@given(st.lists(JUDGEMENTS, min_size=1))
def test_several_attempts_are_as_bad_as_the_worst_of_them(attempts: list[Judgement]) -> None:
    """C19: the newest among the worst gives the reason."""
    combined: Judgement | None = None
    for attempt in attempts:
        combined = combine(combined, attempt)
    worst = max(attempt.outcome.severity for attempt in attempts)
    assert combined == [attempt for attempt in attempts if attempt.outcome.severity == worst][-1]
