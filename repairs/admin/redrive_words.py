"""What people read about redrives."""

from __future__ import annotations

from incidents.admin import incident_name
from opsconsole.core.admin import thousands
from repairs.models import ItemState, Redrive, RedriveClass, RedriveState
from repairs.redrives.requests import AnswerKind
from repairs.redrives.selectors import ClassCount

STATE_PILLS = {
    RedriveState.PLANNING: ("Dry run", "info"),
    RedriveState.READY: ("Waits for its start", "warn"),
    RedriveState.CANARY: ("Canary is out", "info"),
    RedriveState.RUNNING: ("Running", "info"),
    RedriveState.PAUSED: ("Paused", "bad"),
    RedriveState.FINISHED: ("Finished", "good"),
    RedriveState.CANCELLED: ("Cancelled", "grey"),
}
PAUSE_WORDS = {
    "operator": "by a person",
    "canary_failed": "a job of the canary has failed",
    "too_many_failed": "too many jobs have failed",
    "job_not_served": "no worker serves a task any more",
    "controller_error": "an error of the console's own",
    "broker_trouble": "the broker did not take a message",
    "database_trouble": "the database was away",
    "grant_revoked": "who runs it may not any more",
}
ITEM_WORDS = {
    ItemState.WAITING: ("Waiting", "grey"),
    ItemState.PLANNED: ("Sent, awaiting result", "info"),
    ItemState.SUCCEEDED: ("Succeeded", "good"),
    ItemState.FAILED: ("Failed again", "bad"),
    ItemState.SKIPPED: ("Left out", "grey"),
    ItemState.CANCELLED: ("Withdrawn", "grey"),
}
CLASS_WORDS = {
    RedriveClass.SAFE: ("Safe to run again", "good"),
    RedriveClass.AMBIGUOUS: ("May already have happened", "warn"),
    RedriveClass.NOT_DECLARED: ("Effects not declared", "warn"),
    RedriveClass.EXPIRED: ("Its sender's time is over", "warn"),
    RedriveClass.OLDER_THAN_CUT_OFF: ("Failed before the cut-off", "warn"),
    RedriveClass.CHORD_MEMBER: ("Member of a chord", "warn"),
    RedriveClass.NOT_SERVED: ("No live worker serves it", "grey"),
    RedriveClass.ARGUMENTS_DO_NOT_FIT: ("Its arguments don't fit", "grey"),
    RedriveClass.OVERTAKEN: ("Done or being done already", "grey"),
    RedriveClass.NOT_CAPTURED: ("Its message is not here in full", "grey"),
    RedriveClass.TOO_OLD: ("Too old by its policy", "grey"),
    RedriveClass.NOT_PATCHABLE: ("The change can't be made to it", "grey"),
    RedriveClass.IN_OTHER_REDRIVE: ("In another redrive", "grey"),
}
ANSWER_WORDS = {
    AnswerKind.DID_NOT_HAPPEN: "They did not happen: run them again",
    AnswerKind.ALREADY_HAPPENED: "They already happened: close them as done, run nothing",
    AnswerKind.IDEMPOTENT: "The provider does twice only once what has the same key: run them again",
    AnswerKind.PROBE: "Ask the provider about each: run what did not happen, close what did, leave the rest",
    AnswerKind.RUN_EXPIRED: "Run them although they have expired",
    AnswerKind.RUN_OLD: "Run them although they are older than the cut-off",
    AnswerKind.RUN_ALONE: "Run them; their chord's body will not run",
}


def jobs_words(count: int) -> str:
    """Return a number of jobs as people say it."""
    return f"{thousands(count)} job{'' if count == 1 else 's'}"


def redrive_title(redrive: Redrive) -> str:
    """Return what people call a redrive."""
    return f"redrive of {jobs_words(redrive.total_count)}" + (
        f" of {incident_name(redrive.incident)}" if redrive.incident is not None else ""
    )


def pause_words(redrive: Redrive) -> str:
    """Return why a redrive is paused, "" if it is not."""
    if not redrive.pause_code:
        return ""
    who = f"by {redrive.paused_by_name}" if redrive.paused_by_name else PAUSE_WORDS.get(redrive.pause_code, "")
    return ": ".join(part for part in (who or redrive.pause_code, redrive.pause_text) if part)


def class_words(one: ClassCount) -> tuple[str, str, str]:
    """Return the words of a class, its tone, and what happens to its jobs."""
    words, tone = CLASS_WORDS[one.item_class]
    if one.item_class is RedriveClass.SAFE:
        return words, tone, "run"
    if one.answer is not None:
        reference = f" ({one.answer.reference})" if one.answer.reference else ""
        return words, tone, f"{ANSWER_WORDS[one.answer.kind]}{reference}"
    return words, tone, "left out unless answered for" if one.is_answerable else "left out"


def left_words(seconds: int) -> str:
    """Return how long something will take, in the largest unit that says something."""
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7_200 else f"{seconds // 3600} h"
