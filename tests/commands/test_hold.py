"""Holds from a shell: the same services and answers as over REST."""

from __future__ import annotations

import pytest

from deadletters.models import Hold
from repairs.models import Redrive
from tests.api.client import Api
from tests.api.situations import held_letter, placed_hold
from tests.cast import Cast, cast
from tests.commands.test_operating import from_shell, run
from tests.factories import dead_letter

__all__ = ["cast"]
PLACE = ("hold", "place", "--tenant", "default", "--reason", "a template is broken", "--until", "2h")


def test_a_hold_is_placed_moved_ended_and_released(cast: Cast) -> None:
    """C14."""
    placed = run(*PLACE, "--task", "shop.send_mail", "--json").json
    name = placed["hold_id"]
    hold = Hold.objects.get(id=name)
    assert (hold.job_type, hold.queue, hold.source, hold.reason) == ("shop.send_mail", "", "*", "a template is broken")
    assert 7_100 < (hold.ends_at - hold.placed_at).total_seconds() <= 7_200
    assert run("hold", "extend", name, "--until", "3h", "--reason", "longer").out.startswith("It ends at ")
    held_letter(hold.id)
    told = run("hold", "show", name).out
    assert "1, of which 1 still are" in told
    assert "task shop.send_mail, tenant default" in told
    assert run("hold", "end", name, "--reason", "mended").out.endswith(
        f"`hold release {name}` sends on what was put aside."
    )
    assert run("hold", "end", name, "--reason", "again").err.startswith("hold_not_active: ")
    assert run("hold", "release", name, "--expected-count", "2").err.startswith("selection_drifted: ")
    released = run("hold", "release", name, "--expected-count", "1", "--rate", "5", "--canary", "0")
    redrive = Redrive.objects.get()
    assert (redrive.rate_per_second, redrive.canary_size, redrive.state) == (5, 0, "ready")
    assert f"`redrives start {redrive.id}`" in released.out
    assert run("redrives", "start", str(redrive.id), "--json").json["state"] == "running"


def test_messages_like_a_failed_job_are_held(cast: Cast) -> None:
    letter = dead_letter()
    made = run(*PLACE, "--payload-of", str(letter.id), "--json").json
    assert Hold.objects.get(id=made["hold_id"]).payload_hash != ""
    assert run(*PLACE, "--payload-of", str(letter.id), who="bram").err.startswith("payload_not_known: ")
    assert run(*PLACE).err.startswith("hold_invalid: ")


def test_the_same_holds_are_shown_as_over_rest(cast: Cast) -> None:
    """GRA-01, GRA-02."""
    hold_id = placed_hold(cast.ada)
    held_letter(hold_id)
    api = Api(cast.ada)
    assert run("hold", "list", "--state", "active", "--json").json["results"] == api.rows("holds")
    assert run("hold", "show", str(hold_id), "--json").json == api.get(f"holds/{hold_id}").json()
    assert run("hold", "list", "--tenant", "default", "--task", "shop.send_mail").out.count("send_mail") == 1
    assert run("hold", "list", "--json", who="bram").json["results"] == []
    assert run("hold", "list", who="nobody").err.startswith("access_denied: ")
    for words in (
        ("show",), ("end", "--reason", "x"), ("extend", "--reason", "x", "--until", "2h"), ("release",),
    ):  # fmt: skip
        hidden = run("hold", words[0], str(hold_id), *words[1:], who="bram")
        assert (hidden.status, hidden.err.split(":")[0]) == (1, "hold_not_found"), words
    assert run("hold", "end", str(hold_id), "--reason", "x", who="vera").err.startswith("access_denied: ")
    assert Hold.objects.get().state == "active"


@pytest.mark.parametrize(
    "words",
    [
        ("hold", "place", "--tenant", "default", "--reason", "x"),
        (*PLACE[:-1], "tomorrow"),
        ("hold", "extend", "x", "--until", "2h", "--reason", "x"),
        ("redrive", "--answer", "ambiguous=perhaps"),
        ("redrive", "--set", "order=not json"),
        ("redrive", "--set", "order=NaN"),
        ("redrive", "--rename", "old"),
        ("redrive", "--stop-percent", "some"),
        ("redrives", "items", "01970000-0000-7000-8000-000000000000", "--class", "unsafe"),
    ],
    ids=" ".join,
)
def test_misuse_ends_with_status_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """API-03: what is not understood is never ignored."""
    assert from_shell(*words) == 2
    assert "usage: manage.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [("redrive",), ("redrives", "list"), ("hold", "list"), PLACE],
    ids=" ".join,
)
@pytest.mark.django_db
def test_where_nobody_is_named_nothing_is_done(words: tuple[str, ...]) -> None:
    """B2."""
    assert run(*words, who=None).err.startswith("not_authenticated: Nobody is named")
