"""Stores of version 1: reads their files and their journal, and imports the rows.

In that version an instance had a directory with ``meta.json``, and each execution a directory with
``state.json`` and ``history.jsonl``. All names of its files differ from those of today, so both
can lie side by side: until ``store.json`` says that the new files are whole, the old ones count.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from perdure.errors import CorruptData
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.directory import layout
from perdure.providers.directory.checkpoint import SHORT_HISTORY_BYTES
from perdure.providers.directory.damage import Damaged
from perdure.providers.directory.documents import ranges, time_ms, unseal
from perdure.providers.directory.file_batch import FileBatch
from perdure.providers.directory.histories import (
    IN_FILE,
    HistoryFile,
    decode_lines,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from perdure.providers.directory.checkpoint import Files

_Row: TypeAlias = dict[str, Any]
_ExecutionId: TypeAlias = tuple[str, int]

_KEYS: Final[dict[str, Callable[[_Row], Any]]] = {
    **dict.fromkeys(("message", "tag", "work", "claim"), lambda row: row["message_id"]),
    **dict.fromkeys(
        ("instance", "progress", "custom_status", "hold", "lock"), lambda row: row["instance_id"]
    ),
    "execution": lambda row: (row["instance_id"], row["execution_id"]),
    **dict.fromkeys(("kv_store", "kv_delta"), lambda row: (row["instance_id"], row["key"])),
    "session": lambda row: row["session_id"],
    "dead_letter": lambda row: row["letter_id"],
    "worker": lambda row: row["worker"]["worker_id"],
    "moved": lambda _: "",
}
"""The kinds of rows in the journal, and the keys of their rows."""

_QUEUES: Final = {
    "message": layout.ORCHESTRATOR_QUEUE,
    "work": layout.WORKER_QUEUE,
    "dead_letter": layout.DEAD_LETTERS,
}


class _Document:
    """A file of version 1."""

    def __init__(self, data: bytes) -> None:
        """Errors: Damaged."""
        self._fields: dict[str, msgspec.Raw] = unseal(data, dict[str, msgspec.Raw])

    def get(self, name: str, default: Any = None) -> Any:
        raw = self._fields.get(name)
        return default if raw is None else msgspec.json.decode(raw)

    def payload(self, name: str) -> str | None:
        """Return a text that is shown as JSON if it is JSON."""
        raw = self._fields.get(name)
        return self.get(f"{name}_text") if raw is None else bytes(raw).decode()

    def time(self, name: str) -> int | None:
        text = self.get(name)
        return None if text is None else time_ms(text)

    def values(self, name: str) -> dict[str, _Row | None]:
        """Return the entries of ``kv_store`` or ``kv_delta``."""
        raw = self._fields.get(name)
        if raw is None:
            return {}
        entries = msgspec.json.decode(raw, type=dict[str, dict[str, msgspec.Raw] | None])
        return {key: None if each is None else _entry(each) for key, each in entries.items()}


def _entry(fields: dict[str, msgspec.Raw]) -> _Row:
    raw, text = fields.get("value"), fields.get("value_text")
    value = bytes(raw).decode() if raw is not None else msgspec.json.decode(text or b"null")
    return {"value": value, "updated_at_ms": time_ms(msgspec.json.decode(fields["updated_at"]))}


class _History:
    """Events of one execution: the first ones in a file, the rest from the journal."""

    def __init__(self, document: _Document | None = None) -> None:
        self.file: HistoryFile | None = None
        self.count = 0
        self.ids: set[int] = set()
        """Of the events in the file."""
        self.events: dict[int, str] = {}
        if document is not None and (count := document.get("event_count", 0)):
            size, is_archived = document.get("history_bytes", 0), document.get("archived", False)
            self.file = HistoryFile(size, is_archived=is_archived)
            self.count = count
            self.ids = {each for ids in ranges(document.get("events", "")) for each in ids}


class OldStore:
    """The rows of version 1, as its journal wrote them."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._root = files.root
        self._rows: dict[str, dict[Any, _Row]] = {kind: {} for kind in _KEYS}
        self._histories: dict[_ExecutionId, _History] = {}
        self._executions: dict[str, set[int]] = {}
        self._values: dict[tuple[str, str], list[_Row]] = {}
        self._changed: set[str] = set()
        """Instances that the journal changes."""
        self._last_message_id = 0
        self._nameless: set[str] = set()
        self._missing: dict[_ExecutionId, str] = {}
        self._copies = FileBatch(self._root, files=1 << 30)
        self._copied: dict[tuple[int, int], HistoryFile] = {}
        self.paths: set[str] = set()
        """Files to be removed as soon as the new ones are whole."""

    # --- files

    def load_files(self) -> None:
        """Read all files that have names of version 1."""
        for kind, queue in _QUEUES.items():
            for name in self._root.names(queue):
                if layout.is_old_entry(name):
                    self._load_entry(kind, f"{queue}/{name}")
        for name in self._root.names(layout.INSTANCES):
            if layout.is_old_instance(name):
                self._load_instance(name)

    def load_leases(self) -> None:
        """Load sessions and workers; without them all sessions are free, as after their expiry."""
        for path, kind in ((layout.SESSIONS_FILE, "session"), (layout.WORKERS_FILE, "worker")):
            try:
                for row in _Document(self._root.read(path)).get(f"{kind}s", ()):
                    self._put(kind, row)
            except FileNotFoundError:
                pass
            except Damaged as damage:
                self._files.damage.add(path, damage, None)

    def _load_entry(self, kind: str, path: str) -> None:
        try:
            document = _Document(self._root.read(path))
            for row_kind, row in _ENTRIES[kind](document):
                self._put(row_kind, row)
        except (Damaged, OSError, ValueError, LookupError) as damage:
            self._files.damage.add(path, damage, None)
        else:
            self.paths.add(path)

    def _load_instance(self, name: str) -> None:
        directory = layout.instance_directory(name)
        try:
            document = _Document(self._root.read(f"{directory}/meta.json"))
            instance_id: str = document.get("instance_id")
            if layout.instance_names(instance_id)[2] != name:
                raise Damaged(f"it holds another instance, {instance_id!r}")
            executions = {
                number: self._load_execution(directory, instance_id, number)
                for ids in ranges(document.get("executions", ""))
                for number in ids
            }
        except FileNotFoundError:
            self._nameless.add(name)
            return
        except (Damaged, OSError, ValueError) as damage:
            self._files.damage.add(directory, damage, name, is_lost=True)
            return
        for kind, row in _instance_rows(instance_id, document):
            self._put(kind, row)
        for number, execution in executions.items():
            if execution is None:
                continue
            if (found := _execution_row(instance_id, number, execution)) is not None:
                self._put("execution", found)
            self._histories[instance_id, number] = _History(execution)
        self.paths |= {directory, layout.archive_directory(name)}

    def _load_execution(self, directory: str, instance_id: str, number: int) -> _Document | None:
        path = f"{directory}/executions/{number}/state.json"
        try:
            document = _Document(self._root.read(path))
        except FileNotFoundError:
            self._missing[instance_id, number] = directory
            return None
        if (document.get("instance_id"), document.get("execution_id")) != (instance_id, number):
            raise Damaged(f"{path} holds another execution")
        return document

    def _put(self, kind: str, row: _Row) -> None:
        self._rows[kind][_KEYS[kind](row)] = row
        if kind in {"message", "work"}:
            self._last_message_id = max(self._last_message_id, row["message_id"])

    # --- the journal

    def set_moved(self, location: str) -> None:
        self._put("moved", {"location": location})

    def apply(self, record: _Row) -> None:
        """Bring in a committed record; its rows may be there already."""
        for kind, keys in record.get("drops", {}).items():
            for key in keys:
                # The key of an execution or a value is a list of the instance and a number or name.
                each: Any = tuple(key) if key.__class__ is list else key
                self._rows[kind].pop(each, None)
                if kind not in {"message", "tag", "work", "claim", "dead_letter"}:
                    self._changed.add(each[0] if each.__class__ is tuple else each)
        for row in record.get("puts", ()):
            self._put(row["row"], row)
            self._changed.add(row.get("instance_id", ""))
        for change in record.get("history", ()):
            key = (change["instance_id"], change["execution_id"])
            self._changed.add(key[0])
            if change.get("is_dropped"):
                self._histories.pop(key, None)
            history = self._histories.setdefault(key, _History())
            for event in change.get("records", ()):
                if event["event_id"] not in history.ids:
                    history.events[event["event_id"]] = event["data"]

    def _judge_gaps(self) -> None:
        """Report missing files, unless the journal tells that they were being written."""
        damage = self._files.damage
        explained = {layout.instance_names(each)[2] for each in self._changed if each}
        for name in self._nameless:
            path = layout.instance_directory(name)
            if name in explained:
                self.paths.add(path)
            else:
                damage.add(path, "meta.json is missing", name, is_lost=True)
        for (instance_id, number), directory in self._missing.items():
            if instance_id not in self._changed:
                reason = f"the file of execution {number} is missing"
                name = layout.instance_names(instance_id)[2]
                damage.add(directory, reason, name, is_lost=True)
                self.paths -= {directory, layout.archive_directory(name)}

    # --- rows of today

    def import_rows(self) -> None:
        """Add everything that is not in the database yet, and note it as changed."""
        self._judge_gaps()
        files, rows = self._files, self._rows
        instance_ids = {*rows["instance"], *rows["hold"], *rows["lock"]}
        for instance_id, number in (*rows["execution"], *self._histories):
            instance_ids.add(instance_id)
            self._executions.setdefault(instance_id, set()).add(number)
        for table in ("kv_store", "kv_delta"):
            for (instance_id, _), row in rows[table].items():
                self._values.setdefault((table, instance_id), []).append(row)
        for instance_id in sorted(instance_ids):
            if not files.damage.is_lost(instance_id):
                self._import_instance(instance_id)
        self._copies.place()
        files.histories.files.update(self._copied)
        for key, row in rows["message"].items():
            self._insert("orchestrator_queue", key, _message(row, rows["tag"].get(key, {})))
        for key, row in rows["work"].items():
            self._insert("worker_queue", key, _work(row, rows["claim"][key]))
        for key, row in rows["dead_letter"].items():
            values = {"letter_id": key, "reason": row["reason"], "dead_since": row["dead_since_ms"]}
            self._insert("dead_letters", key, values | _envelope(row["message"]))
        for key, row in rows["session"].items():
            self._insert("sessions", key, {
                "session_id": key, "owner_id": row["owner_id"],
                "locked_until": row["locked_until_ms"],
                "last_activity_at": row["last_activity_ms"],
            })  # fmt: skip
        for key, row in rows["worker"].items():
            record = msgspec.json.encode(row["worker"]).decode()
            values = {"worker_id": key, "record": record, "expires_at": row["lapses_at_ms"]}
            self._insert("workers", key, values)
        files.connection.execute(
            "UPDATE store_info SET next_message_id = max(next_message_id, ?)",
            (self._last_message_id + 1,),
        )
        if self._changed or rows["moved"]:
            location = rows["moved"].get("", {}).get("location")
            files.connection.execute("UPDATE store_info SET moved_to = ?", (location,))

    def _insert(self, table: str, key: Any, values: _Row) -> None:
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        sql = f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608 - of constants
        self._files.connection.execute(sql, tuple(values.values()))
        self._files.dirty.add((table, *key) if key.__class__ is tuple else (table, key))

    def _import_instance(self, instance_id: str) -> None:
        files, rows = self._files, self._rows
        execute = files.connection.execute
        if execute("SELECT 1 FROM instances WHERE instance_id = ?", (instance_id,)).get:
            return
        hold, lock = rows["hold"].get(instance_id, {}), rows["lock"].get(instance_id, {})
        if hold or lock:
            self._insert("instance_locks", instance_id, _lock(instance_id, hold, lock))
        executions = self._executions.get(instance_id, set())
        if instance_id not in rows["instance"] and not executions:
            return
        self._insert("instances", instance_id, self._instance(instance_id, hold))
        files.dirty.discard(("instances", instance_id))
        key = files.connection.last_insert_rowid()
        files.dirty.add(("instances", key))
        for number in executions:
            if (row := rows["execution"].get((instance_id, number))) is not None:
                self._insert("executions", (key, number), _execution(key, row))
            files.dirty.add(("executions", key, number))
            history = self._histories.get((instance_id, number))
            if history is not None:
                self._import_history(instance_id, (key, number), history)
        for table in ("kv_store", "kv_delta"):
            for row in self._values.get((table, instance_id), ()):
                entry: _Row = row.get("entry") or {}
                name = row["key"]
                values: _Row = {"instance_key": key, "key": name, "value": entry.get("value")}
                values["updated_at"] = entry.get("updated_at_ms")
                self._insert(table, (key, name), values)

    def _instance(self, instance_id: str, hold: _Row) -> _Row:
        rows = self._rows
        row, progress = rows["instance"].get(instance_id), rows["progress"].get(instance_id, {})
        custom = rows["custom_status"].get(instance_id, {})
        number = progress.get("execution_id", 0)
        execution = rows["execution"].get((instance_id, number), {})
        status = Status(execution.get("status", Status.RUNNING)).of_instance if row else None
        shown = rules.shown_status(
            status, suspended=hold.get("suspended", False), blocked=bool(hold.get("block"))
        )
        named = row or {}
        source = named if named.get("name") else named.get("start") or {}
        return {
            "instance_id": instance_id,
            "is_named": int(bool(named.get("name"))),
            "name": source.get("name"),
            "version": source.get("version"),
            "parent_instance_id": source.get("parent_instance_id"),
            "execution_id": number,
            "status": str(shown),
            "framework_version": _version(execution),
            "custom_status": custom.get("value"),
            "custom_status_version": custom.get("version", 0),
            "created_at": named.get("created_at_ms", 0),
            "updated_at": progress.get("updated_at_ms", 0),
            "completed_at": execution.get("completed_at_ms"),
        }

    def _import_history(
        self, instance_id: str, execution: tuple[int, int], history: _History
    ) -> None:
        """Import a short history as rows; copy a long, archived or damaged one as it is."""
        texts = history.events
        file = history.file
        if file is not None:
            data = self._read_history(instance_id, execution[1], file)
            try:
                if data is None or file.is_archived or len(data) > SHORT_HISTORY_BYTES:
                    raise CorruptData("open", "not a short history")
                texts = decode_lines(data, "") | texts
                if len(texts) != len(history.ids | history.events.keys()):
                    raise CorruptData("open", "events are missing")
            except CorruptData:
                self._copy_history(instance_id, execution, file)
                texts = dict.fromkeys(history.ids, IN_FILE) | texts
        self._files.connection.executemany(
            "INSERT INTO history VALUES (?, ?, ?, ?)",
            [(*execution, event_id, text) for event_id, text in texts.items()],
        )

    def _old_path(self, instance_id: str, number: int, file: HistoryFile) -> str:
        name = layout.instance_names(instance_id)[2]
        if file.is_archived:
            return layout.archived_history(name, number)
        return f"{layout.instance_directory(name)}/executions/{number}/history.jsonl"

    def _read_history(self, instance_id: str, number: int, file: HistoryFile) -> bytes | None:
        """Return the lines of a history; None if its file is missing or archived."""
        try:
            data = self._root.read(self._old_path(instance_id, number, file))
        except OSError:
            return None
        return None if file.is_archived else data[: file.size]

    def _copy_history(
        self, instance_id: str, execution: tuple[int, int], file: HistoryFile
    ) -> None:
        names, number = self._files.names, execution[1]
        name = names.name_of(instance_id)
        self._copied[execution] = file
        if not file.is_archived:
            names.add(name, instance_id, is_directory=True)
        try:
            data = self._root.read(self._old_path(instance_id, number, file))
        except OSError:
            return  # reading the history will say so
        self._copies.write(self._files.histories.path(name, number, file), data)


