"""Searching texts by their words, with an index in the database that PostgreSQL and SQLite keep by themselves.

A text index is made of some columns of one table: a GIN index of a ``tsvector`` on PostgreSQL (no extension is needed),
an FTS5 table kept by triggers on SQLite. Rows of a search come newest first, as a list shows them, and neither index
knows that order. So a page is looked for twice: first among the newest rows, where a common word has filled it before
many are read; only if that does not fill it through the index, where a word that is not common has few rows to sort.
"""
# ruff: noqa: S608 - what is put together here are names of this code's own; what was typed is always a parameter

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections, transaction
from django.db.models import BooleanField, Expression, F, QuerySet

from opsconsole.core.database import AnyOf
from opsconsole.core.problems import FieldError, InvalidFields

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

FIRST = 1_000
"""So many rows are read one by one before the index is asked: a word that is in one of ten fills a page from them."""
NEWEST = 5_000
"""So many rows are read where there is no index."""
FOUND_WITHOUT_INDEX = 1_000
LONGEST = 1_000
MOST_WORDS = 60
PREFIX_FROM = 3
MEANING = (
    "Words are looked for in what the other filters leave. All of them must be there, in any order; large and small"
    " letters are the same. One of three letters or more also finds longer words that begin with it. Signs between"
    " words do not count, and what was hidden cannot be found."
)
"""What a search does, for people; the only other place that knows are the functions of this module."""
SHORT_MEANING = "All of the words are there, in any order."
"""The same in one line, for a page that has the rest folded away."""

# --- what was typed ---------------------------------------------------------------------------------------------------

_BETWEEN_WORDS = re.compile(r"[\s\x00-\x2f:-@\[-`{-\x7f\ud800-\udfff]+")
"""White space, control characters, ASCII punctuation and what is no character at all; other signs end words, too, but
which ones is for the database to know, so that it cuts the question as it has cut the texts."""


def is_storable(text: str) -> bool:
    """Say whether a column can hold this text; what is not storable is nobody's id."""
    return bool(text) and len(text) <= 255 and is_text(text)


def is_text(text: str) -> bool:
    """Say whether both databases can hold every character of this."""
    return "\x00" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


@dataclass(frozen=True, slots=True)
class Words:
    """What is looked for; ``trouble`` says why nothing is, if nothing can be."""

    words: tuple[str, ...] = ()
    trouble: str = ""

    @classmethod
    def typed(cls, text: str) -> Words:
        """Return the words of what somebody typed or pasted; never fails."""
        if len(text) > LONGEST:
            return cls(trouble=f"That is too long to search for: at most {LONGEST:,} characters.")
        parts = dict.fromkeys(_BETWEEN_WORDS.split(text))
        words = tuple(part for part in parts if any(map(str.isalnum, part)))
        if len(words) > MOST_WORDS:
            return cls(trouble=f"That is too much to search for: at most {MOST_WORDS} words.")
        if not words:
            return cls(trouble="Nothing to search for: type at least one letter or digit.")
        return cls(words)

    @property
    def for_postgresql(self) -> str:
        """The words as a ``tsquery``; none of them holds a quote or a backslash."""
        return " & ".join(f"'{word}':*" if len(word) >= PREFIX_FROM else f"'{word}'" for word in self.words)

    @property
    def for_fts5(self) -> str:
        """The words as a query of FTS5; none of them holds a quote."""
        return " ".join(f'"{word}"*' if len(word) >= PREFIX_FROM else f'"{word}"' for word in self.words)

    @property
    def patterns(self) -> list[str]:
        """One regular expression for each word, for texts that have no index."""
        letter = r"[^\W_]"
        return [
            f"(?i)(?<!{letter}){re.escape(word)}" + ("" if len(word) >= PREFIX_FROM else f"(?!{letter})")
            for word in self.words
        ]

    @property
    def plain(self) -> str:
        """The longest word of ASCII letters alone, "" without one: what a text must hold, cheaply asked."""
        return max((word for word in self.words if word.isascii() and word.isalpha()), key=len, default="")


