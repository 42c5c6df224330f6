"""One rank's statistics file, wherever it may come from, checked before it is read.

What comes out is what schema.py says, or an HpctkError that names the file and what is wrong with it. Nothing is
allocated but what is there: a file never costs more memory than it is long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctk.errors import HpctkError
from hpctk.stats import plain_messages, schema
from hpctk.stats.plain_hdf5 import PlainFile
from hpctk.stats.plain_messages import Stored
from hpctk.stats.schema import TableFormat

#: A table as arrays by column.
Table = dict[str, Any]
Value = str | int | float

#: More ranks than there will be: a file that says so is damaged.
MOST_RANKS = 1 << 24
#: Attributes without which a file cannot be told from others.
_NEEDED = ("schema", "schema_version", "state", "rank", "size")
_MISSING: dict[str, Value] = {"S": "", "<i8": -1, "<f8": float("nan")}
_KINDS: dict[str, tuple[Any, str]] = {
    "S": (str, "text"),
    "<i8": (int, "a whole number"),
    "<f8": ((int, float), "a number"),
}


@dataclass(frozen=True)
class Layout:
    """Where the columns of which file lie."""

    identity: tuple[int, int, int]
    tables: dict[str, dict[str, Stored]]


@dataclass(frozen=True)
class Contents:
    """What a file says of itself, and the tables that were asked for."""

    attributes: dict[str, Value]
    environment: dict[str, str]
    progress: dict[str, Any]
    tables: dict[str, Table]
    layout: Layout


def read(path: Path, tables: Sequence[str] = ()) -> Contents:
    """Read what a rank's file says of itself, and some of its tables."""
    with opened(path) as file:
        root = file.messages(file.root)
        attributes = _checked(_attributes(root))
        links = file.links(root)
        progress_columns = _columns(file, links, schema.PROGRESS)
        progress = {name: _progress(name, values) for name, values in _values(file, progress_columns).items()}
        environment = _environment(file, links)
        # All of them, also those that nobody asked for yet: what is wrong is told now, not later.
        stored = {
            name: _columns(file, links, table) for name, table in schema.TABLES.items() if name != "progress"
        }
        stored["progress"] = progress_columns
        for name, columns in stored.items():
            _check_rows(name, columns, progress, int(attributes["size"]))
        found = {name: _values(file, stored[name], _rows(name, progress)) for name in tables}
        return Contents(attributes, environment, progress, found, Layout(file.identity, stored))


def read_tables(
    path: Path, tables: Sequence[str], progress: Mapping[str, Any], layout: Layout | None = None
) -> dict[str, Table]:
    """Read tables up to the rows that `progress` says: a file that has grown since is cut to what it was.

    Where it still is the file of `layout`, that says where they are.
    """
    with opened(path) as file:
        known = layout.tables if layout is not None and layout.identity == file.identity else {}
        links = {} if known else file.links(file.messages(file.root))
        found = {}
        for name in tables:
            table = _table(name)
            columns = known[name] if known else _columns(file, links, table)
            _check_rows(name, columns, progress, None)
            found[name] = _values(file, columns, _rows(name, progress))
    return found


def read_part(
    path: Path, table: str, progress: Mapping[str, Any], columns: Sequence[str], rows: slice
) -> Table:
    """Read some columns and rows of a table, no more."""
    with opened(path) as file:
        stored = _columns(file, file.links(file.messages(file.root)), _table(table))
        _check_rows(table, stored, progress, None)
        filled = _rows(table, progress)
        room = next(iter(stored.values())).rows
        first, last, _ = rows.indices(room if filled is None else filled)
        found = {}
        for name in columns:
            dtype = stored[name].dtype
            count = max(0, last - first)
            found[name] = file.array(
                stored[name].offset + first * dtype.itemsize if count else 0, count, dtype
            )
    return found


def read_attributes(path: Path) -> dict[str, Value | None]:
    """Read the attributes of a file's root, None for those that are not one number or text."""
    with opened(path) as file:
        return _attributes(file.messages(file.root))


def read_one_table(path: Path, table: TableFormat) -> tuple[Table, dict[str, str]]:
    """Read all rows of a table, and the environment."""
    with opened(path) as file:
        links = file.links(file.messages(file.root))
        return _values(file, _columns(file, links, table)), _environment(file, links)


@contextmanager
def opened(path: Path) -> Iterator[PlainFile]:
    """Open a file; errors in the block name it."""
    try:
        with PlainFile(path) as file:
            yield file
    except HpctkError as error:
        raise HpctkError(f"{path}: {error}") from None
    except OSError as error:
        raise HpctkError(f"{path}: cannot be read ({error.strerror or error})") from None


def _attributes(messages: Any) -> dict[str, Value | None]:
    return dict(plain_messages.attribute(data) for kind, data in messages if kind == plain_messages.ATTRIBUTE)


