"""Audit, permissions and API tokens in the console."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils import timezone

from grants import services
from grants.access import can
from grants.actions import Action
from grants.errors import AccessDenied, PrincipalNotFound
from grants.models import (
    ID_LENGTH,
    NAME_LENGTH,
    REASON_LENGTH,
    SCOPE_FIELDS,
    ApiToken,
    AuditEvent,
    ScopeUserGrant,
    Verdict,
)
from grants.operators import Operator, OperatorKind
from grants.pages import Confirmation, OperatorAdmin, Section, held_by, operator_of, posted_key, require_readable
from grants.principals import user_named
from grants.reading import audit_reading_of_trail
from grants.resources import ANY, Resource
from grants.selectors import (
    HeldGrant,
    explain_to,
    grant_visible_to,
    grants_visible_to,
    manages_everything,
    principal_to_manage,
)
from grants.service import record_denial
from grants.targets import NOWHERE
from grants.words import MAY, audit_words, begun, target_words
from opsconsole.core.admin import (
    CONFIGURATION,
    Cell,
    ChoiceFilter,
    KeysetChangeList,
    TextFilter,
    again,
    keyset_page,
    when,
)
from opsconsole.core.csv_rows import csv_lines
from opsconsole.core.errors import OpsError

DEFAULT_LENGTH = timedelta(days=7)
LONGEST_OUTCOME = 20_000
MOST_COLUMNS = 8
"""Tenants that the table of somebody's permissions has room for; the question can name another one."""
TARGET_PAGES = {
    "dead_letter": "admin:ops_deadletters_deadletter_page",
    "incident": "admin:ops_incidents_incident_page",
    "repair_action": "admin:ops_repairs_repairaction_page",
}
"""Pages of the apps above, which this one knows by name alone."""
EXPORTED_AT_ONCE = 1_000
MOST_EXPORTED = 100_000
"""Rows of one file: as many as are sent before a server takes the worker for dead."""


# -- audit -------------------------------------------------------------------------------------------------------------


class WhoFilter(ChoiceFilter):
    """People by default; what the machinery writes for every failure would bury what they did."""

    title = "who"
    parameter_name = "who"
    default = "people"
    all_label = "People and machines"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the kinds."""
        return [("people", "People"), ("machines", "Machines")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the rows of that kind."""
        if self.value() == "people":
            return queryset.filter(~Q(operator_kind=OperatorKind.SYSTEM.value))
        return queryset.filter(operator_kind=OperatorKind.SYSTEM.value) if self.value() else queryset


class VerdictFilter(ChoiceFilter):
    """Done or refused."""

    title = "verdict"
    parameter_name = "verdict"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the two."""
        return [(verdict.value, verdict.label) for verdict in Verdict]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the rows with that verdict."""
        return queryset.filter(verdict=self.value()) if self.value() else queryset


class AuditTenantFilter(TextFilter):
    title = "tenant"
    parameter_name = "tenant"


class AuditActionFilter(TextFilter):
    title = "action"
    parameter_name = "action"


class AuditOperatorFilter(TextFilter):
    title = "operator"
    parameter_name = "operator_name"


