"""What the console's lists have in common, below every app: pages by key, filters by name, and how times read.

Django's change list counts the rows, skips rows by OFFSET and takes any field's name from the address; on big tables of
several tenants each of these is too slow or tells too much. Here a list is one query with a LIMIT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import SuspiciousOperation
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.utils import timezone

from opsconsole.core.keyset import Page, Source, read_page

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    ListFilter = admin.SimpleListFilter
else:
    ModelAdmin = admin.ModelAdmin
    ListFilter = admin.SimpleListFilter

CURSOR = "cursor"
LONGEST_TEXT = 20_000
"""Characters of one value that a page shows; a longer one is cut there and offered as a file."""


class NotAListParameter(SuspiciousOperation):
    """The address names a field, a value or a place that the list does not offer: 400, whatever it was."""


def keyset_page(queryset: QuerySet[Any], keys: Sequence[str], cursor: str, size: int) -> Page[Any]:
    """Return the page at ``cursor`` ("" = the first), by one query without COUNT or OFFSET.

    ``keys`` are descending (``-last_seen_at``) and end in a unique one. Raises ``InvalidFields`` for a cursor that is
    none of this list.
    """
    source: Source[Any] = Source(queryset, tuple(key.removeprefix("-") for key in keys))
    return read_page(queryset.model._meta.label_lower, [[source]], limit=size, cursor=cursor or None)


class KeysetChangeList(ChangeList):
    """Django's change list with its page taken by key, its order fixed, and nothing counted."""

    next_cursor: str = ""
    previous_cursor: str = ""
    is_first_page: bool = True

    @property
    def _keyset(self) -> tuple[str, ...]:
        keys: tuple[str, ...] = getattr(self.model_admin, "keyset", ("-id",))
        return keys

    def get_filters_params(self, params: Any = None) -> Any:
        """Return what filters may read: not the cursor."""
        found = super().get_filters_params(params)
        found.pop(CURSOR, None)
        return found

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:  # noqa: ARG002
        """Return the one order there is; a sortable column would need an index and a cursor of its own."""
        return list(self._keyset)

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Return the address with some parameters changed; another filter begins at the first page again."""
        return super().get_query_string(new_params, [*(remove or ()), CURSOR])

    def get_results(self, request: HttpRequest) -> None:
        """Fetch the page."""
        cursor = request.GET.get(CURSOR, "")
        page = keyset_page(self.queryset, self._keyset, cursor, self.list_per_page)
        self.result_list = page.rows
        self.result_count = len(page.rows)
        self.full_result_count = None
        self.show_full_result_count = self.show_admin_actions = self.can_show_all = self.multi_page = False
        self.next_cursor, self.previous_cursor = page.next or "", page.previous or ""
        self.is_first_page = not cursor

    @property
    def next_page(self) -> str:
        """The address of the next page, "" at the end."""
        return super().get_query_string({CURSOR: self.next_cursor}) if self.next_cursor else ""

    @property
    def previous_page(self) -> str:
        """The address of the page before, "" at the start."""
        return super().get_query_string({CURSOR: self.previous_cursor}) if self.previous_cursor else ""

    @property
    def first_page(self) -> str:
        """The address of the first page."""
        return self.get_query_string()


class ChoiceFilter(ListFilter):
    """A filter with a fixed set of values; any other value in the address is 400."""

    all_label: ClassVar[str] = "All"
    default: ClassVar[str] = ""
    """What holds while the address does not name the filter; "" = all."""

    def value(self) -> str:
        """Return the chosen value, or the default."""
        chosen = super().value()
        if chosen is None:
            return self.default
        if chosen and chosen not in {value for value, _label in self.lookup_choices}:
            raise NotAListParameter(f"no such value of {self.parameter_name}")
        return str(chosen)

    def choices(self, changelist: Any) -> Any:
        """Yield the links of the filter; "all" comes last and is said in the address where it is not the default."""
        chosen = self.value()
        for value, label in self.lookup_choices:
            yield {
                "selected": chosen == value,
                "query_string": changelist.get_query_string({self.parameter_name: value}),
                "display": label,
            }
        if "" not in {value for value, _label in self.lookup_choices}:
            yield {
                "selected": not chosen,
                "query_string": changelist.get_query_string({self.parameter_name: ""}),
                "display": self.all_label,
            }


class TextFilter(ListFilter):
    """A filter that is typed, compared exactly: for columns with more values than a page can list."""

    is_typed = True

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return one choice, so that Django shows the filter."""
        return [("", "")]

    def choices(self, changelist: Any) -> Any:  # noqa: ARG002
        """Yield nothing: the page has a field to type into."""
        return ()

    @property
    def typed(self) -> str:
        """What was typed."""
        return str(self.value() or "").strip()

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002
        """Keep the rows whose column is exactly that."""
        if not self.typed:
            return queryset
        if "\x00" in self.typed:
            return queryset.none()
        return queryset.filter(**{str(self.parameter_name): self.typed})