def _lock(instance_id: str, hold: _Row, lock: _Row) -> _Row:
    block = hold.get("block")
    return {
        "instance_id": instance_id,
        "state": 1,
        "lock_token": lock.get("lock_token"),
        "locked_until": lock.get("locked_until_ms"),
        "owner": lock.get("owner"),
        "kept": int(lock.get("is_kept", False)),
        "suspended": int(hold.get("suspended", False)),
        "not_before": hold.get("not_before_ms"),
        "block": None if block is None else msgspec.json.encode(block).decode(),
    }


def _execution(key: int, row: _Row) -> _Row:
    return {
        "instance_key": key,
        "execution_id": row["execution_id"],
        "status": row.get("status", str(Status.RUNNING)),
        "output": row.get("output"),
        "framework_version": _version(row),
        "started_at": row["started_at_ms"],
        "completed_at": row.get("completed_at_ms"),
    }


def _version(execution: _Row) -> str | None:
    version = execution.get("framework_version")
    return None if version is None else ".".join(map(str, version))


def _execution_row(instance_id: str, number: int, document: _Document) -> _Row | None:
    """Return the row of an execution; None if there is only history."""
    if document.get("status") is None:
        return None
    version = document.get("framework_version")
    return {
        "instance_id": instance_id,
        "execution_id": number,
        "status": document.get("status"),
        "output": document.payload("output"),
        "started_at_ms": document.time("started_at") or 0,
        "completed_at_ms": document.time("completed_at"),
        "framework_version": version and [int(part) for part in version.split(".")],
    }


