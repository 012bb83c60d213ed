"""What is asked about a redrive: how fast, with which changes, and what is known about jobs that are not safe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django import forms

from deadletters.selectors import LetterFilter
from opsconsole.core.admin import thousands
from repairs.admin.redrive_words import ANSWER_WORDS, CLASS_WORDS
from repairs.redrives.requests import (
    CANARY,
    LONGEST_REASON,
    LONGEST_REFERENCE,
    OUTSTANDING,
    RATE,
    STATEMENTS,
    AnswerKind,
    Answers,
    RedriveAnswer,
    RedriveChanges,
    RedrivePace,
)
from repairs.redrives.selectors import ClassCount

LEAVE_OUT = ("", "Leave them out")


class PaceForm(forms.Form):
    """How fast, and when to stop."""

    canary_size = forms.IntegerField(
        label="Canary",
        min_value=CANARY[0],
        max_value=CANARY[1],
        help_text="jobs that are sent first, each as a single attempt; the rest waits until they have succeeded",
    )
    rate_per_second = forms.IntegerField(
        label="Jobs a second", min_value=RATE[0], max_value=RATE[1], help_text="sent at most"
    )
    max_outstanding = forms.IntegerField(
        label="Outstanding",
        min_value=OUTSTANDING[0],
        max_value=OUTSTANDING[1],
        help_text="jobs that may wait for their result at a time",
    )
    stop_percent = forms.IntegerField(
        label="Stop at",
        required=False,
        min_value=0,
        max_value=100,
        help_text="per cent failed: it pauses by itself; empty = never",
    )

    def pace(self) -> RedrivePace:
        """Return what was chosen."""
        given = self.cleaned_data
        return RedrivePace(**{name: given[name] for name in RedrivePace.__dataclass_fields__})


class PlanForm(PaceForm):
    """What a new redrive is: its pace, its target, and with ``redrive.patch`` what is sent differently."""

    cut_off = forms.DateTimeField(
        label="Cut-off (UTC)",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
        help_text="jobs that failed before it are left out unless you answer for them; empty = none",
    )
    target_queue = forms.CharField(
        label="Queue", required=False, max_length=200, help_text="empty = each job goes to its own queue"
    )
    low_priority = forms.BooleanField(label="Send to the queue for redrives, behind everyday work", required=False)
    tasks = forms.CharField(
        label="Change: names of tasks",
        required=False,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text="one a line: shop.old_name = shop.new_name",
    )
    rename = forms.CharField(
        label="Change: names of keyword arguments",
        required=False,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text="one a line: old = new",
    )
    set = forms.CharField(
        label="Change: set keyword arguments",
        required=False,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text='one a line, the value as JSON: currency = "EUR"',
    )
    remove = forms.CharField(
        label="Change: remove keyword arguments", required=False, max_length=2_000, help_text="names with commas"
    )
    reason = forms.CharField(
        label="Reason", required=False, max_length=LONGEST_REASON, help_text="kept in the audit trail"
    )

    PATCH = ("tasks", "rename", "set", "remove")

    def __init__(self, *args: Any, may_patch: bool, has_low_priority: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not has_low_priority:
            del self.fields["low_priority"]
        if not may_patch:
            for name in self.PATCH:
                del self.fields[name]

    def clean_cut_off(self) -> datetime | None:
        """Take what was typed as UTC, whatever the time zone of the site is."""
        given: datetime | None = self.cleaned_data["cut_off"]
        return None if given is None else given.replace(tzinfo=UTC)

    def clean_tasks(self) -> dict[str, str]:
        return _pairs(self.cleaned_data["tasks"])

    def clean_rename(self) -> dict[str, str]:
        return _pairs(self.cleaned_data["rename"])

    def clean_set(self) -> dict[str, Any]:
        return {name: _json(name, value) for name, value in _pairs(self.cleaned_data["set"]).items()}

    def clean_remove(self) -> tuple[str, ...]:
        return tuple(name for part in self.cleaned_data["remove"].split(",") if (name := part.strip()))

    def changes(self) -> RedriveChanges:
        """Return what is sent differently; nothing for who may not change anything."""
        given = self.cleaned_data
        return RedriveChanges(
            tasks=given.get("tasks", {}),
            set=given.get("set", {}),
            remove=given.get("remove", ()),
            rename=given.get("rename", {}),
        )


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        left, equals, right = (part.strip() for part in line.partition("="))
        if not (left and equals and right):
            raise forms.ValidationError(f"This line is not of the form a = b: {line.strip()[:80]}")
        if left in found:
            raise forms.ValidationError(f"{left} is named twice.")
        found[left] = right
    return found


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise forms.ValidationError(f'The value of {name} is not JSON; a text has quotes: "like this".') from None


class StartForm(forms.Form):
    """What is known about the jobs of each class that is not safe: one question and one reference for each."""

    def __init__(self, *args: Any, classes: Sequence[ClassCount], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked = [one for one in classes if one.is_answerable]
        for one in self.asked:
            words = CLASS_WORDS[one.item_class][0]
            self.fields[one.item_class.value] = forms.ChoiceField(
                label=f"{words}: {thousands(one.count)}",
                required=False,
                choices=[LEAVE_OUT, *((kind.value, ANSWER_WORDS[kind]) for kind in one.answers)],
                widget=forms.RadioSelect,
            )
            if any(kind in STATEMENTS for kind in one.answers):
                self.fields[f"{one.item_class.value}_reference"] = forms.CharField(
                    label=f"Reference for “{words}”",
                    required=False,
                    max_length=LONGEST_REFERENCE,
                    help_text="where that was seen: a ticket, a log line, who said so",
                )

    def clean(self) -> dict[str, Any]:
        """Want a reference for what somebody vouches for."""
        found = super().clean() or {}
        for one in self.asked:
            name = f"{one.item_class.value}_reference"
            if found.get(one.item_class.value) in STATEMENTS and not str(found.get(name, "")).strip():
                self.add_error(name, "Say where you saw it: a ticket, a log line, who told you.")
        return found

    def answers(self) -> Answers:
        """Return what was answered; a class that is left out has none."""
        given: Mapping[str, Any] = self.cleaned_data
        return {
            one.item_class: RedriveAnswer(
                kind=AnswerKind(kind), reference=given.get(f"{one.item_class.value}_reference", "")
            )
            for one in self.asked
            if (kind := given[one.item_class.value])
        }


class ReasonForm(forms.Form):
    """Why; nobody has to say."""

    reason = forms.CharField(
        label="Reason", required=False, max_length=LONGEST_REASON, help_text="kept in the audit trail"
    )


class FilterForm(forms.Form):
    """Which failed jobs a redrive is of, for one that is not of an incident: sent by GET, so that it can be linked."""

    tenant = forms.CharField(max_length=100)
    source = forms.ChoiceField(label="Source", help_text="environment and service whose workers run them")
    job_type = forms.CharField(label="Task", required=False, max_length=255)
    queue = forms.CharField(label="Queue", required=False, max_length=200)
    outcome_class = forms.ChoiceField(
        label="If run again",
        required=False,
        choices=[("", "Any"), ("safe", "Safe"), ("ambiguous", "May already have happened"),
                 ("not_declared", "Effects not declared")],
    )  # fmt: skip
    seen_after = forms.DateTimeField(
        label="Last failed after (UTC)",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )
    seen_before = forms.DateTimeField(
        label="Last failed before (UTC)",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )
    text = forms.CharField(label="Words of the error or the arguments", required=False, max_length=200)

    def __init__(self, *args: Any, sources: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field: Any = self.fields["source"]
        field.choices = [(name, name) for name in sources]

    def wanted(self) -> LetterFilter:
        """Return the filter that was typed; times are UTC, whatever the time zone of the site is."""
        given: dict[str, Any] = {name: value or None for name, value in self.cleaned_data.items()}
        for name in ("seen_after", "seen_before"):
            if given[name] is not None:
                given[name] = given[name].replace(tzinfo=UTC)
        return LetterFilter(states=("open", "acknowledged"), **given)