# --- the index --------------------------------------------------------------------------------------------------------

# PostgreSQL's parser keeps host names, paths, addresses and signed numbers together, so that "declined" would not be
# found in shop.errors.Declined. Without these signs it sees words alone; translate() takes 20 times as long (measured).
_GLUE = "./@-<&+"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextIndex:
    """The words of some text columns of one table, none of which may be null.

    ``split`` names columns such as error classes, where ``CardDeclined`` is also found by its parts.
    """

    name: str
    table: str
    columns: tuple[str, ...]
    split: tuple[str, ...] = ()
    order: tuple[str, ...] = ("-id",)
    """The order of the list without a search: where there is no index, its first rows are looked at."""

    def text(self, column: Callable[[str], str]) -> str:
        """Return SQL for the text of a row, as it is; ``column`` gives the SQL of a column."""
        return " || ' ' || ".join(column(name) for name in self.columns)

    def document(self, vendor: str, column: Callable[[str], str]) -> str:
        """Return SQL for what is indexed of a row."""
        if vendor == "postgresql":
            parts = [f"regexp_replace({column(name)}, '([A-Z])', ' \\1', 'g')" for name in self.split]
            text = " || ' ' || ".join([self.text(column), *parts])
            for sign in _GLUE:
                text = f"replace({text}, '{sign}', ' ')"
            # The limit is far above what is stored: a longer text would be an error, and its row not be written.
            return f"to_tsvector('simple'::regconfig, left({text}, 100000))"
        return " || ' ' || ".join([self.text(column), *(_apart(column(name)) for name in self.split)])

    @property
    def map(self) -> str:
        """SQLite: the table from FTS5's numbers to ids; the rows' own numbers change when Django rebuilds a table."""
        return f"{self.name}_rows"


def _apart(column: str) -> str:
    for letter in ascii_uppercase:
        column = f"replace({column}, '{letter}', ' {letter}')"
    return column


def is_ready(index: TextIndex, connection: BaseDatabaseWrapper) -> bool:
    """Say whether the index is there and kept; asks the catalogue, as it may be made or removed while this runs."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT obj_description(indexrelid) FROM pg_index WHERE indexrelid = to_regclass(%s) AND indisvalid",
                [index.name],
            )
            return [row[0] for row in cursor.fetchall()] == [_version(index)]
        # Triggers of other code would keep it as that code wants it: then nothing is sure.
        cursor.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'trigger' AND name LIKE %s UNION ALL"
            " SELECT name FROM pragma_module_list WHERE name = 'fts5'",
            [f"{index.name}%"],
        )
        return {row[0] for row in cursor.fetchall()} == {*_triggers(index).values(), "fts5"}


def install(index: TextIndex, connection: BaseDatabaseWrapper, *, wanted: bool) -> bool:
    """Make the index, or make it again if it is another one by now, or remove it; say whether it is there.

    On PostgreSQL outside a transaction this does not hinder those who write. On SQLite without FTS5 there is none.
    """
    is_there = index.table in connection.introspection.table_names()
    if connection.vendor == "postgresql":
        return is_there and _install_on_postgresql(index, connection, wanted)
    # Its tables outlive the one that they are about, which goes when somebody uninstalls this.
    return _install_on_sqlite(index, connection, wanted and is_there)


def _version(index: TextIndex) -> str:
    """Return the index's comment on PostgreSQL: which code has made it."""
    return sha256(index.document("postgresql", str).encode()).hexdigest()[:16]


def _install_on_postgresql(index: TextIndex, connection: BaseDatabaseWrapper, wanted: bool) -> bool:
    if wanted and is_ready(index, connection):
        return True
    with connection.cursor() as cursor:
        cursor.execute(f"DROP INDEX IF EXISTS {index.name}")
        if not wanted:
            return False
        cursor.execute(f"SELECT EXISTS (SELECT 1 FROM {index.table})")
        concurrently = "" if connection.in_atomic_block or not cursor.fetchone()[0] else "CONCURRENTLY"
        # A short list of what waits to be sorted in: each search reads all of it.
        cursor.execute(
            f"CREATE INDEX {concurrently} {index.name} ON {index.table} USING gin"
            f" ({index.document('postgresql', str)}) WITH (fastupdate = on, gin_pending_list_limit = 1024)"
        )
        cursor.execute(f"COMMENT ON INDEX {index.name} IS '{_version(index)}'")
    return True