def _instance_rows(instance_id: str, document: _Document) -> Iterable[tuple[str, _Row]]:
    base = {"instance_id": instance_id}
    created_at = document.time("created_at")
    if created_at is not None:
        names = ("name", "version", "start", "parent_instance_id")
        yield (
            "instance",
            base | {"created_at_ms": created_at} | {name: document.get(name) for name in names},
        )
    if (execution_id := document.get("execution_id")) is not None:
        updated_at = document.time("updated_at") or 0
        yield "progress", base | {"execution_id": execution_id, "updated_at_ms": updated_at}
    if version := document.get("custom_status_version", 0):
        value = document.payload("custom_status")
        yield "custom_status", base | {"value": value, "version": version}
    hold = {
        "suspended": document.get("suspended", False),
        "block": document.get("block"),
        "not_before_ms": document.time("not_before"),
    }
    if any(hold.values()):
        yield "hold", base | hold
    if (lock := document.get("lock")) is not None:
        until = time_ms(lock.pop("locked_until"))
        yield "lock", base | lock | {"locked_until_ms": until}
    for kind in ("kv_store", "kv_delta"):
        for key, entry in document.values(kind).items():
            yield kind, base | {"key": key, "entry": entry}


def _message_rows(document: _Document) -> Iterable[tuple[str, _Row]]:
    message_id = document.get("message_id")
    yield (
        "message",
        {
            "message_id": message_id,
            "message": _message_of(document),
            "visible_at_ms": document.time("visible_at"),
            "enqueued_at_ms": document.time("enqueued_at"),
        },
    )
    yield (
        "tag",
        {
            "message_id": message_id,
            "lock_token": document.get("lock_token"),
            "attempt_count": document.get("attempt_count", 0),
        },
    )


