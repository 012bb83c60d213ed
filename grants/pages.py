"""What every page of the console does with grants: who asks, what they may see, and how a change is confirmed.

No permission of Django is consulted. A page asks the two doors of this app, a refusal is audited where it is found, and
what changes something is shown first and then sent with a key and the version that was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, cast
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, URLResolver, path, reverse

from grants import audit
from grants.access import Access, access_of, actions_on, can
from grants.actions import Action
from grants.errors import AccessDenied
from grants.operators import Operator
from grants.reading import authorise_read_of
from grants.resources import ANY, Resource
from grants.saved_views import delete_view, save_view, saved_views
from grants.selectors import plan_of
from grants.service import record_denial
from grants.sql import Plan
from grants.targets import NOWHERE
from opsconsole.core.admin import CURSOR, KeysetAdmin, KeysetChangeList, again
from opsconsole.core.errors import OpsError
from opsconsole.core.ids import new_id

MOST_SELECTED = 1_000
SAVE_VIEW, DELETE_VIEW = "save_view", "delete_view"
SCOPES_NAMED = 3
LONGEST_ID = 18
"""Digits of a number that every database can compare with a key."""


def operator_of(request: HttpRequest) -> Operator:
    """Return who asks; raises ``NotAnOperator``."""
    found: Operator | None = getattr(request, "_ops_operator", None)
    if found is None:
        found = Operator.from_user(cast(Any, request).user)
        cast(Any, request)._ops_operator = found
    return found


def access_to(request: HttpRequest, resource: Resource) -> Access:
    """Look up what the asking operator may do to ``resource``, and keep it for what else the request asks."""
    found = access_of(operator_of(request), Action.INSPECT, resource)
    cast(Any, request)._ops_access = found
    return found


def access_by(request: HttpRequest) -> Access:
    """Return what this request was told last of the asking operator's grants; asked once, of no resource, for lists."""
    found: Access | None = getattr(request, "_ops_access", None)
    return access_to(request, NOWHERE) if found is None else found


def held_by(request: HttpRequest) -> frozenset[Action]:
    """Return what the asking operator may do to anything at all, for menus."""
    return access_by(request).held


def seen_by(request: HttpRequest, action: Action) -> Plan:
    """Return which rows the asking operator may see by ``action``, for ``visible_to``."""
    return access_by(request).plan if action is Action.INSPECT else plan_of(operator_of(request), action)


def scope_words(plan: Plan) -> str:
    """Return which tenants the rows of a list are from, "" for all: to who sees one, an empty list is no good news."""
    names = sorted(plan.tenants)
    if plan.everything or not (names or plan.shapes):
        return ""
    if not names:
        return "You see parts of tenants only."
    shown = names if len(names) <= SCOPES_NAMED else [*names[:SCOPES_NAMED], f"{len(names) - SCOPES_NAMED:,} more"]
    told = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    noun = "tenant" if len(names) == 1 else "tenants"
    return f"You see {noun} {told}{', and parts of others,' if plan.shapes else ''} only."


require = authorise_read_of
"""What a page asks before it shows how something would be changed: the same as a service, without its transaction."""