class AuditEventAdmin(OperatorAdmin):
    """Who did what, and who was refused: read only, newest first."""

    slug = "audit"
    menu_label = list_title = "Audit"
    menu_order = 60
    action = Action.AUDIT_READ
    list_note = "Newest first. Rows are never changed or removed."
    keyset = ("-at", "-id")
    columns = ("when", "who", "what", "verdict", "tenant", "target", "reason")
    list_filter = (WhoFilter, VerdictFilter, AuditTenantFilter, AuditActionFilter, AuditOperatorFilter)
    pages = (("csv", "csv/", "csv_view"), ("page", "<uuid:object_id>/", "page_view"))

    @admin.display(description="When (UTC)")
    def when(self, row: AuditEvent) -> str:
        return when(row.at)

    @admin.display(description="Who")
    def who(self, row: AuditEvent) -> str:
        return f"{row.operator_name} ({row.operator_kind})"

    @admin.display(description="Action")
    def what(self, row: AuditEvent) -> Cell:
        return Cell(main=begun(audit_words(row.action, row.verdict)), second=row.action)

    @admin.display(description="Verdict")
    def verdict(self, row: AuditEvent) -> str:
        return str(row.verdict)

    @admin.display(description="Tenant")
    def tenant(self, row: AuditEvent) -> str:
        return row.tenant

    @admin.display(description="On")
    def target(self, row: AuditEvent) -> Cell:
        return Cell(main=f"{target_words(row.target_type)} {row.target_id}".strip(), url=self.target_url(row))

    @admin.display(description="Reason")
    def reason(self, row: AuditEvent) -> str:
        return row.reason

    def target_url(self, row: AuditEvent) -> str:
        """Return the address of the page of what it was done to, "" if it has none; that page asks its own grants."""
        name = TARGET_PAGES.get(row.target_type)
        try:
            return reverse(name, args=[UUID(row.target_id)], current_app=self.admin_site.name) if name else ""
        except (ValueError, NoReverseMatch):
            return ""

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the visible rows without their outcomes, which are long."""
        return super().get_queryset(request).defer("outcome", "capability")

    def show_list(self, request: HttpRequest) -> HttpResponse:
        """Answer with the list, once it is written down who reads it (B3)."""
        audit_reading_of_trail(operator_of(request))
        return super().show_list(request)

    def list_links(self, request: HttpRequest, cl: KeysetChangeList) -> list[tuple[str, str]]:  # noqa: ARG002
        """Offer the list as CSV."""
        return [("Take away as CSV", f"{self.url('csv')}{cl.get_query_string()}")]

    def csv_view(self, request: HttpRequest) -> HttpResponseBase:
        """Answer with the list as CSV, the same filters applied, once it is written down who takes it (B3).

        Read page by page while it is sent. Nothing is left out unsaid: what is over the limit is named in a last line.
        """
        self.require_list(request)
        cl: Any = self.get_changelist_instance(request)
        audit_reading_of_trail(operator_of(request), how="csv")
        rows: QuerySet[AuditEvent] = cl.queryset
        response = StreamingHttpResponse(csv_lines(_export(rows)), content_type="text/csv; charset=utf-8")
        response.headers["Content-Disposition"] = f'attachment; filename="audit-{timezone.now():%Y%m%dT%H%M%SZ}.csv"'
        return response

    def page_view(self, request: HttpRequest, object_id: UUID) -> HttpResponse:
        """Answer with one row, every column of it."""
        event = AuditEvent.objects.filter(id=object_id).first()
        scope = None
        if event is not None:
            scope = Resource(
                tenant=event.tenant,
                actor_type=event.actor_type,
                actor_id=event.actor_id,
                target_type="audit_event",
                target_id=str(event.id),
            )
        require_readable(request, Action.AUDIT_READ, scope)
        if event is None:
            raise Http404
        audit_reading_of_trail(operator_of(request), event.tenant)
        facts = [
            (field.verbose_name, getattr(event, field.attname))
            for field in AuditEvent._meta.concrete_fields
            if field.attname not in ("outcome", "leaf_version", "target_type")
        ]
        facts.insert(0, ("what", f"{event.operator_name} {audit_words(event.action, event.verdict)}"))
        facts.insert(1, ("done to", target_words(event.target_type)))
        context = self.page_context(
            request,
            f"{event.operator_name} {audit_words(event.action, event.verdict)}",
            event=event,
            target_url=self.target_url(event),
            facts=[(name, when(value) if hasattr(value, "isoformat") else value) for name, value in facts],
            outcome=_indented(event.outcome),
        )
        return TemplateResponse(request, "ops/audit_event.html", context)


def _export(rows: QuerySet[AuditEvent]) -> Iterator[list[Any]]:
    names = [field.attname for field in AuditEvent._meta.concrete_fields]
    yield names
    cursor, left = "", MOST_EXPORTED
    while left > 0:
        page = keyset_page(rows.defer(None), AuditEventAdmin.keyset, cursor, min(EXPORTED_AT_ONCE, left))
        yield from ([getattr(row, name) for name in names] for row in page.rows)
        left -= len(page.rows)
        if page.next is None:
            return
        cursor = page.next
    yield [f"Only the newest {MOST_EXPORTED:,} rows: there are more with these filters."]


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text


# -- permissions -------------------------------------------------------------------------------------------------------


class EndField(forms.DateTimeField):
    """A time in UTC, as a browser's field sends it, whatever time zone the project around us lives in."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            input_formats=["%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S"],
            widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
            **kwargs,
        )

    def prepare_value(self, value: Any) -> Any:
        """Return the time as it is to be shown: in UTC, as the label says."""
        with timezone.override(UTC):
            return super().prepare_value(value)

    def to_python(self, value: Any) -> datetime | None:
        """Return what was typed as a time in UTC."""
        with timezone.override(UTC):
            moment: datetime | None = super().to_python(value)
        try:
            return moment.astimezone(UTC) if moment is not None else None
        except OverflowError:  # the first or the last day there is, typed with a zone
            raise ValidationError(self.error_messages["invalid"], code="invalid") from None