class KeysetAdmin(ModelAdmin):
    """A read-only list of rows; what changes them are buttons that call services.

    ``columns`` names methods of the admin, each taking a row. ``keyset`` is the order and the key of a page.
    """

    keyset: ClassVar[tuple[str, ...]] = ("-id",)
    columns: ClassVar[tuple[str, ...]] = ()
    slug: ClassVar[str] = ""
    """The part of the address that stands for this model."""
    menu_label: ClassVar[str] = ""
    list_title: ClassVar[str] = ""
    list_note: ClassVar[str] = ""
    search_label: ClassVar[str] = ""
    bulk_actions: ClassVar[tuple[tuple[str, str], ...]] = ()
    actions = None
    list_per_page = 50
    list_select_related: ClassVar[Any] = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by: ClassVar[Any] = ()
    search_fields: ClassVar[Any] = ()
    list_template: ClassVar[str] = "ops/list.html"

    def get_list_display(self, request: HttpRequest) -> Any:  # noqa: ARG002
        """Return the columns."""
        return self.columns

    def get_changelist(self, request: HttpRequest, **_: Any) -> type[ChangeList]:  # noqa: ARG002
        """Return the list by key."""
        return KeysetChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:  # noqa: ARG002
        """Allow what a filter of this list reads, and no field's name: Django would compare passwords (SEC-02)."""
        return lookup in {getattr(one, "parameter_name", None) for one in self.list_filter}

    def has_add_permission(self, request: HttpRequest, *_: Any) -> bool:  # noqa: ARG002
        """Nothing is added by hand."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        """Nothing is edited by hand."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        """Nothing is deleted by hand."""
        return False

    def row_url(self, row: Any) -> str:  # noqa: ARG002
        """Return the address of a row's page, "" if it has none."""
        return ""

    def list_context(self, request: HttpRequest, cl: KeysetChangeList) -> dict[str, Any]:
        """Return what the list's template shows."""
        heads = [getattr(getattr(self, name), "short_description", name) for name in self.columns]
        hidden = [(name, value) for name, value in _pairs(request.GET) if name not in (CURSOR, "q", "e", "p")]
        specs: list[Any] = list(cl.filter_specs)
        typed = {str(spec.parameter_name) for spec in specs if getattr(spec, "is_typed", False)}
        return {
            "title": self.list_title,
            "cl": cl,
            "heads": heads,
            "rows": [
                (row, self.row_url(row), [getattr(self, name)(row) for name in self.columns]) for row in cl.result_list
            ],
            "link_filters": [(s, list(s.choices(cl))) for s in cl.filter_specs if not getattr(s, "is_typed", False)],
            "typed_filters": [spec for spec in cl.filter_specs if getattr(spec, "is_typed", False)],
            "kept": [(name, value) for name, value in hidden if name not in typed],
            "search_label": self.search_label,
            "list_note": self.list_note,
            "bulk_actions": self.bulk_actions_for(request),
        }

    def bulk_actions_for(self, request: HttpRequest) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the actions on selected rows that this operator may see."""
        return list(self.bulk_actions)

    def show_list(self, request: HttpRequest) -> HttpResponse:
        """Answer with the list."""
        cl: Any = self.get_changelist_instance(request)
        context = {**self.admin_site.each_context(request), **self.list_context(request, cl)}
        return TemplateResponse(request, self.list_template, context)


def _pairs(data: QueryDict) -> Iterable[tuple[str, str]]:
    for name, values in data.lists():
        yield from ((name, str(value)) for value in values)


def when(moment: datetime | None) -> str:
    """Return a time in UTC as the console writes it; "" for none."""
    return f"{moment.astimezone(UTC):%d %b %Y %H:%M:%S}" if moment else ""


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """Return how long ago that was, in the largest unit that says something; "in 3 min" for the future."""
    if moment is None:
        return ""
    age = (now or timezone.now()) - moment
    if age < timedelta(0):
        return f"in {_length(-age)}"
    return f"{_length(age)} ago"


def _length(age: timedelta) -> str:
    seconds = int(age.total_seconds())
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7_200:
        return f"{seconds // 60} min"
    if seconds < 172_800:
        return f"{seconds // 3600} h"
    return f"{seconds // 86_400} days"


def again(is_replay: bool) -> str:
    """Return the end of a sentence about a change: that a repeated request has repeated nothing."""
    return ": that was done before, and nothing was repeated." if is_replay else "."


def thousands(number: int | None) -> str:
    """Return a count with separators; "" for none."""
    return "" if number is None else f"{number:,}"


def cut(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return ``text`` as far as a page shows it, with a note where it was cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters are not shown here."
