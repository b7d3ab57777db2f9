"""The readable files: rows of the engine's tables as JSON, indented, with a checksum.

The fields of a document are the columns of its table, so a new column needs no change here.
Payloads are shown as the JSON that they are whenever that gives back the very same text.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import zlib
from datetime import datetime, timedelta
from functools import lru_cache
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from perdure.providers.record_documents import NO_JSON, embed, extract, nest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import apsw

LAYOUT_VERSION: Final = 2
_CHECKSUM_BYTES: Final = len(b',"checksum":"01234567"}')
_encoder = msgspec.json.Encoder()


class Damaged(Exception):
    """A file does not hold the bytes that were written into it."""


def seal(document: Any) -> bytes:
    """Return the content of a document's file."""
    body = _encoder.encode(document)
    sealed = b'%b,"checksum":"%08x"}' % (body[:-1], zlib.crc32(body))
    return msgspec.json.format(sealed, indent=2) + b"\n"


def unseal(data: bytes, kind: Any) -> Any:
    """Return the document in a file. Errors: Damaged."""
    try:
        compact = msgspec.json.format(data, indent=-1)
        body = compact[:-_CHECKSUM_BYTES] + b"}"
        if compact[-_CHECKSUM_BYTES:] != b',"checksum":"%08x"}' % zlib.crc32(body):
            raise Damaged("the checksum does not fit")
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Damaged(str(error)) from error


# --- times and ranges as people write them; each comes back exactly

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - all are UTC, and aware ones are slower
_MILLISECOND: Final = timedelta(milliseconds=1)
_END_OF_CALENDAR_MS: Final = 253_402_300_799_999

Time: TypeAlias = str | int
"""``2026-05-04T03:02:01.000Z``, or the milliseconds where the calendar ends."""


@lru_cache(maxsize=1024)  # the columns of an instance have few different times
def time_text(time_ms: int) -> Time:
    if not 0 <= time_ms <= _END_OF_CALENDAR_MS:
        return time_ms
    return (_EPOCH + time_ms * _MILLISECOND).isoformat(timespec="milliseconds") + "Z"


def time_ms(text: Time) -> int:
    """Errors: ValueError."""
    if isinstance(text, int):
        return text
    return (datetime.fromisoformat(text[:-1]) - _EPOCH) // _MILLISECOND


def ranges_text(ids: Iterable[int]) -> str:
    """Return ascending ids as ``1-3, 5``."""
    ranges: list[list[int]] = []
    for each in ids:
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    return ", ".join(range_text(first, last) for first, last in ranges)


def range_text(first: int, last: int) -> str:
    """Return all ids between two, and these, as ``1-3``."""
    return f"{first}-{last}" if first != last else str(first)


@lru_cache(maxsize=4096)  # a store has many instances, and few different ranges
def ranges(text: str) -> tuple[range, ...]:
    """Return the ids of ``ranges_text``. Errors: ValueError."""
    if not text:
        return ()
    parts = [part.partition("-") for part in text.split(", ")]
    return tuple(range(int(first), int(last or first) + 1) for first, _, last in parts)


# --- tables

TABLES: Final = {
    "store_info": 1,
    "instances": 1,
    "executions": 2,
    "history": 3,
    "kv_store": 2,
    "kv_delta": 2,
    "orchestrator_queue": 1,
    "instance_locks": 1,
    "worker_queue": 1,
    "sessions": 1,
    "dead_letters": 1,
    "workers": 1,
}
"""The tables of the engine, and how many of their first columns are the primary key."""

PAYLOADS: Final = frozenset(
    {"block", "body", "custom_status", "heartbeat", "output", "record", "value"}
)
TIME_ENDINGS: Final = ("_at", "_until", "_since", "not_before")
_PLAIN: Final = "plain"
_TIME: Final = "time"
_PAYLOAD: Final = "payload"
_DERIVED_COLUMN: Final = "derived"
_DERIVED: Final = {
    "instance_locks": frozenset(
        {"instance_key", "name", "version", "pending_since", "state", "wake_at", "ready_at"}
        | {"ready_id"}
    ),
}
"""Columns that follow from the others; no file holds them."""