def _end_from_now() -> Any:
    return (timezone.now() + DEFAULT_LENGTH).replace(second=0, microsecond=0)


def _choices(actions: Collection[Action] | type[Action]) -> list[tuple[str, str]]:
    """Return permissions to choose from, each with what it allows."""
    return [(one.value, f"{begun(MAY[one])} ({one.value})") for one in Action if one in actions]


class GrantForm(forms.Form):
    """One permission for one user or one group."""

    user = forms.CharField(required=False, max_length=NAME_LENGTH, label="User", help_text="the name they sign in with")
    group = forms.CharField(required=False, max_length=NAME_LENGTH, label="or group", help_text="one of the two")
    action = forms.ChoiceField(label="May", help_text="only what you hold yourself can be given")
    tenant = forms.CharField(max_length=NAME_LENGTH, label="On tenant", help_text="a name, or * for every tenant")
    actor_type = forms.CharField(max_length=NAME_LENGTH, initial=ANY, label="Actor type", help_text="* for any")
    actor_id = forms.CharField(max_length=ID_LENGTH, initial=ANY, label="Actor id", help_text="* for any")
    command_id = forms.CharField(max_length=ID_LENGTH, initial=ANY, label="Command id", help_text="* for any")
    expires_at = EndField(initial=_end_from_now, label="Until (UTC)", help_text="not after your own permission ends")
    reason = forms.CharField(max_length=REASON_LENGTH, label="Reason", help_text="kept with the permission")

    def __init__(self, *args: Any, actions: Any = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field: Any = self.fields["action"]
        field.choices = [("", "Choose…"), *_choices(actions)]

    def clean(self) -> dict[str, Any]:
        """Refuse two names, and none; who they are is asked only once it is clear that the asker may know."""
        found = super().clean() or {}
        if bool(found.get("user")) == bool(found.get("group")):
            self.add_error("user", "Name a user or a group, one of the two.")
        return found


class RevokeForm(forms.Form):
    """Why a permission is taken back."""

    reason = forms.CharField(max_length=REASON_LENGTH, label="Reason", help_text="required, kept in the audit trail")


class ExplainForm(forms.Form):
    """A question about somebody's permissions; asking changes nothing."""

    user = forms.CharField(max_length=NAME_LENGTH, label="May")
    action = forms.ChoiceField(required=False, choices=[("", "…"), *_choices(Action)], label="do")
    tenant = forms.CharField(required=False, max_length=NAME_LENGTH, label="on tenant")
    actor_type = forms.CharField(required=False, max_length=NAME_LENGTH, label="actor type")
    actor_id = forms.CharField(required=False, max_length=ID_LENGTH, label="actor id")
    command_id = forms.CharField(required=False, max_length=ID_LENGTH, label="command id")


class GrantAdmin(OperatorAdmin):
    """Who may do what: given, explained and taken back through this app's services; everyone sees their own."""

    slug = "permissions"
    menu_label = list_title = "Permissions"
    menu_group = CONFIGURATION
    menu_order = 70
    action = Action.GRANTS_MANAGE
    pages = (
        ("give", "give/", "give_view"),
        ("explain", "explain/", "explain_view"),
        ("revoke", "<str:grant_id>/take-back/", "revoke_view"),
    )

    def has_module_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        """Everyone may see what they hold."""
        return True

    def show_list(self, request: HttpRequest) -> HttpResponse:
        """Answer with the permissions that this operator manages, and their own."""
        manages = Action.GRANTS_MANAGE in held_by(request)
        rows = [
            {"grant": one, "revoke_url": self.url("revoke", one.id) if manages else ""}
            for one in grants_visible_to(operator_of(request))
        ]
        context = self.page_context(
            request,
            self.list_title,
            rows=rows,
            manages=manages,
            give_url=self.url("give"),
            explain_url=self.url("explain"),
            limit=1_000,
        )
        return TemplateResponse(request, "ops/grants.html", {**context, "crumbs": []})

    def give_view(self, request: HttpRequest) -> HttpResponse:
        """Give a permission."""
        self.require_held(request)
        by = operator_of(request)
        actions = held_by(request)
        if request.method != "POST":
            initial = {"user": request.GET.get("user", "")}
            return self.confirm(request, self.giving(GrantForm(actions=actions, initial=initial)))
        form = GrantForm(request.POST, actions=actions)
        key = request.POST.get("idempotency_key", "")
        if not form.is_valid():
            return self.confirm(request, self.giving(form, key), status=400)
        values = {**form.cleaned_data, "action": Action(form.cleaned_data["action"])}
        username, groupname = values.pop("user") or None, values.pop("group") or None
        resource = Resource(**{field: values[field] for field in SCOPE_FIELDS})
        try:
            user, group = principal_to_manage(by, resource, username=username, group=groupname)
            receipt = services.grant(by=by, key=posted_key(request), user=user, group=group, **values)
        except PrincipalNotFound as refusal:
            form.add_error("user" if username else "group", refusal.detail)
            return self.confirm(request, self.giving(form, key), status=400)
        except AccessDenied:
            form.add_error(None, "You do not hold this on that tenant and scope yourself, so you can't give it.")
            return self.confirm(request, self.giving(form, key), status=403)
        except OpsError as refusal:
            return self.confirm(request, self.giving(form, key), refusal=refusal)
        messages.success(request, f"{receipt.action} is given as {receipt.grant_id}{again(receipt.is_replay)}")
        return HttpResponseRedirect(self.url("changelist"))

    def giving(self, form: GrantForm, key: str = "") -> Confirmation:
        """Return the form for a new permission."""
        text = "Only what you hold, never to yourself, always with a reason and an end."
        return Confirmation(
            title="Give a permission",
            submit="Give it",
            cancel_url=self.url("changelist"),
            form=form,
            sections=[Section(heading="What can be given", text=text)],
            key=key,
        )

    def revoke_view(self, request: HttpRequest, grant_id: str) -> HttpResponse:
        """Take a permission back."""
        by = operator_of(request)
        found = grant_visible_to(by, grant_id)
        form = RevokeForm(request.POST or None)
        key = request.POST.get("idempotency_key", "")
        if request.method == "POST" and form.is_valid():
            try:
                receipt = services.revoke(
                    by=by, grant_id=grant_id, reason=form.cleaned_data["reason"], key=posted_key(request)
                )
            except OpsError as refusal:
                if refusal.status in (401, 403, 404) or found is None:
                    raise
                return self.confirm(request, self.revoking(found, form, key), refusal=refusal)
            text = f"{receipt.action} ({receipt.grant_id}) is taken back{again(receipt.is_replay)}"
            messages.success(request, text)
            return HttpResponseRedirect(self.url("changelist"))
        if found is None:
            asked = replace(NOWHERE, target_type="grant", target_id=grant_id[:ID_LENGTH])
            if not can(by, Action.GRANTS_MANAGE, asked):
                record_denial(by, Action.GRANTS_MANAGE, asked)
            raise Http404
        return self.confirm(request, self.revoking(found, form, key), status=400 if request.method == "POST" else 200)

    def revoking(self, found: HeldGrant, form: RevokeForm, key: str = "") -> Confirmation:
        """Return the confirmation of taking back one permission."""
        return Confirmation(
            title=f"Take {found.action} back from {found.holder}?",
            submit="Take it back",
            cancel_url=self.url("changelist"),
            is_danger=True,
            form=form,
            sections=[
                Section(
                    heading=f"{found.holder} can do this no longer, from the next request on",
                    tone="bad",
                    text=(
                        f"{found.action} on tenant {found.tenant}, actor type {found.actor_type}, actor id "
                        f"{found.actor_id}, command id {found.command_id}. Given by {found.granted_by_name}: "
                        f"{found.reason}"
                    ),
                )
            ],
            key=key,
        )

    def explain_view(self, request: HttpRequest) -> HttpResponse:
        """Answer what one person may do, and why or why not."""
        by = operator_of(request)
        form = ExplainForm(dict(request.GET.items()) or {"user": by.name})
        is_valid = form.is_valid()  # not: is answered, which says who exists
        found = self.explained(by, form) if is_valid else {}
        status = 200 if is_valid else 400
        context = self.page_context(request, "What may this person do?", form=form, **found)
        return TemplateResponse(request, "ops/explain.html", context, status=status)

    def explained(self, by: Operator, form: ExplainForm) -> dict[str, Any]:
        """Return the answer to a valid question, and the permissions of that person, as far as the asker may know."""
        values = dict(form.cleaned_data)
        username, action = values.pop("user"), values.pop("action")
        answer = None
        try:
            if action and values["tenant"]:
                answer = explain_to(by, Action(action), Resource(**values), username=username)
            user = user_named(username)
        except PrincipalNotFound:
            user = None
        is_self = user is not None and user.pk == by.user_id
        held = grants_visible_to(by, user=user) if user is not None else []
        # Whether a name exists is told to who manages something of theirs, and to nobody else.
        if user is None or not (is_self or held or answer or manages_everything(by)):
            form.add_error("user", "There is no such user, or you manage none of their permissions.")
            return {}
        # A "no" is true only for who sees every permission of that person.
        sees_all = is_self or manages_everything(by)
        matrix = by_action_and_tenant(held, values["tenant"]) if sees_all else None
        return {"answer": answer, "held": held, "person": username, "is_self": is_self, "matrix": matrix}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What somebody may do, as a table: a row for each action, a cell for each tenant.

    A cell is (tenant; yes, part or no; what the part is limited to). ``more`` tenants have no column.
    """

    tenants: list[str]
    more: int
    rows: list[tuple[str, list[tuple[str, str, str]]]]


def by_action_and_tenant(held: Sequence[HeldGrant], asked: str) -> Matrix | None:
    """Return the table of the live grants, for the tenant that was asked about or else for the first few tenants."""
    live = [one for one in held if one.is_live]
    tenants = [asked] if asked else sorted({one.tenant for one in live})
    if not live:
        return None
    shown = tenants[:MOST_COLUMNS]
    rows = [
        (action, [_allowed_on([one for one in live if one.action == action], tenant) for tenant in shown])
        for action in sorted({one.action for one in live} | {action.value for action in Action})
    ]
    return Matrix(tenants=shown, more=len(tenants) - len(shown), rows=rows)


def _allowed_on(grants: Sequence[HeldGrant], tenant: str) -> tuple[str, str, str]:
    name = "every tenant" if tenant == ANY else tenant
    limits = [
        " ".join(part for part in (one.actor_type, one.actor_id, one.command_id) if part != ANY)
        for one in grants
        if one.tenant in (tenant, ANY)
    ]
    if not limits:
        return name, "no", ""
    return (name, "yes", "") if "" in limits else (name, "part", ", ".join(limits[:3]))


# -- tokens ------------------------------------------------------------------------------------------------------------


class TokenForm(forms.Form):
    """An API token: some of what its owner may do, for a while."""

    name = forms.CharField(max_length=NAME_LENGTH, label="Name", help_text="what it is for")
    actions = forms.MultipleChoiceField(widget=forms.CheckboxSelectMultiple, label="It may")
    tenant = forms.CharField(max_length=NAME_LENGTH, label="On tenant", help_text="a name, or * for all of yours")
    expires_at = EndField(initial=_end_from_now, label="Until (UTC)")

    def __init__(self, *args: Any, held: Any = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field: Any = self.fields["actions"]
        field.choices = _choices(held)


class TokenAdmin(OperatorAdmin):
    """One's own API tokens: made, shown once, revoked."""

    slug = "tokens"
    menu_label = list_title = "API tokens"
    menu_group = CONFIGURATION
    menu_order = 80
    pages = (("create", "new/", "create_view"), ("revoke", "<uuid:public_id>/revoke/", "revoke_view"))

    def has_module_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        """Everyone may make tokens of what they hold."""
        return True

    def show_list(self, request: HttpRequest) -> HttpResponse:
        """Answer with the operator's own tokens."""
        tokens = ApiToken.objects.filter(user_id=operator_of(request).user_id).order_by("-created", "-public_id")[:200]
        now = timezone.now()
        rows = [
            {"token": one, "is_live": one.expiry > now, "revoke_url": self.url("revoke", one.public_id)}
            for one in tokens
        ]
        context = self.page_context(request, self.list_title, rows=rows, create_url=self.url("create"))
        return TemplateResponse(request, "ops/tokens.html", {**context, "crumbs": []})

    def create_view(self, request: HttpRequest) -> HttpResponse:
        """Make a token; the answer to the POST is the only page that ever shows it."""
        held = held_by(request)
        if request.method != "POST":
            return self.confirm(request, self.creating(TokenForm(held=held)))
        form = TokenForm(request.POST, held=held)
        key = request.POST.get("idempotency_key", "")
        if not form.is_valid():
            return self.confirm(request, self.creating(form, key), status=400)
        values = form.cleaned_data
        try:
            receipt = services.create_token(
                by=operator_of(request),
                name=values["name"],
                actions=[Action(one) for one in values["actions"]],
                tenant=values["tenant"],
                expires_at=values["expires_at"],
                key=posted_key(request),
            )
        except OpsError as refusal:
            return self.confirm(request, self.creating(form, key), refusal=refusal)
        context = self.page_context(request, "Your new API token", receipt=receipt, list_url=self.url("changelist"))
        return TemplateResponse(request, "ops/token_made.html", context)

    def creating(self, form: TokenForm, key: str = "") -> Confirmation:
        """Return the form for a new token."""
        text = "It can never do more than you can, and ends when your own permission does. It is shown once."
        return Confirmation(
            title="Make an API token",
            submit="Make it",
            cancel_url=self.url("changelist"),
            form=form,
            sections=[Section(heading="A token acts with part of your permissions", text=text)],
            key=key,
        )

    def revoke_view(self, request: HttpRequest, public_id: UUID) -> HttpResponse:
        """Revoke one of one's own tokens."""
        by = operator_of(request)
        token = ApiToken.objects.filter(public_id=public_id, user_id=by.user_id).first()
        if request.method == "POST":
            receipt = services.revoke_token(by=by, public_id=public_id, key=posted_key(request))
            messages.success(request, f"The token {receipt.name} is revoked{again(receipt.is_replay)}")
            return HttpResponseRedirect(self.url("changelist"))
        if token is None:
            raise Http404
        text = "Whatever still uses it is refused from its next request on."
        return self.confirm(
            request,
            Confirmation(
                title=f"Revoke the token {token.name}?",
                submit="Revoke it",
                cancel_url=self.url("changelist"),
                is_danger=True,
                sections=[Section(heading="It stops at once", tone="bad", text=text)],
            ),
        )


ADMINS: dict[Any, Any] = {AuditEvent: AuditEventAdmin, ScopeUserGrant: GrantAdmin, ApiToken: TokenAdmin}
"""What the console registers; nothing is registered on Django's default site."""