def require_readable(request: HttpRequest, action: Action, scope: Resource | None) -> None:
    """Raise ``Http404`` unless ``action`` reads what an opaque id named (None: nothing); a refusal is audited.

    What is not there is asked about like anything else, so that the answer says no more and takes no less time.
    """
    asked = NOWHERE if scope is None else scope
    if action not in access_to(request, asked).on_it:
        record_denial(operator_of(request), action, asked)
        raise Http404
    if scope is None:
        raise Http404


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingGrant:
    """A button that is not there, and why."""

    verb: str
    action: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Which of some actions an operator may do to one resource."""

    actions: frozenset[Action]
    tenant: str

    def __contains__(self, action: Action) -> bool:
        return action in self.actions

    def missing(self, verbs: Mapping[Action, str]) -> list[MissingGrant]:
        """Return one line for each action that is not allowed."""
        return [
            MissingGrant(verb=verb, action=action.value, tenant=self.tenant)
            for action, verb in verbs.items()
            if action not in self.actions
        ]


def allowed(request: HttpRequest, resource: Resource, actions: Iterable[Action]) -> Allowed:
    """Return which of ``actions`` are allowed on ``resource``, for the sake of buttons; nothing is audited.

    Most often the request knows already: only for who may do a thing to a part of a tenant it is asked again.
    """
    listed = tuple(actions)
    found = access_by(request).of(listed, resource)
    if found is None:
        found = actions_on(operator_of(request), listed, resource)
    return Allowed(actions=found, tenant=resource.tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One block of a confirmation: what will happen to some rows, or why nothing will. ``tone`` is a CSS class."""

    heading: str
    tone: str = "plain"  # good, warn, bad, grey or plain
    text: str = ""
    rows: Sequence[tuple[str, str, str]] = ()  # (address or "", name, remark)
    more: int = 0  # rows beyond those listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What is shown before something is changed, and what is sent with the change.

    ``hidden`` travels with the form: what was looked at. ``submit`` says what the button will do; "" = it can't.
    """

    title: str
    submit: str
    cancel_url: str
    sections: Sequence[Section] = ()
    form: forms.Form | None = None
    hidden: Mapping[str, str] = field(default_factory=dict)
    is_danger: bool = False
    note: str = ""
    key: str = ""  # of a form that was filled in wrongly and comes back; else a new one

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", str(new_id()))


def posted_key(request: HttpRequest) -> str:
    """Return the key that the confirmation put into its form; raises ``IdempotencyKeyMissing`` or ``...Invalid``."""
    return audit.validate_key(request.POST.get("idempotency_key"))


def posted_ids(values: Iterable[str]) -> tuple[list[UUID], int]:
    """Return the ids among ``values``, each once and in order, and how many were none."""
    found: dict[UUID, None] = {}
    bad = 0
    for value in values:
        try:
            found[UUID(value)] = None
        except ValueError:
            bad += 1
    return list(found), bad


def view_query(request: HttpRequest) -> str:
    """Return what a saved view keeps of a list's address: its filters and its search, not the place in the list."""
    kept = sorted((name, value) for name, values in request.GET.lists() for value in values if value or name != "q")
    return urlencode([pair for pair in kept if pair[0] not in (CURSOR, "e", "p")])


