"""Whether a job's arguments fit the task as a worker has published it."""

from __future__ import annotations

import inspect
import json
from inspect import Parameter, Signature
from typing import Any

import pytest
from celery import Celery, Task
from hypothesis import given
from hypothesis import strategies as st

from deadletters.arguments import check_arguments, describe_signature

NAMES = st.lists(st.sampled_from("abcdefg"), max_size=5, unique=True)


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    """Any signature that a function can have."""
    names = draw(NAMES)
    kinds = sorted(
        draw(
            st.lists(
                st.sampled_from([Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY]),
                min_size=len(names),
                max_size=len(names),
            )
        )
    )
    first_default = draw(st.integers(0, len(names)))
    parameters = []
    for position, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        has_default = draw(st.booleans()) if kind is Parameter.KEYWORD_ONLY else position >= first_default
        parameters.append(Parameter(name, kind, default=None if has_default else Parameter.empty))
    if draw(st.booleans()):
        parameters.append(Parameter("args", Parameter.VAR_POSITIONAL))
    if draw(st.booleans()):
        parameters.append(Parameter("kwargs", Parameter.VAR_KEYWORD))
    return Signature(sorted(parameters, key=lambda parameter: parameter.kind))


@given(
    signatures(), st.lists(st.none(), max_size=6), st.dictionaries(st.sampled_from("abcdefgh"), st.none(), max_size=5)
)
def test_arguments_fit_exactly_when_python_makes_the_call(
    signature: Signature, args: list[None], kwargs: dict[str, None]
) -> None:
    # Signature.bind() is no judge: it refuses f(a=1) for f(a=0, /, **kwargs), which Python accepts.
    namespace: dict[str, Any] = {}
    exec(f"def function{signature}: pass", namespace)
    try:
        namespace["function"](*args, **kwargs)
    except TypeError:
        fits = False
    else:
        fits = True
    described = describe_signature(namespace["function"])
    assert (check_arguments(described, args, kwargs) is None) is fits


def charge(order_id: int, amount: int = 1, /, colour: str = "", *, currency: str, note: str = "") -> None:
    """A task's function."""


CHARGE = describe_signature(charge)


@pytest.mark.parametrize(
    ("args", "kwargs", "sentence"),
    [
        ([], {"currency": "EUR"}, "missing argument 'order_id'"),
        ([], {}, "missing arguments 'order_id' and 'currency'"),
        ([1], {"currency": "EUR", "size": 2}, "unexpected argument 'size'"),
        ([1], {"currency": "EUR", "amount": 2}, "unexpected argument 'amount'"),
        ([1, 2, "red"], {"currency": "EUR", "colour": "red"}, "argument 'colour' was given by position and by name"),
        ([1, 2, 3, 4], {"currency": "EUR"}, "4 positional arguments were given and the task takes at most 3"),
        ([], {"size": 1}, "unexpected argument 'size'; missing arguments 'order_id' and 'currency'"),
    ],
)
def test_the_sentence_says_what_does_not_fit(args: list[Any], kwargs: dict[str, Any], sentence: str) -> None:
    assert check_arguments(CHARGE, args, kwargs) == sentence


def test_a_signature_is_published_as_short_json() -> None:
    assert json.loads(CHARGE) == {
        "positional": ["order_id", "amount", "colour"],
        "positional_only": 2,
        "required": 1,
        "kwonly": ["currency", "note"],
        "kwonly_required": ["currency"],
    }
    assert describe_signature(lambda: None) == "{}"


def make_tasks() -> list[Task[..., None]]:
    """The same task in all the ways that Celery has of writing one."""
    app = Celery("x", set_as_default=False)

    @app.task
    def plain(order_id: int, *, note: str = "") -> None: ...

    @app.task(bind=True)
    def bound(self: Task[..., None], order_id: int, *, note: str = "") -> None: ...

    @app.task(bind=True, autoretry_for=(ValueError,))
    def retried(self: Task[..., None], order_id: int, *, note: str = "") -> None: ...

    class ByClass(Task):  # type: ignore[type-arg]
        name = "by_class"

        def run(self, order_id: int, *, note: str = "") -> None: ...

    app.register_task(ByClass())
    return [app.tasks[task.name] for task in (plain, bound, retried, ByClass)]


@pytest.mark.parametrize("task", make_tasks(), ids=lambda task: task.name)
def test_the_task_itself_is_no_argument_of_a_task(task: Task[..., None]) -> None:
    described = describe_signature(task)
    assert json.loads(described) == {"positional": ["order_id"], "required": 1, "kwonly": ["note"], "max_retries": 3}


class Unreadable:
    """A task whose signature cannot be read."""

    @property
    def run(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize("task", [Unreadable(), 5, type.__call__])
def test_a_signature_that_cannot_be_read_is_unknown(task: Any) -> None:
    assert describe_signature(task) in ("", describe_if_python_can(task))


def describe_if_python_can(task: Any) -> str:
    """Some built-in functions have a signature in one version of Python and none in another."""
    try:
        inspect.signature(task)
    except (TypeError, ValueError):
        return ""
    return describe_signature(task)


@pytest.mark.parametrize(
    "unknown", [None, "", "{", "[]", "5", '{"positional": 5}', '{"positional": [1]}', '{"later": 1}']
)
def test_arguments_are_not_refused_where_the_signature_is_unknown(unknown: str | None) -> None:
    assert check_arguments(unknown, [1, 2, 3], {"x": 1}) is None


def test_hostile_names_stay_readable() -> None:
    """CAP-01: names of arguments come from messages."""
    sentence = check_arguments("{}", [], {f"k\x00{number}" + "x" * 1_000: 1 for number in range(100)})
    assert sentence is not None
    assert "\x00" not in sentence
    assert sentence.endswith("and 95 more")
    assert len(sentence) < 500
