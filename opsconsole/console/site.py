"""The console's own admin site: its pages, their policy, and who is let in.

It shares no template, no registration and no permission with a host project's admin, which stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.conf import settings
from django.contrib.admin import AdminSite
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.middleware.csrf import CsrfViewMiddleware
from django.template.response import TemplateResponse
from django.urls import URLPattern, URLResolver, include, path, re_path, reverse
from django.utils.cache import add_never_cache_headers
from django.utils.decorators import decorator_from_middleware
from django.utils.http import url_has_allowed_host_and_scheme

from deadletters.admin import ADMINS as DEAD_LETTER_ADMINS
from grants.actions import Action
from grants.admin import ADMINS as GRANT_ADMINS
from grants.pages import OperatorAdmin, held_by
from opsconsole.console.down import DATABASE_DOWN, show_database_down
from opsconsole.console.machinery import machinery
from opsconsole.console.overview import live_overview, overview_context
from opsconsole.console.schedule import schedule_admins
from opsconsole.core.admin import CONFIGURATION, ON_CALL
from opsconsole.core.database import is_about_the_statement
from opsconsole.core.errors import OpsError
from opsconsole.core.problems import CsrfRefused
from opsconsole.middleware import named
from repairs.admin import ADMINS as REPAIR_ADMINS

View = Callable[..., HttpResponseBase]

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""Error texts and payloads come from outside: whatever slips through as markup must still run and load nothing."""

REFUSED_TITLES = {400: "Not understood", 401: "Not signed in", 403: "Not allowed"}

ENVIRONMENT_TONES = {
    "red": {"production", "prod", "prd", "live"},
    "amber": {"staging", "stage", "preproduction", "preprod", "pre", "uat", "qa"},
    "blue": {"test", "testing", "tests", "ci", "sandbox"},
    "green": {"development", "dev", "local", "demo"},
}
"""The colour of the bar by the words in the environment's name; a name without any of them has a colour of its own."""


def environment_tone(name: str) -> str:
    """Return the colour that says where one is: red is production, and nothing else is red."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if "pre" in words:
        return "amber"
    if words & {"non", "not"}:
        return "violet"
    return next((tone for tone, known in ENVIRONMENT_TONES.items() if words & known), "violet")


class PageIsCurrent(CsrfViewMiddleware):
    """Django's check that a form comes from a page of ours, of this sign-in; what fails it is a refusal like others."""

    def _reject(self, request: HttpRequest, reason: str) -> HttpResponse:  # noqa: ARG002
        raise CsrfRefused


from_current_page = decorator_from_middleware(PageIsCurrent)


