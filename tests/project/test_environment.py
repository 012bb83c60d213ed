"""How environment variables become settings, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from opsconsole.settings.environment import Environment


def test_an_empty_variable_counts_as_not_set() -> None:
    env = Environment({"A": "  ", "B": "", "C": " , "})
    assert (env.text("A", "default"), env.number("B", 7), env.words("C", ["x"])) == ("default", 7, ["x"])
    env.refuse()


def test_everything_wrong_is_said_at_once_and_without_repeating_values() -> None:
    env = Environment({"A": "many", "B": "perhaps", "C": "secret://p4ss", "D": "blue", "E": "p4ss"})
    assert env.number("A", 7) == 7
    assert env.flag("B", True) is True
    assert env.database("C", "sqlite:///x")["ENGINE"] == "django.db.backends.sqlite3"
    assert env.choice("D", ("red", "green"), "red") == "red"
    assert env.broker_scheme("E", "filesystem://") == "filesystem"
    with pytest.raises(ImproperlyConfigured) as refusal:
        env.refuse()
    lines = str(refusal.value).splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["A", "B", "C", "D", "E"]
    assert "p4ss" not in str(refusal.value)


@pytest.mark.parametrize("text", ["-1", "1.5", "0", "٣", "1e3", "0x10"])
def test_a_number_is_a_whole_one_that_is_large_enough(text: str) -> None:
    env = Environment({"DAYS": text})
    assert env.number("DAYS", 30, at_least=1) == 30
    assert env.problems == {"DAYS": "is a whole number, 1 or more"}


@pytest.mark.parametrize(("text", "meaning"), [("1", True), ("Yes", True), ("off", False), ("0", False)])
def test_a_flag_is_said_in_the_usual_words(text: str, meaning: bool) -> None:
    env = Environment({"FLAG": text})
    assert env.flag("FLAG", not meaning) is meaning
    env.refuse()


@pytest.mark.parametrize("url", ["redis:6379", "//host", "amqp://host:port//", "redis://a;nonsense"])
def test_a_broker_url_needs_a_scheme_and_a_port_that_is_one(url: str) -> None:
    env = Environment({"BROKER": url})
    env.broker_scheme("BROKER", "filesystem://")
    assert len(env.problems) == 1


def test_the_first_of_several_brokers_says_what_kind_they_are() -> None:
    env = Environment({"BROKER": "amqp://guest:p@one//;amqp://guest:p@two//"})
    assert env.broker_scheme("BROKER", "filesystem://") == "amqp"
    env.refuse()


def test_a_folder_that_cannot_be_made_is_refused_with_the_variable_that_moves_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    env = Environment({})
    env.folder(tmp_path / "file" / "var", "VAR_DIR")
    assert env.problems["VAR_DIR"].startswith("names a folder we may write to")


def test_a_new_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    made = Environment({}).folder(tmp_path / "var", "VAR_DIR")
    assert made.stat().st_mode & 0o777 == 0o700


def test_refusals_wait_until_all_settings_are_gathered() -> None:
    env = Environment({"A": "x", "B": "x"})

    def gather() -> None:
        with env.gathering():
            env.number("A", 1)
            env.refuse()
            env.number("B", 1)

    with pytest.raises(ImproperlyConfigured, match=r"(?s)- A .*- B "):
        gather()