class Table:
    """The columns of a table, and its rows as parts of documents."""

    def __init__(self, connection: apsw.Connection, name: str) -> None:
        self.name = name
        described: list[Any] = connection.execute(f"PRAGMA table_info({name})").fetchall()
        described = [row for row in described if (name, row[1]) != ("history", "checksum")]
        self.columns = [row[1] for row in described]
        self.key_columns = self.columns[: TABLES[name]]
        self.has_number = [row[2] for row in described if row[5]] == ["INTEGER"]
        """The primary key is a number, which is SQLite's row id too."""
        names = ", ".join(self.columns)
        self.select = f"SELECT {names} FROM {name} "  # noqa: S608 - of constants
        marks = ", ".join("?" * len(self.columns))
        self.put = f"INSERT OR REPLACE INTO {name} ({names}) VALUES ({marks})"  # noqa: S608 - of constants
        self._defaults = [_default(row) for row in described]
        self._kinds = [_kind(name, column) for column in self.columns]

    def fields(self, *hidden: str) -> list[tuple[Any, ...]]:
        """Return (name, type, default) of each column, for a struct. Omitted: ``hidden`` ones."""
        fields: list[tuple[Any, ...]] = []
        for name, kind in zip(self.columns, self._kinds, strict=True):
            if name in hidden or kind is _DERIVED_COLUMN:
                continue
            if kind is _PAYLOAD:
                fields += [(name, msgspec.Raw, NO_JSON), (f"{name}_text", str | None, None)]
            elif kind is _TIME:
                fields.append((name, Time | None, None))
            else:
                fields.append((name, int | str | None, None))
        return fields

    def values(self, row: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of a row for its struct; those with the default value are left out."""
        fields: dict[str, Any] = {}
        for name, kind, default, value in zip(
            self.columns, self._kinds, self._defaults, row, strict=True
        ):
            if value is None or kind is _DERIVED_COLUMN:
                continue
            if kind is _TIME:
                fields[name] = time_text(value)
            elif kind is _PAYLOAD:
                json, text = embed(value)
                if text is None:
                    fields[name] = json
                else:
                    fields[f"{name}_text"] = text
            elif value != default:
                fields[name] = value
        return fields

    def row(self, document: Any, **given: Any) -> tuple[Any, ...]:
        """Return the row of a struct; ``given`` has the columns that the struct does not hold.

        Errors: ValueError.
        """
        values: list[Any] = []
        for name, kind, default in zip(self.columns, self._kinds, self._defaults, strict=True):
            if name in given:
                values.append(given[name])
                continue
            value = getattr(document, name, None)
            if kind is _PAYLOAD:
                value = extract(value or NO_JSON, getattr(document, f"{name}_text", None))
            elif value is None:
                value = default
            elif kind is _TIME:
                value = time_ms(value)
            values.append(value)
        return tuple(values)


def _kind(table: str, column: str) -> str:
    if column in _DERIVED.get(table, ()):
        return _DERIVED_COLUMN
    if column in PAYLOADS:
        return _PAYLOAD
    return _TIME if column.endswith(TIME_ENDINGS) else _PLAIN


def _default(described: Any) -> Any:
    """Return the default of a column that is never NULL: a number is 0 if it is left out."""
    _, _, kind, is_required, _, is_key = described
    return 0 if is_required and kind == "INTEGER" and not is_key else None


# --- documents


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event inside the document of its execution."""

    event_id: int
    event: msgspec.Raw = NO_JSON
    text: str | None = None


def history(events: Iterable[tuple[Any, ...]]) -> msgspec.Raw:
    """Return a history, of which each row ends with the id and the text of an event, as JSON."""
    texts = [(event_id, data.encode()) for *_, event_id, data in events]
    if are_json([data for _, data in texts]):
        return msgspec.Raw(
            b"[%b]" % b",".join([b'{"event_id":%d,"event":%b}' % each for each in texts])
        )
    return msgspec.Raw(_encoder.encode([_event(each, data.decode()) for each, data in texts]))


def are_json(texts: list[bytes]) -> bool:
    """Return True if ``embed`` would show each of the texts as JSON; cheaper than one by one."""
    joined = b"[%b]" % b",".join(texts)
    nested = nest(joined)
    try:
        return (
            msgspec.json.format(nested, indent=-1) == nested
            and [bytes(each) for each in _raw_list.decode(joined)] == texts
        )
    except (msgspec.MsgspecError, RecursionError):
        return False


def _event(event_id: int, data: str) -> Event:
    json, text = embed(data)
    return Event(event_id=event_id, event=json, text=text)


def history_texts(json: msgspec.Raw) -> dict[int, str]:
    """Return the texts in ``history`` by event id."""
    if json == NO_JSON:
        return {}
    return {each.event_id: extract(each.event, each.text) or "" for each in _events.decode(json)}


_raw_list = msgspec.json.Decoder(list[msgspec.Raw])
_events = msgspec.json.Decoder(list[Event])


class StoreDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of ``store.json``."""

    format_version: int
    layout_version: int
    created_at: Time
    moved_to: str | None = None
    checkpoint: int = 0
    """The files hold every commit up to this sequence number of the journal."""
    last_message_id: int = 0
    last_letter_id: int = 0
    clock_was_at: int | None = None
    clock_set_to: int | None = None


class Documents:
    """The structs of all documents, made from the columns of the tables."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.tables = {name: Table(connection, name) for name in TABLES}
        execution: Any = _struct(
            "Execution",
            self.tables["executions"].fields("instance_key"),
            ("events", str, ""),  # ranges of event ids
            ("history", msgspec.Raw, NO_JSON),  # if it is short: a list of Event
            ("history_bytes", int, 0),  # else: of its file; later bytes are left from a crash
            ("archived", bool, False),
        )
        lock: Any = _struct("Lock", self.tables["instance_locks"].fields("instance_id"))
        kv: Any = _struct("Value", self.tables["kv_store"].fields("instance_key", "key"))
        self.execution: Any = execution
        self.lock: Any = lock
        self.value: Any = kv
        self.instance: Any = _struct(
            "Instance",
            self.tables["instances"].fields(),
            ("lock", lock | None, None),
            ("executions", GenericAlias(tuple, (execution, ...)), ()),  # of a small instance
            ("execution_ids", str, ""),  # else ranges of ids, each with a document of its own
            ("kv_store", GenericAlias(dict, (str, kv)), {}),
            ("kv_delta", GenericAlias(dict, (str, kv)), {}),
        )
        self.entries: dict[str, Any] = {
            name: _struct(name, self.tables[name].fields())
            for name in ("orchestrator_queue", "worker_queue", "dead_letters")
        }
        self.lists: dict[str, Any] = {
            name: _list_struct(name, self.tables[name]) for name in ("sessions", "workers")
        }


def _struct(name: str, fields: Sequence[tuple[Any, ...]], *more: tuple[Any, ...]) -> Any:
    return msgspec.defstruct(name, [*fields, *more], frozen=True, kw_only=True, omit_defaults=True)


def _list_struct(name: str, table: Table) -> Any:
    member = _struct(name, table.fields())
    return _struct(f"All{name}", [("rows", GenericAlias(tuple, (member, ...)), ())])
