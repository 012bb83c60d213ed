"""What may be decided about a failed job without running it: what is asked before, and which service does it.

One job and several are asked about in the same words, and each job is one call of the same service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grants.actions import Action
from grants.pages import Section
from repairs.admin.words import DoneForm, ReasonForm
from repairs.services import LetterMutation, close_letter_as_done, discard_letter


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``title`` and ``submit`` take what they are about; ``done`` is what a job is afterwards."""

    action: Action
    service: Callable[..., LetterMutation]
    form: type[ReasonForm]
    title: str
    submit: str
    submit_many: str
    warning: Section
    done: str
    is_danger: bool = False


DONE = Decision(
    action=Action.DEAD_LETTERS_RETRY,
    service=close_letter_as_done,
    form=DoneForm,
    title="Close {} as already happened?",
    submit="Close as done",
    submit_many="Close {} as done",
    warning=Section(
        heading="Nothing will run again",
        tone="warn",
        text="You state that the work has been done. Record, message and history stay.",
    ),
    done="closed as already happened",
)
DISCARD = Decision(
    action=Action.DEAD_LETTERS_DISCARD,
    service=discard_letter,
    form=ReasonForm,
    title="Discard {}?",
    submit="Discard it for good",
    submit_many="Discard {} for good",
    warning=Section(
        heading="This cannot be undone",
        tone="bad",
        text="The message is removed now, so the job can never run again. Record and history stay.",
    ),
    done="discarded",
    is_danger=True,
)