def _checked(found: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return a file's attributes, those that are missing too, once they are what they should be."""
    if found.get("schema") != schema.NAME:
        raise HpctkError(f"is no statistics file of hpctk (its attribute schema is not {schema.NAME!r})")
    check_version(found.get("schema_version"), schema.VERSION)
    for name in _NEEDED:
        if name not in found:
            raise HpctkError(f"lacks the attribute {name}")
    attributes = typed(found)
    rank, size, node = attributes["rank"], attributes["size"], attributes["node"]
    if not 0 <= int(rank) < int(size) <= MOST_RANKS:
        raise HpctkError(f"is damaged: it says to be of rank {rank} of {size}")
    if not -1 <= int(node) < int(size):
        raise HpctkError(f"is damaged: it says to be of node {node}, with {size} ranks")
    return attributes


def typed(found: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return all attributes that there are, known ones of their type, and "", -1 or NaN for those that are missing."""
    attributes = {name: value for name, value in found.items() if value is not None}
    for column in schema.ATTRIBUTES:
        kind, called = _KINDS[column.kind]
        if column.name not in found:
            attributes[column.name] = _MISSING[column.kind]
        elif not isinstance(found[column.name], kind):
            raise HpctkError(f"is damaged: its attribute {column.name} must be {called}")
    return attributes


def check_version(version: Any, known: int) -> None:
    """Raise HpctkError for a schema that this hpctk does not read."""
    if not isinstance(version, int) or not 1 <= version <= known:
        newer = isinstance(version, int) and version > known
        advice = "a newer hpctk wrote it: install that one" if newer else "there is no such"
        raise HpctkError(f"has schema version {version}, this hpctk reads up to {known}; {advice}")


def _environment(file: PlainFile, links: Mapping[str, int]) -> dict[str, str]:
    if links.get("environment", -1) < 0:
        return {}
    kept = _attributes(file.messages(links["environment"]))
    return {name: value for name, value in kept.items() if isinstance(value, str)}


def _table(name: str) -> TableFormat:
    if name not in schema.TABLES:
        raise HpctkError(f"has no table {name!r}; there are {', '.join(schema.TABLES)}")
    return schema.TABLES[name]


def _columns(file: PlainFile, links: Mapping[str, int], table: TableFormat) -> dict[str, Stored]:
    """Return where a table's columns lie, all as long."""
    name = table.name
    objects = file.links(file.messages(_plain(links, name)))
    found = {}
    for column in table.columns:
        called = f"{name}/{column.name}"
        messages = file.messages(_plain(objects, column.name, f"{name}/"), plain_messages.COLUMN)
        try:
            stored = plain_messages.column(messages)
        except HpctkError as error:
            raise HpctkError(f"is not as hpctk writes it: {called} {error}") from None
        text = column.kind[0] == "S"
        if stored.dtype.kind != "S" if text else stored.dtype.str != column.kind:
            raise HpctkError(f"is damaged: {called} is of type {stored.dtype.str}, not {column.kind}")
        if text and stored.dtype.itemsize > plain_messages.LONGEST_TEXT:
            raise HpctkError(f"is damaged: {called} has text of {stored.dtype.itemsize} bytes")
        found[column.name] = stored
    rows = {stored.rows for stored in found.values()}
    if len(rows) > 1:
        raise HpctkError(f"is damaged: the columns of {name} have {min(rows)} to {max(rows)} rows")
    # Columns that lie upon each other could be many times as long as the file.
    if sum(stored.rows * stored.dtype.itemsize for stored in found.values()) > file.length:
        raise HpctkError(f"is damaged: {name} is longer than the file")
    return found


def _plain(links: Mapping[str, int], name: str, group: str = "") -> int:
    if name not in links:
        raise HpctkError(f"lacks {group}{name}")
    if links[name] < 0:
        raise HpctkError(f"is not as hpctk writes it: {group}{name} is a link to elsewhere")
    return links[name]


def _progress(name: str, values: Any) -> Any:
    if len(values) != 1:
        raise HpctkError(f"is damaged: progress has {len(values)} rows instead of one")
    value = values[0].item()
    if isinstance(value, int) and value < 0:
        raise HpctkError(f"is damaged: progress says {name} = {value}")
    return value


def _rows(name: str, progress: Mapping[str, Any]) -> int | None:
    """Return how many rows of a table are filled, None for all."""
    rows = progress.get(f"{name}_rows")
    return None if rows is None else int(rows)


def _check_rows(
    name: str, columns: Mapping[str, Stored], progress: Mapping[str, Any], size: int | None
) -> None:
    room = next(iter(columns.values())).rows
    rows = _rows(name, progress)
    if rows is not None and rows > room:
        raise HpctkError(f"is damaged: progress says {rows} rows of {name}, there are {room}")
    if name == "peers" and size is not None and room != size:
        raise HpctkError(f"is damaged: it has {room} peers and {size} ranks")
    if name == "sizes" and room != schema.SIZE_BINS:
        raise HpctkError(f"is damaged: sizes has {room} rows instead of {schema.SIZE_BINS}")


def _values(file: PlainFile, columns: Mapping[str, Stored], rows: int | None = None) -> Table:
    """Read the first rows of columns, None for all."""
    table = {}
    for name, stored in columns.items():
        count = stored.rows if rows is None else rows
        table[name] = file.array(stored.offset if count else 0, count, stored.dtype)
    return table
