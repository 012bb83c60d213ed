"""``manage.py incidents``: the on-call list from a shell."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from deadletters.policy import TaskPolicySpec
from deadletters.selectors import task_policies
from grants.operators import Operator
from incidents import selectors, services
from incidents.api.serializers import IncidentMutationSerializer, IncidentSerializer
from incidents.models import Incident, Severity
from opsconsole.management.operations import (
    OperationsCommand,
    add_page_arguments,
    facts,
    incident_id,
    incident_ref,
    key_of,
    record_id,
    table,
    words,
)
from repairs.api.serializers import BatchMutationSerializer, IncidentPageSerializer
from repairs.selectors import incident_page
from repairs.services import retry_incident


class Command(OperationsCommand):
    """Each subcommand acts with the permissions of ``--operator USERNAME`` or of a token."""

    help = "List incidents and show, acknowledge, release, resolve or retry one, named by INC-0012, #12 or its id."

    def add_subcommands(self) -> None:
        """Declare the subcommands."""
        listing = self.subcommand("list", "List incidents, worst first.", self.list)
        listing.add_argument("--state", type=words(selectors.STATES), default=("unresolved",))
        listing.add_argument("--severity", type=words(selectors.SEVERITIES), default=())
        for option in ("--tenant", "--source", "--job-type", "--holder"):
            listing.add_argument(option)
        add_page_arguments(listing, limit=50, most=100)

        _add_incident(self.subcommand("show", "Show one incident.", self.show))

        acknowledge = self.subcommand("acknowledge", "Take an incident.", self.acknowledge, changes=True)
        _add_incident(acknowledge)
        acknowledge.add_argument("--take-over", action="store_true", help="take it from whoever has it")
        acknowledge.add_argument("--further", type=int, help="open it again after so many more failures")

        _add_incident(self.subcommand("release", "Give an incident back.", self.release, changes=True))

        resolve = self.subcommand("resolve", "Close an incident with a reason.", self.resolve, changes=True)
        _add_incident(resolve)
        resolve.add_argument("--code", required=True, help="such as fixed_upstream")
        resolve.add_argument("--summary", required=True)
        resolve.add_argument("--unrepaired", type=int, help="how many of its jobs stay unrepaired, if any do")

        retry = self.subcommand("retry", "Run jobs of an incident again.", self.retry, changes=True)
        _add_incident(retry)
        chosen = retry.add_mutually_exclusive_group(required=True)
        chosen.add_argument("--letter", action="append", type=record_id, dest="letters", metavar="ID")
        chosen.add_argument(
            "--all", type=int, metavar="COUNT", help="every open job of it; COUNT is how many there are"
        )
        add_retry_arguments(retry)

    def list(self, options: dict[str, Any], operator: Operator) -> None:
        """List incidents."""
        wanted = selectors.IncidentFilter(
            states=options["state"],
            severities=options["severity"],
            tenant=options["tenant"],
            source=options["source"],
            job_type=options["job_type"],
            holder=options["holder"],
        )
        page = selectors.list_incidents(operator, wanted, limit=options["limit"], cursor=options["cursor"])
        columns = (
            ("", lambda incident: f"#{incident.number}"),
            ("severity", lambda incident: Severity(incident.severity).label),
            ("state", lambda incident: incident.state),
            ("unrepaired", lambda incident: incident.unresolved_count),
            ("last seen", lambda incident: incident.last_seen_at),
            ("tenant", lambda incident: incident.tenant),
            ("holder", lambda incident: incident.acknowledged_by_name),
            ("", lambda incident: incident.title),
        )
        self.answer_page(options, page, IncidentSerializer, columns)

    def show(self, options: dict[str, Any], operator: Operator) -> None:
        """Show one incident."""
        page = incident_page(operator, incident_id(options["incident"]))
        policy = task_policies().for_task(page.incident.job_type)
        links = {"letters": "", "repair_actions": "", "timeline": ""}
        letters = (
            ("dead letter", lambda letter: letter.id),
            ("state", lambda letter: letter.standing(page.incident)),
            ("outcome", lambda letter: letter.outcome_class),
            ("last seen", lambda letter: letter.last_seen_at),
            ("error", lambda letter: letter.error_text),
        )
        lines = [*_describe(page.incident, policy), "", *table(page.letters, letters)]
        self.answer(options, IncidentPageSerializer({"page": page, "policy": policy, "links": links}), lines)

    def acknowledge(self, options: dict[str, Any], operator: Operator) -> None:
        """Take an incident."""
        mutation = services.acknowledge_incident(
            incident_id=incident_id(options["incident"]),
            by=operator,
            key=key_of(options),
            take_over=options["take_over"],
            further=options["further"],
        )
        line = f"{mutation.holder} has it{'' if mutation.changed else ' already'}."
        self.answer(options, IncidentMutationSerializer(mutation), [line])

    def release(self, options: dict[str, Any], operator: Operator) -> None:
        """Give an incident back."""
        mutation = services.release_incident(
            incident_id=incident_id(options["incident"]), by=operator, key=key_of(options)
        )
        line = "Nobody has it now." if mutation.changed else "Nobody had it."
        self.answer(options, IncidentMutationSerializer(mutation), [line])

    def resolve(self, options: dict[str, Any], operator: Operator) -> None:
        """Close an incident."""
        mutation = services.resolve_incident(
            incident_id=incident_id(options["incident"]),
            by=operator,
            key=key_of(options),
            code=options["code"],
            summary=options["summary"],
            unrepaired=options["unrepaired"],
        )
        line = f"It is resolved{'' if mutation.changed else ' already'}."
        self.answer(options, IncidentMutationSerializer(mutation), [line])

    def retry(self, options: dict[str, Any], operator: Operator) -> None:
        """Run jobs of an incident again."""
        mutation = retry_incident(
            incident_id=incident_id(options["incident"]),
            by=operator,
            key=key_of(options),
            letter_ids=options["letters"],
            expected_count=options["all"],
            provider_checked=options["provider_checked"],
            run_expired=options["run_expired"],
            reason=options["reason"],
            reference=options["reference"],
        )
        refused = [result for result in mutation.results if result.status == "refused"]
        lines = [
            f"{mutation.planned} planned, {mutation.refused} refused.",
            *(f"{result.letter_id}  {result.code}: {result.detail}" for result in refused),
        ]
        self.answer(options, BatchMutationSerializer(mutation), lines)


def add_retry_arguments(parser: ArgumentParser) -> None:
    """Add what every retry can be told."""
    parser.add_argument("--provider-checked", action="store_true", help="you looked: it has not happened")
    parser.add_argument("--run-expired", action="store_true", help="run it although its time is over")
    parser.add_argument("--reason", default="")
    parser.add_argument("--reference", default="", help="where that was seen")


def _add_incident(parser: ArgumentParser) -> None:
    parser.add_argument("incident", type=incident_ref, help="INC-0012, #12 or its id")


def _describe(incident: Incident, policy: TaskPolicySpec) -> list[str]:
    return facts(
        (
            ("incident", f"#{incident.number} {incident.title}"),
            ("id", incident.id),
            ("state", incident.state),
            ("severity", Severity(incident.severity).label),
            ("tenant", incident.tenant),
            ("source", incident.source),
            ("team", policy.team),
            ("runbook", policy.runbook),
            ("holder", incident.acknowledged_by_name),
            ("unrepaired", f"{incident.unresolved_count} of {incident.letter_count} jobs"),
            ("failures", incident.occurrence_count),
            ("first seen", incident.first_seen_at),
            ("last seen", incident.last_seen_at),
            ("resolution", incident.resolution_summary),
        )
    )
