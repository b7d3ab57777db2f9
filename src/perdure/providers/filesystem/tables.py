"""All state of a store in memory: tables of frozen rows, and transactions that can be undone.

Knows no rules and no files. Whoever indexes rows listens to the tables, and so stays right whether
a row changes by a commit, by its undoing or by the replay of the journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perdure.errors import DuplicateEvent
from perdure.providers.filesystem import rows
from perdure.providers.filesystem.history import History
from perdure.providers.filesystem.rows import HistoryChange, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perdure.providers.filesystem.rows import Key, Row
    from perdure.providers.records import HistoryRecord

_Key = TypeVar("_Key", bound="Key")
_Row = TypeVar("_Row", bound="Row")


class Table(Generic[_Key, _Row]):
    """Rows by key."""

    def __init__(self, kind: type[_Row], key_of: Callable[[_Row], _Key]) -> None:
        self.tag = str(kind.__struct_config__.tag)
        self.key_of = key_of
        self.rows: dict[_Key, _Row] = {}
        self.dirty: set[_Key] = set()
        """Keys that changed since the files were last written."""
        self.on_change: Callable[[_Key, _Row | None, _Row | None], None] | None = None
        """Told (key, old, new) after each change."""

    def get(self, key: _Key) -> _Row | None:
        return self.rows.get(key)

    def set(self, key: _Key, row: _Row | None) -> _Row | None:
        """Returns what was there before."""
        old = self.rows.get(key)
        # Even without a row: a file may be left of it.
        self.dirty.add(key)
        if row is not None:
            self.rows[key] = row
        elif old is not None:
            del self.rows[key]
        else:
            return None
        if self.on_change is not None:
            self.on_change(key, old, row)
        return old


class Tables:
    """Every table of a store."""

    def __init__(self) -> None:
        self.messages = Table(rows.MessageRow, lambda row: row.message_id)
        self.tags = Table(rows.TagRow, lambda row: row.message_id)
        self.work = Table(rows.WorkRow, lambda row: row.message_id)
        self.claims = Table(rows.ClaimRow, lambda row: row.message_id)
        self.instances = Table(rows.InstanceRow, lambda row: row.instance_id)
        self.progress = Table(rows.ProgressRow, lambda row: row.instance_id)
        self.custom_statuses = Table(rows.CustomStatusRow, lambda row: row.instance_id)
        self.holds = Table(rows.HoldRow, lambda row: row.instance_id)
        self.locks = Table(rows.LockRow, lambda row: row.instance_id)
        self.executions = Table(rows.ExecutionRow, lambda row: (row.instance_id, row.execution_id))
        self.kv_store = Table(rows.KvStoreRow, lambda row: (row.instance_id, row.key))
        self.kv_delta = Table(rows.KvDeltaRow, lambda row: (row.instance_id, row.key))
        self.sessions = Table(rows.SessionRow, lambda row: row.session_id)
        self.letters = Table(rows.LetterRow, lambda row: row.letter_id)
        self.workers = Table(rows.WorkerRow, lambda row: row.worker.worker_id)
        self.moved = Table(rows.MovedRow, lambda _: "")
        self.by_tag: dict[str, Table[Any, Any]] = {
            table.tag: table for table in vars(self).values() if isinstance(table, Table)
        }
        self.histories: dict[tuple[str, int], History] = {}
        self.dirty_histories: set[tuple[str, int]] = set()
        self.on_history: Callable[[tuple[str, int], History | None, History | None], None] | None
        self.on_history = None
        self.last_message_id = 0
        self.last_letter_id = 0

    def set_history(self, key: tuple[str, int], history: History | None) -> None:
        old = self.histories.get(key)
        if history is None:
            self.histories.pop(key, None)
        else:
            self.histories[key] = history
        self.dirty_histories.add(key)
        if self.on_history is not None:
            self.on_history(key, old, history)

    def forget_dirty(self) -> None:
        """Take the files to be up to date."""
        for table in self.by_tag.values():
            table.dirty = set()
        self.dirty_histories = set()

    def apply(self, record: Record) -> None:
        """Bring in a committed record; what it says may already be there."""
        for tag, keys in record.drops.items():
            table = self.by_tag[tag]
            for key in keys:
                table.set(key, None)
        for row in record.puts:
            table = self.by_tag[str(row.__struct_config__.tag)]
            table.set(table.key_of(row), row)
            if isinstance(row, rows.MessageRow | rows.WorkRow):
                self.last_message_id = max(self.last_message_id, row.message_id)
            elif isinstance(row, rows.LetterRow):
                self.last_letter_id = max(self.last_letter_id, row.letter_id)
        for change in record.history:
            self._apply_history(change)

    def _apply_history(self, change: HistoryChange) -> None:
        key = (change.instance_id, change.execution_id)
        old = None if change.is_dropped else self.histories.get(key)
        history = old if old is not None else History()
        missing = [record for record in change.records if record.event_id not in history]
        if missing:
            self.set_history(key, history.extended(missing))
        elif change.is_dropped:
            self.set_history(key, None)


class Transaction:
    """Changes that are seen at once, and are journalled or undone together."""

    def __init__(self, tables: Tables, verb: str, now_ms: int) -> None:
        self.tables = tables
        self.verb = verb
        self.now_ms = now_ms
        self._old: dict[tuple[str, Key], Row | None] = {}
        self._old_histories: dict[tuple[str, int], History | None] = {}
        self._new_events: dict[tuple[str, int], list[HistoryRecord]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._old and not self._old_histories

    def put(self, table: Table[Any, _Row], row: _Row) -> None:
        key = table.key_of(row)
        self._old.setdefault((table.tag, key), table.set(key, row))

    def drop(self, table: Table[_Key, Any], key: _Key) -> None:
        if key in table.rows:
            self._old.setdefault((table.tag, key), table.set(key, None))

    def next_message_id(self) -> int:
        # Not undone: a gap in the numbers harms nobody, a number used twice would.
        self.tables.last_message_id += 1
        return self.tables.last_message_id

    def next_letter_id(self) -> int:
        self.tables.last_letter_id += 1
        return self.tables.last_letter_id

    def append(self, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]) -> None:
        """Add events; raises DuplicateEvent if one is there already."""
        if not records:
            return
        key = (instance_id, execution_id)
        history = self.tables.histories.get(key) or History()
        duplicate = history.first_duplicate(records)
        if duplicate is not None:
            raise DuplicateEvent(
                self.verb,
                f"event {duplicate} of {instance_id!r}, execution {execution_id}, exists already",
            )
        self._old_histories.setdefault(key, self.tables.histories.get(key))
        self._new_events.setdefault(key, []).extend(records)
        self.tables.set_history(key, history.extended(records))

    def drop_history(self, key: tuple[str, int]) -> None:
        if key in self.tables.histories:
            self._old_histories.setdefault(key, self.tables.histories[key])
            self._new_events.pop(key, None)
            self.tables.set_history(key, None)

    def undo(self) -> None:
        """Put everything back as it was."""
        for (tag, key), row in reversed(self._old.items()):
            self.tables.by_tag[tag].set(key, row)
        for key, history in self._old_histories.items():
            self.tables.set_history(key, history)
        self._old.clear()
        self._old_histories.clear()

    def record(self, sequence: int, synced: int) -> Record:
        """The journal record of what is now different."""
        puts: list[Row] = []
        drops: dict[str, list[Key]] = {}
        for tag, key in self._old:
            row = self.tables.by_tag[tag].rows.get(key)
            if row is not None:
                puts.append(row)
            else:
                drops.setdefault(tag, []).append(key)
        return Record(
            sequence=sequence,
            synced=synced,
            at_ms=self.now_ms,
            verb=self.verb,
            puts=tuple(puts),
            drops={tag: tuple(keys) for tag, keys in drops.items()},
            history=tuple(self._history_changes()),
        )

    def _history_changes(self) -> Iterable[HistoryChange]:
        for key, old in self._old_histories.items():
            events = tuple(self._new_events.get(key, ()))
            is_dropped = old is not None and self._replaces(key, old)
            if events or is_dropped:
                yield HistoryChange(
                    instance_id=key[0], execution_id=key[1], records=events, is_dropped=is_dropped
                )

    def _replaces(self, key: tuple[str, int], old: History) -> bool:
        new = self.tables.histories.get(key)
        return new is None or not new.continues(old)
