"""Holds in the console: placing one, watching what it puts aside, moving its end, ending it, and sending on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from deadletters.errors import HoldNotFound, PayloadNotKnown
from deadletters.holds import count_held, find_hold, hold_events, incidents_of_hold, letter_to_hold, payload_hash_of
from deadletters.models import Hold, HoldState
from deadletters.services import LONGEST_HOLD, HoldTarget, end_hold, extend_hold, place_hold
from grants.actions import Action
from grants.pages import (
    Confirmation,
    OperatorAdmin,
    Section,
    allowed,
    held_by,
    operator_of,
    posted_ids,
    posted_key,
    require,
    require_readable,
)
from grants.resources import ANY
from grants.words import DID
from incidents.admin import Button, Buttons, TenantFilter, incident_name, posted_number
from opsconsole.core.admin import Cell, ChoiceFilter, Pill, again, capped, thousands
from opsconsole.core.database import database_now
from opsconsole.core.errors import OpsError
from repairs.admin.redrive_forms import PaceForm
from repairs.admin.redrive_words import jobs_words
from repairs.admin.words import ReasonForm, incident_url
from repairs.redrives.requests import RedrivePace
from repairs.releases import release_hold

STATE_PILLS = {
    HoldState.ACTIVE: ("On hold", "warn"),
    HoldState.ENDED: ("Ended", "grey"),
    HoldState.EXPIRED: ("Expired", "grey"),
}
SPANS = (
    ("900", "15 minutes"), ("3600", "1 hour"), ("14400", "4 hours"), ("43200", "12 hours"), ("86400", "1 day"),
    ("259200", "3 days"), (str(int(LONGEST_HOLD.total_seconds())), "7 days"),
)  # fmt: skip
MOST_COUNTED = 100_000
EVENTS_SHOWN = 50
LOOKS_AGAIN_SECONDS = 3
FORM_SECONDS = 600
GOES_ON = " The hold goes on: end it if new jobs are to run at once."


class HoldStateFilter(ChoiceFilter):
    """By whether it still holds."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the states."""
        return [(state.value, words) for state, (words, _tone) in STATE_PILLS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the holds in that state."""
        return queryset.filter(state=self.value()) if self.value() else queryset


class SpanForm(ReasonForm):
    """For how long, and why."""

    ends_in = forms.ChoiceField(
        label="For", choices=SPANS, initial="3600", help_text="it ends by itself; what it has put aside stays aside"
    )

    field_order: Iterable[str] | None = ("ends_in", "reason")

    def span(self) -> timedelta:
        """Return for how long from now."""
        return timedelta(seconds=int(self.cleaned_data["ends_in"]))


class PlaceForm(SpanForm):
    """What is put aside: jobs in which every named part is the same."""

    tenant = forms.CharField(max_length=100, initial="default", help_text="* = of every tenant")
    source = forms.CharField(max_length=100, initial=ANY, help_text="environment and service; * = every one")
    job_type = forms.CharField(label="Task", required=False, max_length=255)
    queue = forms.CharField(label="Queue", required=False, max_length=200)
    task_id = forms.CharField(label="Task id", required=False, max_length=255)
    payload_hash = forms.CharField(
        label="Hash of the arguments", required=False, max_length=64, help_text="only together with the task"
    )

    field_order = ("job_type", "queue", "task_id", "payload_hash", "tenant", "source", "ends_in", "reason")
    NAMED = ("tenant", "source", "job_type", "queue", "task_id", "payload_hash")

    def target(self) -> HoldTarget:
        """Return what was named."""
        return HoldTarget(**{name: self.cleaned_data[name] for name in self.NAMED})


class HoldAdmin(OperatorAdmin):
    """The list of holds, a page for each, and every decision about one."""

    slug = "holds"
    menu_label = list_title = "Holds"
    menu_order = 32
    list_note = "What keeps jobs from running while something is broken. Newest first."
    keyset = ("-placed_at", "-id")
    columns = ("what", "state", "put_aside", "tenant", "until", "by")
    column_classes: ClassVar[Mapping[str, str]] = {
        "what": "ops-wide", "state": "ops-bare", "put_aside": "ops-num", "until": "ops-nowrap",
    }  # fmt: skip
    list_filter = (HoldStateFilter, TenantFilter)
    pages = (
        ("place", "place/", "place_view"),
        ("page", "<uuid:object_id>/", "page_view"),
        ("extend", "<uuid:object_id>/extend/", "extend_view"),
        ("end", "<uuid:object_id>/end/", "end_view"),
        ("release", "<uuid:object_id>/release/", "release_view"),
    )

    # -- list ----------------------------------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the holds that this operator may know of: a hold of every tenant concerns theirs, too."""
        return Hold.objects.seen_by(operator_of(request))

    @admin.display(description="Hold")
    def what(self, row: Hold) -> Cell:
        return Cell(main=row.words, second=row.reason)

    @admin.display(description="State")
    def state(self, row: Hold) -> Cell:
        text, kind = STATE_PILLS[HoldState(row.state)]
        return Cell(pills=[Pill(text=text, kind=kind)])

    @admin.display(description="Put aside")
    def put_aside(self, row: Any) -> str:
        return "–" if row.put_aside is None else thousands(row.put_aside)

    @admin.display(description="Tenant")
    def tenant(self, row: Hold) -> str:
        return "every one" if row.tenant == ANY else row.tenant

    @admin.display(description="Until")
    def until(self, row: Hold) -> Cell:
        return Cell(at=row.ended_at or row.ends_at)

    @admin.display(description="By")
    def by(self, row: Hold) -> str:
        return row.placed_by_name or row.placed_by

    def list_links(self, request: HttpRequest, cl: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the button that places one, for who may anywhere."""
        return [("Hold…", self.url("place"))] if Action.DEAD_LETTERS_HOLD in held_by(request) else []

    # -- page ----------------------------------------------------------------------------------------------------------

    def visible(self, request: HttpRequest, hold_id: UUID) -> Hold:
        """Return a hold that this operator may know of; raises ``Http404``, audited."""
        scope = Hold.objects.scope(hold_id)
        if scope is not None and scope.tenant == ANY:
            self.require_held(request)
            return find_hold(operator_of(request), hold_id)
        require_readable(request, Action.INSPECT, scope)
        found: Hold = Hold.objects.told_whole().get(id=hold_id)
        return found

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with one hold: what it holds, how much it has put aside, and what was done about it."""
        hold = self.visible(request, object_id)
        words, tone = STATE_PILLS[HoldState(hold.state)]
        waiting = count_held(hold, MOST_COUNTED, seen_by=operator_of(request))
        site = self.admin_site.name
        context = self.page_context(
            request,
            f"Hold of {hold.words}",
            hold=hold,
            state=words,
            tone=tone,
            waiting=capped(waiting, MOST_COUNTED),
            incidents=[
                (incident_url(one.id, site=site), incident_name(one), one)
                for one in incidents_of_hold(operator_of(request), hold)
            ],
            events=[(one, DID.get(one.action, one.action)) for one in hold_events(hold.id)[:EVENTS_SHOWN]],
            buttons=self.buttons(request, hold, waiting),
            renew=LOOKS_AGAIN_SECONDS if hold.state == HoldState.ACTIVE else 0,
            renew_until="while it holds",
        )
        return TemplateResponse(request, "ops/hold.html", context)

    def buttons(self, request: HttpRequest, hold: Hold, waiting: int) -> Buttons:
        """Return what may be done about a hold; the primary one is the next step."""
        buttons = Buttons()
        steps = []
        is_active = hold.state == HoldState.ACTIVE
        if is_active:
            steps += [("End it…", "end", True), ("Move its end…", "extend", False)]
        if waiting:
            count = capped(waiting, MOST_COUNTED)
            steps.append((f"Send on {count}…", "release", not is_active))
        if not steps:
            return buttons
        may = allowed(request, hold.resource, [Action.DEAD_LETTERS_HOLD])
        if Action.DEAD_LETTERS_HOLD not in may:
            verbs = " and ".join(label.rstrip("…") for label, _page, _is_primary in steps)
            buttons.missing = may.missing({Action.DEAD_LETTERS_HOLD: verbs})
            return buttons
        buttons.bar = [
            Button(label=label, url=self.url(page, hold.id), is_primary=is_primary) for label, page, is_primary in steps
        ]
        return buttons

    # -- placing -------------------------------------------------------------------------------------------------------

    def place_view(self, request: HttpRequest) -> HttpResponse:
        """Ask what is put aside and for how long, and do it. What an address names is filled in."""
        by = operator_of(request)
        if Action.DEAD_LETTERS_HOLD not in held_by(request):
            self.refuse_page(request, Action.DEAD_LETTERS_HOLD)
        if request.method != "POST":
            return self.confirm(request, self._placing(PlaceForm(initial=self._named(request))))
        form = PlaceForm(request.POST)
        key = str(request.POST.get("idempotency_key", ""))
        if not form.is_valid():
            return self.confirm(request, self._placing(form, key), status=400)
        try:
            made = place_hold(
                target=form.target(), reason=form.cleaned_data["reason"], by=by, key=posted_key(request),
                ends_at=_end(request, form),
            )  # fmt: skip
        except OpsError as refusal:
            if refusal.status in (401, 404):
                raise
            return self.confirm(request, self._placing(form, key), refusal=refusal)
        text = "Matching jobs are put aside from now on: every live worker knows within ten seconds"
        messages.success(request, f"{text}{again(made.idempotent_replay)}")
        return HttpResponseRedirect(self.url("page", made.hold_id))

    def _named(self, request: HttpRequest) -> dict[str, str]:
        """Return what the address names; ``like`` is a failed job, whose task and arguments are meant."""
        named = {name: request.GET[name] for name in PlaceForm.NAMED if name in request.GET}
        if "like" not in request.GET:
            return named
        ids, _bad = posted_ids([request.GET["like"]])
        if not ids:
            raise PayloadNotKnown
        letter = letter_to_hold(operator_of(request), ids[0])
        found = {"tenant": letter.tenant, "source": letter.source, "job_type": letter.job_type}
        return found | named | {"payload_hash": payload_hash_of(letter) or ""}

    def _placing(self, form: PlaceForm, key: str = "") -> Confirmation:
        return Confirmation(
            title="Put jobs aside before they run?",
            submit="Hold them",
            cancel_url=self.url("changelist"),
            sections=[
                Section(
                    heading="Nothing that matches starts, and nothing is lost",
                    tone="warn",
                    text="Matching messages are kept as they are, in their order, on every worker. What runs already"
                    " runs on. Sending them on is a redrive, with a dry run and a pace.",
                )
            ],
            form=form,
            hidden=_asked_now(),
            key=key,
        )

    # -- deciding ------------------------------------------------------------------------------------------------------

    def decide(self, request: HttpRequest, object_id: UUID, **steps: Any) -> HttpResponse:
        """Ask about one hold and do it; ``steps`` as ``ask_and_do`` takes them."""

        def may(hold: Hold) -> None:
            require(operator_of(request), Action.DEAD_LETTERS_HOLD, hold.resource, HoldNotFound())

        return self.ask_and_do(request, find=lambda: self.visible(request, object_id), may=may, **steps)

    def extend_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Move its end, forth or back."""
        by = operator_of(request)

        def ask(hold: Hold, form: forms.Form, key: str) -> Confirmation:
            return self._about(
                hold, form, key, title=f"Move the end of the hold of {hold.words}?", submit="Move its end",
                heading="From now on for", text="What it has put aside stays aside in any case.",
            )  # fmt: skip

        return self.decide(
            request, object_id, ask=ask, form=lambda _hold, data: SpanForm(data),
            act=lambda form, key: extend_hold(
                hold_id=object_id, ends_at=_end(request, form), reason=form.cleaned_data["reason"], by=by, key=key
            ),
            tell=lambda _made: ("The end of the hold is moved", self.url("page", object_id)),
        )  # fmt: skip

    def end_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Stop holding."""
        by = operator_of(request)

        def ask(hold: Hold, form: forms.Form, key: str) -> Confirmation:
            return self._about(
                hold, form, key, title=f"End the hold of {hold.words}?", submit="End it",
                heading="New jobs run again within ten seconds",
                text="What it has put aside stays aside until you send it on.",
            )  # fmt: skip

        return self.decide(
            request, object_id, ask=ask, form=lambda _hold, data: ReasonForm(data),
            act=lambda form, key: end_hold(hold_id=object_id, reason=form.cleaned_data["reason"], by=by, key=key),
            tell=lambda _made: ("The hold is ended", self.url("page", object_id)),
        )  # fmt: skip

    def _about(
        self, hold: Hold, form: forms.Form, key: str, *, title: str, submit: str, heading: str, text: str
    ) -> Confirmation:
        is_active = hold.state == HoldState.ACTIVE
        section = Section(heading=heading, tone="warn", text=text)
        if not is_active:
            section = Section(heading=f"It holds no more: {STATE_PILLS[HoldState(hold.state)][0].lower()}", tone="grey")
        return Confirmation(
            title=title,
            submit=submit if is_active else "",
            cancel_url=self.url("page", hold.id),
            sections=[section],
            form=form if is_active else None,
            hidden=_asked_now(),
            key=key,
        )

    def release_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Freeze what it has put aside as a redrive."""
        by = operator_of(request)

        def ask(hold: Hold, form: forms.Form, key: str) -> Confirmation:
            count = count_held(hold, MOST_COUNTED)
            is_exact = count <= MOST_COUNTED
            section = Section(
                heading="First a dry run: nothing is sent yet",
                text="They are frozen as a redrive, in the order in which they came; you look at it and start it."
                + (GOES_ON if hold.state == HoldState.ACTIVE else ""),
            )
            if not count:
                section = Section(heading="Nothing is put aside", tone="grey")
            return Confirmation(
                title=f"Send on what the hold of {hold.words} has put aside?",
                submit=f"Freeze {jobs_words(count) if is_exact else 'all'} and look at them" if count else "",
                cancel_url=self.url("page", object_id),
                sections=[section],
                form=form if count else None,
                hidden={"expected": str(count)} if is_exact else {},
                key=key,
            )

        def tell(made: Any) -> tuple[str, str]:
            text = f"{jobs_words(made.total)} frozen as a redrive; nothing is sent before it is started"
            site = self.admin_site.name
            if len(made.redrives) == 1:
                only = made.redrives[0].redrive_id
                return text, reverse("admin:ops_repairs_redrive_page", args=[only], current_app=site)
            return text, f"{reverse('admin:ops_repairs_redrive_changelist', current_app=site)}?state=unfinished"

        return self.decide(
            request, object_id, ask=ask, tell=tell,
            form=lambda _hold, data: PaceForm(data, initial=asdict(RedrivePace())),
            act=lambda form, key: release_hold(
                hold_id=object_id, by=by, key=key, pace=form.pace(),
                expected_count=posted_number(request.POST.get("expected")),
            ),
        )  # fmt: skip


def _asked_now() -> dict[str, str]:
    """Return when a form is shown, for the form to carry."""
    return {"asked": str(int(database_now().timestamp()))}


def _end(request: HttpRequest, form: SpanForm) -> datetime:
    """Return the end that was chosen, counted from when the form was shown: sent twice, it names the same end (A9).

    A form that was left open counts from now.
    """
    now = database_now()
    asked = posted_number(request.POST.get("asked"))
    if asked is not None and 0 <= now.timestamp() - asked <= FORM_SECONDS:
        now = datetime.fromtimestamp(asked, UTC)
    return now + form.span()