def _message_of(document: _Document) -> _Row:
    body = document.payload("body")
    if body is None:
        raise Damaged("a payload is missing")
    names = ("instance_id", "kind", "start", "timer")
    return {name: document.get(name) for name in names} | {
        "body": body,
        "visible_at_ms": document.time("asked_visible_at"),
    }


def _work_rows(document: _Document) -> Iterable[tuple[str, _Row]]:
    message_id, body = document.get("message_id"), document.payload("body")
    if body is None:
        raise Damaged("a payload is missing")
    names = ("identity", "name", "session_id", "tag")
    message = {name: document.get(name) for name in names}
    message |= {"body": body, "visible_at_ms": document.time("asked_visible_at")}
    enqueued_at = document.time("enqueued_at")
    yield "work", {"message_id": message_id, "message": message, "enqueued_at_ms": enqueued_at}
    yield (
        "claim",
        {
            "message_id": message_id,
            "visible_at_ms": document.time("visible_at"),
            "lock_token": document.get("lock_token"),
            "locked_until_ms": document.time("locked_until") or 0,
            "attempt_count": document.get("attempt_count", 0),
            "heartbeat": document.payload("heartbeat"),
        },
    )


def _letter_rows(document: _Document) -> Iterable[tuple[str, _Row]]:
    yield (
        "dead_letter",
        {
            "letter_id": document.get("letter_id"),
            "reason": document.get("reason"),
            "dead_since_ms": document.time("dead_since"),
            "message": _message_of(document),
        },
    )