class OperatorAdmin(KeysetAdmin):
    """Rows that an operator sees as far as their grants go; superusers have no bypass.

    ``action`` is what reading takes. A subclass lists its pages in ``pages``: (name, address below the list, method).
    """

    action: ClassVar[Action] = Action.INSPECT
    pages: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    menu_order: ClassVar[int] = 50
    tells_scope: ClassVar[bool] = False
    """Whether the list says to who does not see every tenant which ones its rows are from."""
    has_saved_views: ClassVar[bool] = False
    """Whether operators may keep views of their own of this list."""

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Say whether the menu has this list."""
        return self.action in held_by(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Say whether the list opens; ``obj`` is asked by the doors, with its own scope."""
        if obj is not None:
            return can(operator_of(request), self.action, obj.resource)
        return self.has_module_permission(request)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the rows that this operator may see."""
        model: Any = self.model
        return model._default_manager.visible_to(operator_of(request), self.action, plan=seen_by(request, self.action))

    # -- addresses -----------------------------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern | URLResolver]:  # type: ignore[override]
        """Return the list and the pages named in ``pages``; Django's add, change, delete and history don't exist."""
        view = cast(Any, self.admin_site).view
        routes: list[URLPattern | URLResolver] = [
            path("", view(self.changelist_view), name=self.url_name("changelist"))
        ]
        routes += [
            path(route, view(getattr(self, method)), name=self.url_name(name)) for name, route, method in self.pages
        ]
        return routes

    def url_name(self, name: str) -> str:
        """Return the name of one of this admin's addresses, without its namespace."""
        return f"{self.opts.app_label}_{self.opts.model_name}_{name}"

    def url(self, name: str, *args: Any) -> str:
        """Return one of this admin's addresses."""
        return reverse(f"admin:{self.url_name(name)}", args=args, current_app=self.admin_site.name)

    def row_url(self, row: Any) -> str:
        """Return the address of a row's page."""
        return self.url("page", row.pk)

    # -- lists ---------------------------------------------------------------------------------------------------------

    def require_list(self, request: HttpRequest) -> None:
        """Raise ``AccessDenied`` for who holds nothing that this list would show; audited."""
        if not self.has_module_permission(request):
            self.refuse_page(request)

    def require_held(self, request: HttpRequest) -> None:
        """Raise ``AccessDenied``, audited, unless ``action`` is held for something; for a list that is open to all."""
        if self.action not in held_by(request):
            self.refuse_page(request)

    def refuse_page(self, request: HttpRequest, action: Action | None = None) -> NoReturn:
        """Raise ``AccessDenied`` for want of ``action`` (that of the list), audited."""
        by, wanted = operator_of(request), self.action if action is None else action
        asked = Resource(tenant=ANY, target_type="page", target_id=self.slug)
        record_denial(by, wanted, asked)
        raise AccessDenied(operator=by, action=wanted, resource=asked)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:  # noqa: ARG002
        """Answer with the list; a POST is an action on selected rows, or saves or deletes a view of one's own."""
        self.require_list(request)
        if request.method != "POST":
            return self.show_list(request)
        if self.has_saved_views and {SAVE_VIEW, DELETE_VIEW} & set(request.POST):
            return self.keep_view(request)
        return self.act_on_selected(request)

    def list_context(self, request: HttpRequest, cl: KeysetChangeList) -> dict[str, Any]:
        """Add which tenants the operator sees, and the views that they have saved of the list."""
        context = super().list_context(request, cl)
        if self.tells_scope:
            said = scope_words(seen_by(request, self.action))
            context["list_note"] = f"{context['list_note']} {said}".strip()
        if not self.has_saved_views:
            return context
        here = view_query(request)
        views = [(one, one.query == here) for one in saved_views(operator_of(request), self.slug)]
        return {**context, "saved_views": views, "saves_views": True}

    def keep_view(self, request: HttpRequest) -> HttpResponse:
        """Save the filters and the search of the address under the posted name, or delete a saved view."""
        by = operator_of(request)
        try:
            if SAVE_VIEW in request.POST:
                name = request.POST.get("view_name", "")
                view = save_view(by=by, list_slug=self.slug, name=name, query=view_query(request))
                messages.success(request, f"This view is saved as “{view.name}”.")
            else:
                view_id = request.POST[DELETE_VIEW]
                is_id = view_id.isascii() and view_id.isdigit() and len(view_id) <= LONGEST_ID
                is_gone = is_id and delete_view(by=by, list_slug=self.slug, view_id=int(view_id))
                messages.success(request, "The view is deleted." if is_gone else "There is no such view any more.")
        except OpsError as refusal:
            messages.error(request, refusal.detail)
        return HttpResponseRedirect(request.get_full_path())

    def act_on_selected(self, request: HttpRequest) -> HttpResponse:
        """Refuse: this list has no actions, whatever the form says (ADM-01)."""
        messages.error(request, "This list has no such action. Nothing was changed.")
        return HttpResponseRedirect(request.get_full_path())

    # -- confirming ----------------------------------------------------------------------------------------------------

    def page_context(self, request: HttpRequest, title: str, **more: Any) -> dict[str, Any]:
        """Return what every page of this admin shows beside its own values."""
        context = self.admin_site.each_context(request)
        crumbs = [(self.url("changelist"), self.list_title)] if self.list_title else []
        return {**context, "title": title, "crumbs": crumbs, **more}

    def confirm(
        self,
        request: HttpRequest,
        asked: Confirmation,
        *,
        refusal: OpsError | None = None,
        changed: str = "",
        status: int = 200,
    ) -> HttpResponse:
        """Answer with a confirmation; after a refusal it says why nothing was changed, with the refusal's status."""
        context = self.page_context(request, asked.title, asked=asked, refusal=refusal, changed=changed)
        if refusal is not None:
            status = refusal.status
        return TemplateResponse(request, "ops/confirm.html", context, status=status)

    def ask_and_do(
        self,
        request: HttpRequest,
        *,
        find: Callable[[], Any],
        may: Callable[[Any], None],
        ask: Callable[[Any, forms.Form, str], Confirmation],
        form: Callable[[Any, Any], forms.Form],
        act: Callable[[Any, str], Any],
        tell: Callable[[Any], tuple[str, str]],
        refused_url: str = "",
    ) -> HttpResponse:
        """Ask about one row, and once the answer is sent do it through its service.

        ``find`` returns the row and ``may`` raises for who may not decide about it; ``form`` takes the row and what was
        posted, None at first; ``act`` takes the filled form and the key of the request, and returns what ``tell`` makes
        a message and an address of. After a refusal the row is asked about as it stands by then; with ``refused_url``
        the refusal is told there instead.
        """
        row = find()
        may(row)
        if request.method != "POST":
            return self.confirm(request, ask(row, form(row, None), ""))
        filled, key = form(row, request.POST), str(request.POST.get("idempotency_key", ""))
        if not filled.is_valid():
            return self.confirm(request, ask(row, filled, key), status=400)
        try:
            made = act(filled, posted_key(request))
        except OpsError as refusal:
            if refusal.status in (401, 403, 404):
                raise
            if refused_url:
                messages.warning(request, refusal.detail)
                return HttpResponseRedirect(refused_url)
            return self.confirm(request, ask(find(), filled, key), refusal=refusal)
        text, url = tell(made)
        messages.success(request, f"{text}{again(made.idempotent_replay)}")
        return HttpResponseRedirect(url)
