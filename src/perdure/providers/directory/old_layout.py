"""Stores of version 1: reads their files and their journal, and imports the rows.

In that version an instance had a directory with ``meta.json``, and each execution a directory with
``state.json`` and ``history.jsonl``. All names of its files differ from those of today, so both
can lie side by side: until ``store.json`` says that the new files are whole, the old ones count.
A store of which a file is damaged or missing is refused as a whole, and stays as it is.

The fields of its documents have the names of today's columns, and those of its journal too, with
``_ms`` behind times. What was nested is made flat here.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from perdure.errors import CorruptData
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.directory import layout
from perdure.providers.directory.documents import (
    PAYLOADS,
    TIME_ENDINGS,
    Damaged,
    ranges,
    time_ms,
    unseal,
)
from perdure.providers.directory.histories import decode_lines, decompress

if TYPE_CHECKING:
    from perdure.providers.directory.checkpoint import Files

_Columns: TypeAlias = dict[str, Any]
_ExecutionId: TypeAlias = tuple[str, int]

_QUEUES: Final = {
    "message": layout.ORCHESTRATOR_QUEUE,
    "work": layout.WORKER_QUEUE,
    "dead_letter": layout.DEAD_LETTERS,
}
_ROWS: Final = {
    "message": "orchestrator_queue",
    "work": "worker_queue",
    "dead_letter": "dead_letters",
    "execution": "executions",
    "kv_store": "kv_store",
    "kv_delta": "kv_delta",
}
"""Kinds of rows in the journal that stand for a whole row of a table."""
_PARTS: Final = {
    "tag": ("orchestrator_queue", {"lock_token", "attempt_count"}),
    "claim": (
        "worker_queue",
        {"visible_at", "lock_token", "locked_until", "attempt_count", "heartbeat"},
    ),
    "instance": (
        "instances",
        {"name", "version", "parent_instance_id", "created_at"}
        | {"start_name", "start_version", "start_parent_id"},
    ),
    "progress": ("instances", {"execution_id", "updated_at"}),
    "custom_status": ("instances", {"custom_status", "custom_status_version"}),
    "hold": ("instance_locks", {"suspended", "block", "not_before"}),
    "lock": ("instance_locks", {"lock_token", "locked_until", "owner", "kept"}),
}
"""Kinds that stand for some columns of a row."""
_KEYS: Final = {
    "orchestrator_queue": ("message_id",),
    "worker_queue": ("message_id",),
    "dead_letters": ("letter_id",),
    "executions": ("instance_id", "execution_id"),
    "kv_store": ("instance_id", "key"),
    "kv_delta": ("instance_id", "key"),
    "instances": ("instance_id",),
    "instance_locks": ("instance_id",),
}
_NESTED: Final = {
    "start": {
        "name": "start_name", "version": "start_version", "parent_instance_id": "start_parent_id",
    },
    "timer": {"execution_id": "timer_execution_id"},
    "message": {"visible_at": "asked_visible_at"},
    "identity": {}, "entry": {}, "lock": {},
}  # fmt: skip
"""Fields whose own fields become columns, some under another name."""
_RENAMED: Final = {"is_kept": "kept"}


def _flat(fields: _Columns) -> _Columns:
    """Return the columns of a row."""
    columns: _Columns = {}
    for name, value in fields.items():
        column = name.removesuffix("_ms")
        if column in _NESTED:
            names = _NESTED[column]
            nested = _flat(value or {})
            columns |= {names.get(each, each): nested[each] for each in nested}
        elif column == "block" and isinstance(value, dict):
            columns[column] = msgspec.json.encode(value).decode()
        elif column == "framework_version" and isinstance(value, list):
            parts: list[int] = value
            columns[column] = ".".join(map(str, parts))
        else:
            columns[_RENAMED.get(column, column)] = value
    return columns


def _columns(fields: dict[str, msgspec.Raw]) -> _Columns:
    """Return the columns of a document. Errors: ValueError."""
    columns: _Columns = {}
    for name, raw in fields.items():
        if name in PAYLOADS:
            columns[name] = bytes(raw).decode()
        elif name.removesuffix("_text") in PAYLOADS:
            columns[name.removesuffix("_text")] = msgspec.json.decode(raw)
        elif name.endswith(TIME_ENDINGS):
            columns[name] = time_ms(msgspec.json.decode(raw))
        elif name in {"kv_store", "kv_delta"}:
            entries = msgspec.json.decode(raw, type=dict[str, dict[str, msgspec.Raw] | None])
            columns[name] = {key: _columns(each or {}) for key, each in entries.items()}
        elif name == "lock":
            columns[name] = _columns(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
        else:
            columns[name] = msgspec.json.decode(raw)
    return columns


class OldStore:
    """The rows of version 1, as columns of today's tables."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._root = files.root
        self._rows: dict[str, dict[Any, _Columns]] = {table: {} for table in _KEYS}
        self._histories: dict[_ExecutionId, dict[int, str]] = {}
        """The texts of the events of each execution."""
        self._missing: dict[str, set[str]] = {}
        """Files that are not there, by the name of their instance."""
        self._changed: set[str] = set()
        """Instances that the journal changes."""
        self._last_message_id = 0
        self.moved_to: str | None = None
        self.paths: set[str] = set()
        """Files to be removed as soon as the new ones are whole."""

    # --- files

    def load(self) -> None:
        """Read all files that have names of version 1. Errors: CorruptData, OSError.

        Sessions and workers are left out: they belonged to a process that has ended.
        """
        for kind, queue in _QUEUES.items():
            for name in self._root.names(queue):
                if layout.is_old_entry(name):
                    columns = _flat(self._read(f"{queue}/{name}"))
                    if columns.get("body") is None:
                        raise self._damaged(f"{queue}/{name}", "a payload is missing")
                    self._put(kind, columns)
                    self.paths.add(f"{queue}/{name}")
        for name in self._root.names(layout.INSTANCES):
            if layout.is_old_instance(name):
                self._load_instance(name)

    def _read(self, path: str) -> _Columns:
        try:
            return _columns(unseal(self._root.read(path), dict[str, msgspec.Raw]))
        except (Damaged, ValueError) as damage:
            raise self._damaged(path, damage) from damage

    def _damaged(self, path: str, reason: object) -> CorruptData:
        return CorruptData(
            "open",
            f"{self._root.path} is a store of version 1, and {path} is damaged ({reason}); "
            "restore the directory from a backup",
        )

    def _load_instance(self, name: str) -> None:
        directory = layout.instance_directory(name)
        self.paths |= {directory, layout.archive_directory(name)}
        try:
            document = self._read(f"{directory}/meta.json")
        except FileNotFoundError:
            self._missing.setdefault(name, set()).add("meta.json")
            return
        instance_id: str = document["instance_id"]
        if layout.instance_names(instance_id)[2] != name:
            raise self._damaged(directory, f"it holds another instance, {instance_id!r}")
        base = {"instance_id": instance_id}
        for table in ("kv_store", "kv_delta"):
            for key, entry in document.pop(table, {}).items():
                self._put(table, base | {"key": key} | entry)
        numbers = ranges(document.pop("executions", ""))
        lock, columns = _flat(document.pop("lock", {})), _flat(document)
        for kind in ("instance", "progress", "custom_status", "hold", "lock"):
            row = lock if kind == "lock" else columns
            if part := {each: row[each] for each in _PARTS[kind][1] if row.get(each)}:
                self._put(kind, base | part)
        for number in (each for ids in numbers for each in ids):
            try:
                self._load_execution(name, instance_id, number)
            except FileNotFoundError:
                self._missing.setdefault(name, set()).add(f"the file of execution {number}")

    def _load_execution(self, name: str, instance_id: str, number: int) -> None:
        directory = f"{layout.instance_directory(name)}/executions/{number}"
        document = self._read(f"{directory}/state.json")
        if (document.get("instance_id"), document.get("execution_id")) != (instance_id, number):
            raise self._damaged(directory, "it holds another execution")
        if document.get("status") is not None:  # else there is only history
            self._put("execution", document)
        history = self._histories[instance_id, number] = {}
        if not document.get("event_count", 0):
            return
        size, path = document.get("history_bytes", 0), f"{directory}/history.jsonl"
        try:
            if document.get("archived", False):
                path = layout.archived_history(name, number)
                data = decompress(self._root.read(path), size)
            else:
                data = self._root.read(path)
            history |= decode_lines(data[:size], path)
        except (CorruptData, zlib.error) as damage:
            raise self._damaged(path, damage) from damage
        expected = {each for ids in ranges(document.get("events", "")) for each in ids}
        if lost := expected - history.keys():
            raise self._damaged(path, f"it has no event {min(lost)}")

    # --- the journal

    def _put(self, kind: str, columns: _Columns) -> None:
        """Set a row, or the columns of a part; the other parts of the row stay."""
        table, own = _PARTS.get(kind) or (_ROWS[kind], set[str]())
        key = tuple(columns[each] for each in _KEYS[table])
        known = self._rows[table].get(key, {})
        if own:
            kept = {each: value for each, value in known.items() if each not in own}
        else:
            parts = {each for other, names in _PARTS.values() if other == table for each in names}
            kept = {each: value for each, value in known.items() if each in parts}
        self._rows[table][key] = kept | columns
        self._last_message_id = max(self._last_message_id, columns.get("message_id", 0))

    def _drop(self, kind: str, key: tuple[Any, ...]) -> None:
        table, own = _PARTS.get(kind) or (_ROWS[kind], set[str]())
        if not own:
            self._rows[table].pop(key, None)
        elif (known := self._rows[table].get(key)) is not None:
            self._rows[table][key] = {name: known[name] for name in known if name not in own}

    def apply(self, record: dict[str, Any]) -> None:
        """Bring in a committed record; its rows may be there already."""
        for kind, keys in record.get("drops", {}).items():
            for each in keys:
                key = tuple(each) if each.__class__ is list else (each,)
                if kind == "moved":
                    self.moved_to = None
                elif kind in _PARTS or kind in _ROWS:
                    self._drop(kind, key)
                    if key[0].__class__ is str:
                        self._changed.add(key[0])
        for row in record.get("puts", ()):
            kind = row["row"]
            if kind == "moved":
                self.moved_to = row["location"]
            elif kind == "custom_status":
                names = {"instance_id": "instance_id", "value": kind, "version": f"{kind}_version"}
                self._put(kind, {names[each]: row[each] for each in row if each in names})
            elif kind in _PARTS or kind in _ROWS:
                self._put(kind, _flat(row))
            self._changed.add(row.get("instance_id", ""))
        for change in record.get("history", ()):
            execution = (change["instance_id"], change["execution_id"])
            self._changed.add(execution[0])
            if change.get("is_dropped"):
                self._histories.pop(execution, None)
            history = self._histories.setdefault(execution, {})
            for event in change.get("records", ()):
                history.setdefault(event["event_id"], event["data"])

    def _check_missing(self) -> None:
        """Refuse missing files, unless the journal tells that they were being written."""
        for each in self._changed:
            if each:
                self._missing.pop(layout.instance_names(each)[2], None)
        for name, files in self._missing.items():
            raise self._damaged(layout.instance_directory(name), f"missing: {min(files)}")

    # --- rows of today

    def import_rows(self) -> None:
        """Add everything to the database, and note it as changed. Errors: CorruptData."""
        self._check_missing()
        rows, execute = self._rows, self._files.connection.execute
        executions: dict[str, set[int]] = {
            instance_id: set()
            for (instance_id,), columns in rows["instances"].items()
            if "created_at" in columns
        }
        for instance_id, number in (*rows["executions"], *self._histories):
            executions.setdefault(instance_id, set()).add(number)
        for columns in rows["instance_locks"].values():
            if any(columns[each] for each in columns if each != "instance_id"):
                self._insert("instance_locks", columns | {"state": 1})
        keys = {each: self._import_instance(each, executions[each]) for each in sorted(executions)}
        for table in ("kv_store", "kv_delta"):
            for (instance_id, _), columns in rows[table].items():
                if instance_id in keys:
                    self._insert(table, columns | {"instance_key": keys[instance_id]})
        for table in ("orchestrator_queue", "worker_queue", "dead_letters"):
            for columns in rows[table].values():
                if table == "worker_queue":
                    until = columns.get("locked_until") or None
                    wake_at = max(columns.get("visible_at", 0), until or 0)
                    columns |= {"locked_until": until, "state": 1, "wake_at": wake_at}
                if "body" in columns:  # else it is gone, and a part of it is left
                    self._insert(table, columns)
        execute(
            "UPDATE store_info SET next_message_id = max(next_message_id, ?), moved_to = ?",
            (self._last_message_id + 1, self.moved_to),
        )

    def _insert(self, table: str, columns: _Columns) -> None:
        files = self._files
        described = files.documents.tables[table]
        files.connection.execute(described.put, described.row(None, **columns))
        files.dirty.add((table, *(columns[each] for each in described.key_columns)))

    def _import_instance(self, instance_id: str, executions: set[int]) -> int:
        """Return the key of the instance."""
        connection, tables = self._files.connection, self._files.documents.tables
        columns = self._instance(instance_id)
        connection.execute(tables["instances"].put, tables["instances"].row(None, **columns))
        key = connection.last_insert_rowid()
        self._files.dirty.add(("instances", key))
        for number in executions:
            if (row := self._rows["executions"].get((instance_id, number))) is not None:
                defaults = {"status": str(Status.RUNNING), "instance_key": key}
                self._insert("executions", defaults | row)
            self._files.dirty.add(("executions", key, number))
            connection.executemany(
                "INSERT INTO history (instance_key, execution_id, event_id, data)"
                " VALUES (?, ?, ?, ?)",
                [
                    (key, number, *event)
                    for event in self._histories.get((instance_id, number), {}).items()
                ],
            )
        return key

    def _instance(self, instance_id: str) -> _Columns:
        row = self._rows["instances"].get((instance_id,), {})
        hold = self._rows["instance_locks"].get((instance_id,), {})
        number = row.get("execution_id", 0)
        execution = self._rows["executions"].get((instance_id, number), {})
        status = None
        if "created_at" in row:
            status = Status(execution.get("status", Status.RUNNING)).of_instance
        shown = rules.shown_status(
            status, suspended=bool(hold.get("suspended")), blocked=bool(hold.get("block"))
        )
        is_named = bool(row.get("name"))
        names = ("name", "version", "parent_instance_id")
        if not is_named:
            names = ("start_name", "start_version", "start_parent_id")
        name, version, parent_instance_id = (row.get(each) for each in names)
        return row | {
            "instance_id": instance_id,
            "is_named": is_named,
            "name": name,
            "version": version,
            "parent_instance_id": parent_instance_id,
            "status": str(shown),
            "framework_version": execution.get("framework_version"),
            "completed_at": execution.get("completed_at"),
        }
