"""An error is described where it happened, whatever it does when it is asked."""

from __future__ import annotations

import json
import sys
from types import CodeType, ModuleType
from typing import Any

import pytest
from celery.utils.serialization import UnpickleableExceptionWrapper

from deadletters.journal.events import ErrorReport
from deadletters.journal.reports import MAX_TEXT, MAX_TRACEBACK, report_error, shorten


class Declined(Exception):
    """A failure of the user's own code."""


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not telling")

    __repr__ = __str__


def caught(function: Any, *args: Any, **options: Any) -> ErrorReport:
    try:
        function(*args)
    except BaseException as exc:
        return report_error(exc, **options)
    raise AssertionError("nothing was raised")


class Shop:
    def charge(self) -> None:
        self.fail(5)

    def fail(self, amount: int) -> None:
        raise Declined(f"no money for {amount}")


def decode() -> None:
    json.loads("{")


def test_the_innermost_own_frame_is_named_by_module_and_function() -> None:
    report = caught(Shop().charge)
    assert report.call_site == f"{__name__}:Shop.fail"
    assert report.error_class == f"{__name__}.Declined"
    assert report.text == "no money for 5"
    assert "in charge" in report.traceback


def test_frames_of_libraries_are_passed_over() -> None:
    report = caught(decode)
    assert report.call_site == f"{__name__}:decode"
    assert report.error_class == "json.decoder.JSONDecodeError"


def test_without_an_own_frame_there_is_no_call_site() -> None:
    try:
        json.loads("{")
    except ValueError as exc:
        traceback = exc.__traceback__
        assert traceback is not None
        report = report_error(exc.with_traceback(traceback.tb_next))
    assert report.call_site == ""


def installed(name: str) -> ModuleType:
    """Make a module that looks installed, with a function that fails."""
    module = ModuleType(name)
    code: CodeType = compile("def run():\n    raise ValueError(1)", f"/opt/venv/lib/site-packages/{name}.py", "exec")
    exec(code, module.__dict__)
    return module


def test_the_tasks_own_package_counts_as_own_even_where_it_is_installed() -> None:
    module = installed("shop.tasks")
    assert caught(module.run, task_module="shop.jobs").call_site == "shop.tasks:run"
    assert caught(module.run, task_module="other.jobs").call_site == f"{__name__}:caught"
    assert (
        caught(installed("celery.backends").run, task_module="celery.app.builtins").call_site != "celery.backends:run"
    )


def test_pythons_own_errors_have_no_module() -> None:
    assert caught(lambda: {}["x"]).error_class == "KeyError"


def test_the_classes_are_those_of_the_error_and_of_what_led_to_it() -> None:
    def chained() -> None:
        try:
            try:
                raise ConnectionResetError("peer")
            except OSError as exc:
                raise LookupError("cache") from exc
        except LookupError:
            raise Declined("no money")  # noqa: B904

    names = caught(chained).classes
    assert names[:2] == (f"{__name__}.Declined", "Exception")
    assert {"LookupError", "ConnectionResetError", "ConnectionError", "OSError"} <= set(names)
    assert "object" not in names
    assert len(names) == len(set(names))


def test_a_suppressed_context_is_not_a_cause() -> None:
    def suppressed() -> None:
        try:
            raise OSError
        except OSError:
            raise Declined from None

    assert "OSError" not in caught(suppressed).classes


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = Declined("1"), Declined("2")
    first.__cause__, second.__cause__ = second, first
    assert f"{__name__}.Declined" in report_error(first).classes


def test_endless_chains_are_capped() -> None:
    error: Exception = Declined("0")
    for number in range(500):
        kind = type(f"Error{number}", (Exception,), {})
        outer = kind()
        outer.__cause__ = error
        error = outer
    assert len(report_error(error).classes) <= 64


def test_an_error_that_cannot_be_printed_is_still_reported() -> None:
    def run() -> None:
        raise Hostile

    report = caught(run)
    assert report.error_class == f"{__name__}.Hostile"
    assert report.text == "<an error that cannot be printed>"
    assert report.call_site.endswith("run")


def test_long_texts_keep_head_and_tail() -> None:
    def run() -> None:
        raise ValueError("head" + "x" * 3_000_000 + "tail")

    report = caught(run)
    assert len(report.text) == MAX_TEXT
    assert len(report.traceback) == MAX_TRACEBACK
    assert report.text.startswith("head")
    assert report.text.endswith("tail")
    assert "characters left out" in report.text
    assert shorten("short", 10) == "short"


def test_endless_recursion_is_reported() -> None:
    def run(depth: int) -> None:
        run(depth + 1)

    report = caught(run, 0)
    assert report.error_class == "RecursionError"
    assert report.call_site.endswith("run")


def test_what_celery_wrapped_to_pickle_it_is_reported_as_what_it_was() -> None:
    original = Declined("no money")
    wrapped = UnpickleableExceptionWrapper.from_exception(original)
    assert report_error(wrapped, original=original).classes[:2] == (f"{__name__}.Declined", "Exception")
    alone = report_error(wrapped, original=None)
    assert alone.error_class == f"{__name__}.Declined"
    assert alone.classes == (f"{__name__}.Declined",)
    assert "no money" in alone.text


@pytest.mark.parametrize("given", ["what Celery formatted", ""])
def test_a_given_traceback_is_used(given: str) -> None:
    assert report_error(Declined(), traceback_text=given).traceback == given


def test_an_error_that_was_never_raised_has_no_traceback() -> None:
    assert report_error(Declined()).traceback == ""
    assert sys.exc_info()[1] is None