def _install_on_sqlite(index: TextIndex, connection: BaseDatabaseWrapper, wanted: bool) -> bool:
    # Without the texts, which the rows have already. What is removed has to be told word by word then: triggers do.
    table = (
        f"CREATE VIRTUAL TABLE {index.name} USING fts5"
        "(words, content='', columnsize=0, tokenize='unicode61 remove_diacritics 0')"
    )
    triggers = _triggers(index)
    has_fts5 = _has_fts5(connection)
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute("SELECT name, sql FROM sqlite_master WHERE name LIKE %s", [f"{index.name}%"])
        there = dict(cursor.fetchall())
        if wanted and has_fts5 and all(there.get(name) == sql for name, sql in {index.name: table, **triggers}.items()):
            return True
        for name in triggers:
            cursor.execute(f"DROP TRIGGER IF EXISTS {name}")
        if has_fts5:
            cursor.execute(f"DROP TABLE IF EXISTS {index.name}")
            cursor.execute(f"DROP TABLE IF EXISTS {index.map}")
        if not wanted or not has_fts5:
            return False
        cursor.execute(f"CREATE TABLE {index.map} (number integer PRIMARY KEY, id char(32) NOT NULL UNIQUE)")
        cursor.execute(table)
        cursor.execute(f"INSERT INTO {index.map} (id) SELECT id FROM {index.table} ORDER BY id")
        document = index.document("sqlite", lambda name: f"t.{name}")
        cursor.execute(
            f"INSERT INTO {index.name} (rowid, words) SELECT m.number, {document} FROM {index.map} m"
            f" JOIN {index.table} t ON t.id = m.id ORDER BY m.number"
        )
        for sql in triggers.values():
            cursor.execute(sql)
    return True


def _has_fts5(connection: BaseDatabaseWrapper) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'")
        return cursor.fetchone() is not None


def _triggers(index: TextIndex) -> dict[str, str]:
    old, new = (index.document("sqlite", lambda name, row=row: f"{row}.{name}") for row in ("OLD", "NEW"))  # type: ignore[misc]
    name, table, rows = index.name, index.table, index.map
    forget = f"INSERT INTO {name} ({name}, rowid, words) SELECT 'delete', number, {old} FROM {rows} WHERE id = OLD.id"
    changed = " OR ".join(f"OLD.{column} <> NEW.{column}" for column in index.columns)
    bodies = {
        f"{name}_insert": f"AFTER INSERT ON {table} BEGIN INSERT INTO {rows} (id) VALUES (NEW.id);"
        f" INSERT INTO {name} (rowid, words) SELECT number, {new} FROM {rows} WHERE id = NEW.id; END",
        f"{name}_update": f"AFTER UPDATE OF {', '.join(index.columns)} ON {table} WHEN {changed} BEGIN {forget};"
        f" INSERT INTO {name} (rowid, words) SELECT number, {new} FROM {rows} WHERE id = NEW.id; END",
        f"{name}_delete": f"AFTER DELETE ON {table} BEGIN {forget}; DELETE FROM {rows} WHERE id = OLD.id; END",
    }
    return {trigger: f"CREATE TRIGGER {trigger} {body}" for trigger, body in bodies.items()}


# --- asking -----------------------------------------------------------------------------------------------------------

_left_out: ContextVar[bool] = ContextVar("opsconsole_search_left_out", default=False)


