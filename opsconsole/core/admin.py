"""What the console's lists have in common, below every app: pages by key, filters by name, and how times read.

Django's change list counts the rows, skips rows by OFFSET and takes any field's name from the address; on big tables of
several tenants each of these is too slow or tells too much. Here a list is one query with a LIMIT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import SuspiciousOperation
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.utils import timezone

from opsconsole.core.bounded import capped_counts
from opsconsole.core.ids import new_id
from opsconsole.core.keyset import Page, Source, read_page

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    ListFilter = admin.SimpleListFilter
else:
    ModelAdmin = admin.ModelAdmin
    ListFilter = admin.SimpleListFilter

CURSOR = "cursor"
NO_FILTERS = (CURSOR, "q", "e", "p")
"""Parameters of a list that say where and what to search, not which rows there are."""
LONGEST_TEXT = 20_000
"""Characters of one value that a page shows; a longer one is cut there and offered as a file."""
MOST_COUNTED = 1_000
"""Rows that a tab counts; beyond it says "1,000+"."""
ON_CALL, CONFIGURATION = "On call", "Configuration"
"""The groups of the menu, in their order; an admin may name another one, which comes after them."""


class NotAListParameter(SuspiciousOperation):
    """The address names a field, a value or a place that the list does not offer: 400, whatever it was."""


def keyset_page(queryset: QuerySet[Any], keys: Sequence[str], cursor: str, size: int) -> Page[Any]:
    """Return the page at ``cursor`` ("" = the first), by one query without COUNT or OFFSET.

    ``keys`` are descending (``-last_seen_at``) and end in a unique one. Raises ``InvalidFields`` for a cursor that is
    none of this list.
    """
    source: Source[Any] = Source(queryset, tuple(key.removeprefix("-") for key in keys))
    return read_page(queryset.model._meta.label_lower, [[source]], limit=size, cursor=cursor or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pill:
    """A word on a coloured ground. ``kind`` is the rest of its class: ``good``, ``severity-high``, ``state-taken``."""

    text: str
    kind: str = "grey"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What stands in one cell of a list, from top to bottom; each part is text, and an empty one is left out.

    ``lines`` are (tone, text) with the tones good, warn, bad and grey. ``at`` is shown as how long ago it was.
    """

    main: str = ""
    url: str = ""
    at: datetime | None = None
    pills: Sequence[Pill] = ()
    lines: Sequence[tuple[str, str]] = ()
    second: str = ""

    def __str__(self) -> str:
        parts = [self.main, ago(self.at), *map(str, self.pills), *(text for _tone, text in self.lines), self.second]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The head of a column, and the class of its cells."""

    label: str
    css: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tab:
    """A saved view of a list as the page shows it."""

    key: str
    label: str
    url: str
    count: str
    is_current: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkAction:
    """What may be done to the selected rows of a list. ``value`` is what the form sends.

    A label that ends in an ellipsis asks first; any other one acts at once, and is told with how many are selected.
    """

    value: str
    label: str
    is_folded: bool = False  # behind "More"
    is_danger: bool = False

    @property
    def acts_at_once(self) -> bool:
        """Whether nothing is asked before it is done."""
        return not self.label.endswith("…")


@dataclass(frozen=True, slots=True, kw_only=True)
class DropDown:
    """A filter as the page shows it: ``chosen`` is "" while it lets everything through."""

    title: str
    chosen: str
    choices: Sequence[Mapping[str, Any]]


TabSpec = tuple[str, str, Mapping[str, str], "int | str | None"]
"""(key, label, parameters of the list, how many rows: a number, a capped one such as "1,000+", or None)."""


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

    ``columns`` names methods of the admin, each taking a row and returning text or a ``Cell``. ``keyset`` is the order
    and the key of a page.
    """

    keyset: ClassVar[tuple[str, ...]] = ("-id",)
    columns: ClassVar[tuple[str, ...]] = ()
    column_classes: ClassVar[Mapping[str, str]] = {}
    """Classes of cells by the column's name: ``ops-num`` for numbers; on a phone ``ops-wide`` takes the whole line, and
    ``ops-bare`` leaves out the name."""
    folds_on_phone: ClassVar[bool] = False
    """Whether a phone shows of each row the first line of its cells, and the rest when asked; a cell of the class
    ``ops-folded`` is of the rest as a whole."""
    slug: ClassVar[str] = ""
    """The part of the address that stands for this model."""
    menu_label: ClassVar[str] = ""
    menu_group: ClassVar[str] = ON_CALL
    list_title: ClassVar[str] = ""
    list_note: ClassVar[str] = ""
    tab_parameter: ClassVar[str] = ""
    """The filter that the tabs take the place of: it is neither offered beside them nor counted with the others."""
    search_label: ClassVar[str] = ""
    bulk_actions: ClassVar[tuple[BulkAction, ...]] = ()
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

    def menu_badge(self, request: HttpRequest) -> str:  # noqa: ARG002
        """Return the short text beside the menu's entry, "" for none; every page asks, so it has to cost nothing."""
        return ""

    def list_tabs(self, request: HttpRequest) -> Sequence[TabSpec]:  # noqa: ARG002
        """Return the saved views of this list; the first one shows while the address names none of their filters."""
        return ()

    def rows_of_tabs(self, request: HttpRequest, cl: KeysetChangeList) -> Any:
        """Return the rows as every filter but that of the tabs has them."""
        rows = self.get_queryset(request)
        for spec in cast(Any, cl.filter_specs):
            if spec.parameter_name != self.tab_parameter:
                rows = spec.queryset(request, rows)
        return rows

    def newer_url(self, request: HttpRequest, cl: KeysetChangeList) -> str:  # noqa: ARG002
        """Return the address that says how many rows came since this page was made, "" if there is none.

        It answers ``{"newer": 2}`` with an ``ETag``, and 304 while nothing has changed. The page asks it now and then
        and offers to refresh; it never moves a row by itself.
        """
        return ""

    def list_links(self, request: HttpRequest, cl: KeysetChangeList) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        """Return (label, address) of what this list can be taken away as, with its filters."""
        return ()

    def tabs(self, request: HttpRequest) -> list[Tab]:
        """Return the saved views as links that keep every filter but their own."""
        specs = self.list_tabs(request)
        own = {name for _key, _label, params, _count in specs for name in params}
        chosen = {name: value for name, value in _pairs(request.GET) if name in own}
        kept = [(name, value) for name, value in _pairs(request.GET) if name not in {*own, *NO_FILTERS}]
        return [
            Tab(
                key=key,
                label=label,
                url=f"?{urlencode([*params.items(), *kept])}",
                count=thousands(count) if isinstance(count, int) else count or "",
                is_current=dict(params) == chosen or (place == 0 and not chosen),
            )
            for place, (key, label, params, count) in enumerate(specs)
        ]

    def list_context(self, request: HttpRequest, cl: KeysetChangeList) -> dict[str, Any]:
        """Return what the list's template shows."""
        heads = [getattr(getattr(self, name), "short_description", name) for name in self.columns]
        pairs = list(_pairs(request.GET))
        hidden = [(name, value) for name, value in pairs if name not in NO_FILTERS]
        specs: list[Any] = list(cl.filter_specs)
        typed = {str(spec.parameter_name) for spec in specs if getattr(spec, "is_typed", False)}
        columns = [
            Column(label=label, css=self.column_classes.get(name, ""))
            for name, label in zip(self.columns, heads, strict=True)
        ]
        rows = [(row, self.row_url(row), [getattr(self, name)(row) for name in self.columns]) for row in cl.result_list]
        link_filters = [(s, list(s.choices(cl))) for s in cl.filter_specs if not getattr(s, "is_typed", False)]
        named = {str(getattr(s, "parameter_name", "")): _drop_down(s, choices) for s, choices in link_filters}
        tab = named.pop(self.tab_parameter, None)
        drop_downs = list(named.values())
        bulk_actions = self.bulk_actions_for(request)
        return {
            "title": self.list_title,
            "cl": cl,
            "heads": heads,
            "rows": rows,
            "columns": columns,
            "table": [(row, url, _with_columns(columns, cells)) for row, url, cells in rows],
            "tabs": self.tabs(request),
            "newer_url": self.newer_url(request, cl),
            "list_links": self.list_links(request, cl),
            "as_of": timezone.now(),
            "link_filters": link_filters,
            "drop_downs": drop_downs,
            "filters_on": sum(bool(one.chosen) for one in drop_downs)
            + len(typed & {name for name, value in pairs if value}),
            "searched_in": tab.chosen if tab is not None else "",
            "search_all_url": cl.get_query_string({self.tab_parameter: ""}) if tab is not None else "",
            "is_filtered": bool(hidden),
            "typed_filters": [spec for spec in cl.filter_specs if getattr(spec, "is_typed", False)],
            "kept": [(name, value) for name, value in hidden if name not in typed],
            "search_label": self.search_label,
            "list_note": self.list_note,
            "folds_on_phone": self.folds_on_phone,
            "bulk_actions": bulk_actions,
            "bulk_is_folded": any(one.is_folded for one in bulk_actions),
            "bulk_key": str(new_id()),
        }

    def bulk_actions_for(self, request: HttpRequest) -> list[BulkAction]:  # noqa: ARG002
        """Return the actions on selected rows that this operator may see."""
        return list(self.bulk_actions)

    def show_list(self, request: HttpRequest) -> HttpResponse:
        """Answer with the list."""
        cl: Any = self.get_changelist_instance(request)
        context = {**self.admin_site.each_context(request), **self.list_context(request, cl)}
        return TemplateResponse(request, self.list_template, context)


def _with_columns(columns: Sequence[Column], cells: Sequence[Any]) -> list[tuple[Column, Any, bool]]:
    """Return each cell with its column and whether it is plain text, which the template need not take apart."""
    return [(column, cell, not isinstance(cell, Cell)) for column, cell in zip(columns, cells, strict=True)]


def _drop_down(spec: Any, choices: Sequence[Mapping[str, Any]]) -> DropDown:
    all_label = getattr(spec, "all_label", ChoiceFilter.all_label)
    chosen = next((str(one["display"]) for one in choices if one["selected"]), "")
    return DropDown(title=str(spec.title), chosen="" if chosen == all_label else chosen, choices=choices)


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


def capped(count: int, most: int) -> str:
    """Return a count that stopped at ``most``, as a person reads it."""
    return f"{thousands(most)}+" if count > most else thousands(count)


def tab_counts(tabs: Sequence[QuerySet[Any]]) -> list[str]:
    """Return how many rows each tab has, "1,000+" for more than that: one statement, by LIMIT, as a COUNT would read
    them all.
    """
    return [capped(count, MOST_COUNTED) for count in capped_counts(tabs, MOST_COUNTED)]


def cut(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return ``text`` as far as a page shows it, with a note where it was cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters are not shown here."