_ENTRIES: Final = {"message": _message_rows, "work": _work_rows, "dead_letter": _letter_rows}


def _envelope(message: _Row) -> _Row:
    """Return the columns that messages and dead letters share."""
    start, timer = message.get("start") or {}, message.get("timer") or {}
    return {
        "instance_id": message["instance_id"],
        "kind": message["kind"],
        "body": message["body"],
        "asked_visible_at": message.get("visible_at_ms"),
        "start_name": start.get("name"),
        "start_version": start.get("version"),
        "start_parent_id": start.get("parent_instance_id"),
        "timer_execution_id": timer.get("execution_id"),
        "timer_id": timer.get("timer_id"),
    }


def _message(row: _Row, tag: _Row) -> _Row:
    return {
        "message_id": row["message_id"],
        "visible_at": row["visible_at_ms"],
        "enqueued_at": row["enqueued_at_ms"],
        "attempt_count": tag.get("attempt_count", 0),
        "lock_token": tag.get("lock_token"),
    } | _envelope(row["message"])


def _work(row: _Row, claim: _Row) -> _Row:
    message, identity = row["message"], row["message"]["identity"]
    return {
        "message_id": row["message_id"],
        "instance_id": identity["instance_id"],
        "execution_id": identity["execution_id"],
        "activity_id": identity["activity_id"],
        "name": message["name"],
        "body": message["body"],
        "session_id": message.get("session_id"),
        "tag": message.get("tag"),
        "visible_at": claim["visible_at_ms"],
        "enqueued_at": row["enqueued_at_ms"],
        "attempt_count": claim.get("attempt_count", 0),
        "state": 1,
        "wake_at": max(claim["visible_at_ms"], claim.get("locked_until_ms", 0)),
        "lock_token": claim.get("lock_token"),
        "locked_until": claim.get("locked_until_ms") or None,
        "heartbeat": claim.get("heartbeat"),
        "asked_visible_at": message.get("visible_at_ms"),
    }