@contextmanager
def _without_words() -> Iterator[None]:
    """Let querysets that are compiled meanwhile leave out which words they want, and keep all other conditions."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


class Contains(Expression):
    """The condition that a row has all the words, as its index answers it."""

    conditional = True
    output_field = BooleanField()

    def __init__(self, index: TextIndex, words: Words) -> None:
        super().__init__()
        self.index = index
        self.words = words
        self._columns: list[Any] = [F(name) for name in ("id", *index.columns)]

    def get_source_expressions(self) -> list[Any]:
        return self._columns

    def set_source_expressions(self, exprs: Sequence[Any]) -> None:
        self._columns = list(exprs)

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **_: Any) -> tuple[str, tuple[str, ...]]:
        if _left_out.get():
            return "1 = 1", ()
        names = ("id", *self.index.columns)
        columns = {name: compiler.compile(one)[0] for name, one in zip(names, self._columns, strict=True)}
        return _in_index(self.index, self.words, connection.vendor, columns.__getitem__)


def _in_index(index: TextIndex, words: Words, vendor: str, column: Callable[[str], str]) -> tuple[str, tuple[str, ...]]:
    if vendor == "postgresql":
        return f"{index.document(vendor, column)} @@ to_tsquery('simple'::regconfig, %s)", (words.for_postgresql,)
    numbers = f"SELECT rowid FROM {index.name} WHERE {index.name} MATCH %s"
    return f"{column('id')} IN (SELECT m.id FROM {index.map} m WHERE m.number IN ({numbers}))", (words.for_fts5,)


def _one_by_one(
    index: TextIndex, words: Words, vendor: str, column: Callable[[str], str], *, is_indexed: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the condition for rows that are read anyway."""
    if vendor == "postgresql":
        condition, parameters = _in_index(index, words, vendor, column)
        if not words.plain:
            return condition, parameters
        # A tenth of the cost of the words of a text, and most texts do not even hold these letters.
        return f"({index.text(column)}) ~* %s AND {condition}", (words.plain, *parameters)
    if is_indexed:
        numbers = f"SELECT rowid FROM {index.name} WHERE {index.name} MATCH %s"
        row = f"SELECT 1 FROM {index.map} m WHERE m.id = {column('id')} AND m.number IN ({numbers})"
        return f"EXISTS ({row})", (words.for_fts5,)
    text = index.document(vendor, column)
    return " AND ".join(f"({text}) REGEXP %s" for _ in words.words), tuple(words.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a queryset was searched for, and what a page says about it."""

    words: Words = Words()
    is_complete: bool = True
    """False where there is no index, and only the first rows of the list were looked at."""
    told: str = ""

    @property
    def uses_index(self) -> bool:
        """Whether the rows are found by an index of words."""
        return self.is_complete and not self.told and not self.words.trouble

    @property
    def note(self) -> str:
        """A sentence for the page."""
        if self.told or self.words.trouble:
            return self.told or self.words.trouble
        if self.is_complete:
            return SHORT_MEANING
        return f"There is no search index: only the first {NEWEST:,} of this list were looked at. {SHORT_MEANING}"

    @property
    def is_by_words(self) -> bool:
        """Whether words were looked for, within the filters of a list; a number or an id is found in spite of them."""
        return bool(self.words.words) and not self.words.trouble


def search_context(rows: QuerySet[Any]) -> dict[str, str]:
    """Return what the page of a list says about its search, and what words mean; "" where there is nothing to say."""
    search: Search | None = getattr(rows, "search", None)
    if search is None:
        return {"search_note": "", "search_meaning": ""}
    return {"search_note": search.note, "search_meaning": MEANING if search.is_by_words else ""}


S = TypeVar("S", bound="Searchable")


def asked(rows: S) -> S:
    """Return ``rows`` as they are; raises ``InvalidFields`` where the parameter ``text`` cannot be searched for."""
    if rows.search is not None and rows.search.words.trouble:
        raise InvalidFields([FieldError(parameter="text", detail=rows.search.words.trouble)])
    return rows


class Searchable:
    """What a queryset inherits, before ``QuerySet``, whose rows have a text index."""

    text_index: ClassVar[TextIndex]
    search: Search | None = None

    def _clone(self) -> Self:
        copy: Self = super()._clone()  # type: ignore[misc]
        copy.search = self.search
        return copy

    def containing(self, typed: str) -> Self:
        """Keep the rows that have all the words of what was typed; what cannot be searched for keeps none.

        Scope and filters must have been applied before: without an index only the first rows that they leave are
        looked at, at once.
        """
        words = Words.typed(typed)
        asked: Any = self
        index = self.text_index
        found: Self
        if words.trouble:
            found, is_complete = asked.none(), True
        elif is_ready(index, connections[asked.db]):
            found, is_complete = asked.filter(Contains(index, words)), True
        else:
            ids = asked.order_by(*index.order)._among_first(words, FOUND_WITHOUT_INDEX, is_indexed=False)
            found, is_complete = asked.filter(AnyOf("id", ids)), False
        found.search = Search(words=words, is_complete=is_complete)
        return found

    def first_rows(self: Any, count: int) -> list[Any]:
        """Return the first rows in the queryset's order, which is one of columns; for a search in bounded time."""
        if self.search is None or not self.search.uses_index:
            return list(self[:count])
        words = self.search.words
        ids: list[Any] = self._among_first(words, count, is_indexed=True)
        if len(ids) < count:
            ids = self._through_index(words, count)
        if not ids:
            return []
        # By their ids alone: beside other conditions SQLite would read the table in the order of the list.
        rows = self.all()
        rows.query.clear_where()
        return list(rows.filter(pk__in=ids))

    def _among_first(self: Any, words: Words, count: int, *, is_indexed: bool) -> list[Any]:
        """Return ids of the first ``count`` that have the words, of the first rows of all."""
        index, vendor = self.text_index, connections[self.db].vendor
        keys, order = self._order()
        with _without_words():
            most = FIRST if is_indexed else NEWEST
            rows = self.values(*dict.fromkeys(("id", *keys, *index.columns)))[:most]
            condition, parameters = _one_by_one(
                index, words, vendor, lambda name: f'newest."{name}"', is_indexed=is_indexed
            )
            statement = f"SELECT id FROM ({{rows}}) newest WHERE {condition} ORDER BY {order} LIMIT {count}"
            found: list[Any] = self._ids(rows, statement, after=parameters)
            return found

    def _through_index(self: Any, words: Words, count: int) -> list[Any]:
        """Return ids of the first ``count`` that the index has."""
        keys, order = self._order()
        rows = self.order_by().values(*dict.fromkeys(("id", *keys)))
        last = f"ORDER BY {order} LIMIT {count}"
        found: list[Any]
        if connections[self.db].vendor == "postgresql":
            # MATERIALIZED, or the database may think that it finds them sooner by reading the whole table in order.
            found = self._ids(rows, f"WITH found AS MATERIALIZED ({{rows}}) SELECT id FROM found {last}")
            return found
        # CROSS JOIN, for the same reason: SQLite then takes the tables in this order.
        name, numbers = self.text_index.name, self.text_index.map
        wanted = (
            f"SELECT m.id AS wanted FROM {name} f CROSS JOIN {numbers} m ON m.number = f.rowid WHERE {name} MATCH %s"
        )
        statement = f"SELECT id FROM ({wanted}) CROSS JOIN ({{rows}}) found ON found.id = wanted {last}"
        with _without_words():
            found = self._ids(rows, statement, before=(words.for_fts5,))
            return found

    def _order(self: Any) -> tuple[list[str], str]:
        keys = [str(name).removeprefix("-") for name in self.query.order_by]
        return keys, ", ".join(
            f"{key} DESC" if name.startswith("-") else key
            for name, key in zip(map(str, self.query.order_by), keys, strict=True)
        )

    def _ids(
        self: Any,
        rows: QuerySet[Any, Any],
        statement: str,
        *,
        before: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
    ) -> list[Any]:
        try:
            sql, given = rows.query.get_compiler(using=self.db).as_sql()
        except EmptyResultSet:
            return []
        with connections[self.db].cursor() as cursor:
            cursor.execute(statement.replace("{rows}", sql), (*before, *given, *after))
            return [row[0] for row in cursor.fetchall()]
