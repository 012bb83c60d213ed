"""The settings of the OpenAPI document, whatever the project around us has set for its own API."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deadletters.models import HoldState
from deadletters.outcome import OutcomeClass
from grants.actions import Action
from grants.operators import OperatorKind
from grants.rest import OpsView
from incidents.models import IncidentState
from repairs.models import ActionState, BatchState, ItemState, RedriveClass, RedriveState, RunState
from repairs.redrives.requests import AnswerKind


def only_ours(endpoints: Iterable[tuple[str, str, str, Any]]) -> list[tuple[str, str, str, Any]]:
    """Keep this API's routes; a project that attaches has others."""
    return [endpoint for endpoint in endpoints if issubclass(getattr(endpoint[3], "cls", object), OpsView)]


def close_bodies(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Say that a request's body has no other names than those described: others are refused."""
    for name, described in result["components"]["schemas"].items():
        if name.endswith("BodyRequest"):
            described["additionalProperties"] = False
    return result


def _words(names: Iterable[Any]) -> list[tuple[str, str]]:
    return [(str(name.value), str(name.value)) for name in names]


def _version() -> str:
    try:
        return version("opsconsole")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "0"


SPECTACULAR: dict[str, Any] = {
    "TITLE": "opsconsole",
    "DESCRIPTION": (
        "Failed background jobs, the incidents they make, and their repair. Errors are `application/problem+json` with"
        " a stable `code`. Every change takes an `Idempotency-Key`; sent again, it is answered as the first time."
    ),
    "VERSION": _version(),
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "",
    "COMPONENT_SPLIT_REQUEST": True,
    "COMPONENT_SPLIT_PATCH": False,
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "PREPROCESSING_HOOKS": ["opsconsole.api.openapi.only_ours"],
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "opsconsole.api.openapi.close_bodies",
    ],
    "ENUM_NAME_OVERRIDES": {
        "IncidentState": _words(IncidentState),
        "RepairState": _words(ActionState),
        "BatchState": _words(BatchState),
        "HoldState": _words(HoldState),
        "RedriveState": _words(RedriveState),
        "RedriveItemState": _words(ItemState),
        "RedriveClassName": _words(RedriveClass),
        "RedriveAnswerKind": _words(AnswerKind),
        "ReconciliationState": _words(RunState),
        "ActionName": _words(Action),
        "OperatorKind": _words(OperatorKind),
        "OutcomeClass": _words(OutcomeClass),
    },
}