class ConsoleSite(AdminSite):
    """The operations console."""

    site_title = "opsconsole"
    site_header = "opsconsole"
    site_url = None
    enable_nav_sidebar = True
    index_template = "ops/index.html"
    login_template = "ops/login.html"
    logout_template = "ops/logged_out.html"
    password_change_template = "ops/password_change.html"  # noqa: S105
    password_change_done_template = "ops/password_change_done.html"  # noqa: S105

    def __init__(self, name: str = "opsconsole") -> None:
        super().__init__(name)
        self.disable_action("delete_selected")

    # -- views ---------------------------------------------------------------------------------------------------------

    def view(self, view: View, *, is_public: bool = False) -> View:
        """Wrap a view of ours: sign-in first, refusals as pages, the policy on every answer.

        Marked as non-atomic: services open durable transactions, which a project's ``ATOMIC_REQUESTS`` would forbid.
        Marked as exempt from the project's CSRF check, which would answer before this with a bare page: the same check
        is made here, first of all.
        Its request has an id, whether or not the project lists the middleware that gives one.
        """
        guarded = from_current_page(view if is_public else self.admin_view(view))

        @wraps(view)
        def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            request.current_app = self.name
            try:
                response = self.answer(request, guarded, *args, **kwargs)
                # Templates ask the database as well, and after this nobody could answer for it.
                if isinstance(response, TemplateResponse):
                    response.render()
            except DATABASE_DOWN as error:
                if is_about_the_statement(error):
                    raise
                response = show_database_down(request)
            return protect(response)

        wrapped: Any = transaction.non_atomic_requests(named(inner))
        wrapped.csrf_exempt = True
        wrapped.login_required = False  # sign-in is asked here, with this site's own login page
        return wrapped  # type: ignore[no-any-return]

    def answer(self, request: HttpRequest, guarded: View, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Return what a view answers, and its refusals as pages."""
        try:
            return guarded(request, *args, **kwargs)
        except Http404:
            return self.show_not_found(request)
        except CsrfRefused:
            return self.show_outdated(request)
        except OpsError as refusal:
            return self.show_refusal(request, refusal)
        except PermissionDenied:
            return self.show_message(request, 403, "Not allowed", "You may not do this.")
        except SuspiciousOperation:
            return self.show_message(
                request, 400, "No such list", "The address names something that this page does not offer."
            )

    def show_not_found(self, request: HttpRequest) -> HttpResponse:
        """Answer alike for what is not there and for what may not be seen: nothing in it depends on the address."""
        context = {**self.each_context(request), "title": "Not found, or not yours"}
        return TemplateResponse(request, "ops/not_found.html", context, status=404)

    def show_refusal(self, request: HttpRequest, refusal: OpsError) -> HttpResponse:
        """Answer a refusal that no page of its own has answered."""
        if refusal.status == 404:
            return self.show_not_found(request)
        title = REFUSED_TITLES.get(refusal.status, "Nothing was done")
        context = {**self.each_context(request), "title": title, "refusal": refusal}
        action, resource = getattr(refusal, "action", None), getattr(refusal, "resource", None)
        context |= {"needed": action, "tenant": getattr(resource, "tenant", "")}
        return TemplateResponse(request, "ops/refused.html", context, status=refusal.status)

    def show_outdated(self, request: HttpRequest) -> HttpResponse:
        """Answer what was sent from a page of an earlier sign-in, as when another tab has signed in since."""
        text = "You have signed in since this page was loaded, or your browser keeps no cookies of the console."
        context = {**self.each_context(request), "title": "This page is out of date", "text": text}
        context["again"] = request.get_full_path()
        return TemplateResponse(request, "ops/refused.html", context, status=403)

    def show_message(self, request: HttpRequest, status: int, title: str, text: str) -> HttpResponse:
        """Answer with one sentence."""
        context = {**self.each_context(request), "title": title, "text": text}
        return TemplateResponse(request, "ops/refused.html", context, status=status)

    def each_context(self, request: HttpRequest) -> dict[str, Any]:
        """Return what every page shows: where one is, what one may open, and whether the machinery runs."""
        is_in = self.has_permission(request)
        environment = str(getattr(settings, "OPSCONSOLE_ENVIRONMENT", ""))
        menu = self.menu(request) if is_in else []
        return {
            "site_title": self.site_title,
            "site_header": self.site_header,
            "has_permission": is_in,
            "environment": environment,
            "environment_tone": environment_tone(environment) if environment else "",
            "menu": menu,
            "menu_groups": self.grouped(request, menu),
            "machinery": machinery() if is_in else None,
            # The line says to everybody whether capture works; which hosts there are is for who may read something.
            "sees_workers": is_in and Action.INSPECT in held_by(request),
            "is_popup": False,
        }

    def menu(self, request: HttpRequest) -> list[dict[str, Any]]:
        """Return the entries that this operator may open."""
        admins = sorted(self.operator_admins(), key=lambda one: (one.menu_order, one.menu_label))
        entries = []
        for one in admins:
            if one.has_module_permission(request):
                url = one.url("changelist")
                entry = {"label": one.menu_label, "url": url, "is_current": request.path.startswith(url)}
                entries.append({**entry, "group": one.menu_group, "badge": one.menu_badge(request)})
        return entries

    def grouped(self, request: HttpRequest, entries: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return the entries below their groups, with the overview first; empty for who may open nothing."""
        if not entries:
            return []
        index = reverse("admin:index", current_app=self.name)
        overview = {"label": "Overview", "url": index, "is_current": request.path == index}
        groups: dict[str, list[dict[str, Any]]] = {ON_CALL: [overview], CONFIGURATION: []}
        for entry in entries:
            groups.setdefault(entry["group"], []).append(entry)
        return [(name, found) for name, found in groups.items() if found]

    def operator_admins(self) -> list[OperatorAdmin]:
        """Return the admins of our own models."""
        return [one for one in self._registry.values() if isinstance(one, OperatorAdmin)]

    def index(self, request: HttpRequest, extra_context: Any = None) -> TemplateResponse:
        """Answer with the overview."""
        context = {**self.each_context(request), "title": "Overview", **overview_context(request)}
        return TemplateResponse(request, "ops/index.html", {**context, **(extra_context or {})})

    def login(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Ask who one is; what was wanted is opened then, or the overview for who wanted what is no page of ours.

        Django would lead those to an address of the host project, ``LOGIN_REDIRECT_URL``.
        """
        for name in ("GET", "POST"):
            sent: QueryDict = getattr(request, name)
            wanted = sent.get(REDIRECT_FIELD_NAME)
            if wanted is not None and not url_has_allowed_host_and_scheme(
                wanted, allowed_hosts={request.get_host()}, require_https=request.is_secure()
            ):
                safe = sent.copy()
                safe[REDIRECT_FIELD_NAME] = reverse("admin:index", current_app=self.name)
                setattr(request, name, safe)
        return super().login(request, extra_context)

    def logout(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Log out by POST; a GET shows the button, for pages that can't hold a form."""
        if request.method != "POST":
            return TemplateResponse(request, "ops/log_out.html", {**self.each_context(request), "title": "Log out"})
        response = super().logout(request, extra_context)
        if isinstance(response, TemplateResponse):
            # Django asks what to show while somebody is still signed in; the page is for who no longer is.
            response.context_data = {**(response.context_data or {}), **self.each_context(request)}
        return response

    def get_app_list(self, request: HttpRequest, app_label: str | None = None) -> list[Any]:  # noqa: ARG002
        """Return nothing: the menu takes its place, and knows no models."""
        return []

    def get_urls(self) -> list[URLPattern | URLResolver]:
        """Return the console's addresses; Django's popups, look-ups and histories are not among them."""
        urls: list[URLPattern | URLResolver] = [
            path("", self.view(self.index), name="index"),
            path("live/overview/", self.view(live_overview), name="live_overview"),
            path("login/", self.view(self.login, is_public=True), name="login"),
            path("logout/", self.view(self.logout), name="logout"),
            path("password_change/", self.view(self.password_change), name="password_change"),
            path("password_change/done/", self.view(self.password_change_done), name="password_change_done"),
        ]
        urls += [path(f"{one.slug}/", include(one.get_urls())) for one in self.operator_admins()]
        return [*urls, re_path(r"(?P<url>.*)$", self.view(self.catch_all_view))]


def protect(response: HttpResponseBase) -> HttpResponseBase:
    """Put the policy on an answer, and keep it out of every cache."""
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["Referrer-Policy"] = "same-origin"
    response.headers["X-Content-Type-Options"] = "nosniff"
    add_never_cache_headers(response)
    return response


def make_site(name: str = "opsconsole") -> ConsoleSite:
    """Return a console with every list of ours; the most derived admin of a model is the one that is registered."""
    made = ConsoleSite(name)
    for model, admin_class in {**GRANT_ADMINS, **DEAD_LETTER_ADMINS, **REPAIR_ADMINS, **schedule_admins()}.items():
        made.register(model, admin_class)
    return made


site = make_site()
"""The console: ``path("ops/", site.urls)``."""
