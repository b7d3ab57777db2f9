"""Changed rows: captured while a transaction runs, written into the journal, applied again from it.

A record has the final values of the columns that its commit has changed. So applying records again,
in order, over rows that are already newer gives the newest rows: every value that changed since is
in a later record.
"""

# apsw's own stubs leave the type of a change open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import apsw
import msgspec

from perdure.providers.directory.documents import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from perdure.providers.directory.documents import Table

RowKey: TypeAlias = tuple[Any, ...]
"""The name of a table and a primary key."""
Execution: TypeAlias = tuple[int, int]
"""The key of an instance and the number of an execution."""

_encode: Final = msgspec.json.Encoder().encode
_no_change: Final = apsw.no_change


class Changes:
    """The rows that the open transaction has changed."""

    def __init__(self, connection: apsw.Connection, tables: Mapping[str, Table]) -> None:
        self._connection = connection
        self._tables = tables
        self._columns = {name: table.columns for name, table in tables.items()}
        self.rows: dict[RowKey, Any] = {}
        """The whole row of one that was added, a dict of columns of one that was changed, or None
        for one that was deleted.
        """
        self.dropped: set[Execution] = set()
        """Executions whose history was deleted; what was added since is a new history."""

    def watch(self, *, is_watching: bool) -> None:
        """Capture changes from now on, or no longer."""
        self._connection.preupdate_hook(self._note if is_watching else None)

    def clear(self) -> None:
        if self.rows:
            self.rows = {}
        if self.dropped:
            self.dropped = set()

    def encode(self, sequence: int) -> bytes:
        """Return the record of the changes."""
        if self.dropped:
            return _encode((sequence, list(self.rows.items()), list(self.dropped)))
        return _encode((sequence, list(self.rows.items())))

    def _note(self, change: Any) -> None:
        """Called by SQLite before it changes a row."""
        table = change.table_name
        positions = TABLES.get(table)
        if positions is None:  # SQLite's own
            return
        operation = change.op
        if operation == "UPDATE":
            values = change.old
            key = (table, *[values[each] for each in positions])
            known = self.rows.get(key)
            if known.__class__ is tuple:
                self.rows[key] = change.new
                return
            if known is None:
                self.rows[key] = known = {}
            columns = self._columns[table]
            for position, value in enumerate(change.update):
                if value is not _no_change:
                    known[columns[position]] = value
        elif operation == "INSERT":
            values = change.new
            self.rows[(table, *[values[each] for each in positions])] = values
        else:
            values = change.old
            self.rows[(table, *[values[each] for each in positions])] = None
            if table == "history":
                self.dropped.add((values[0], values[1]))

    # --- the other way

    def apply(self, rows: Iterable[tuple[RowKey, Any]], dropped: Iterable[Execution]) -> None:
        """Change rows as a record says. The record may have been applied before."""
        execute = self._connection.execute
        for execution in dropped:
            execute("DELETE FROM history WHERE instance_key = ? AND execution_id = ?", execution)
        rest: list[tuple[RowKey, Any]] = []
        for key, value in rows:
            if value is None:  # first: a row that was added may have its place in an index
                execute(f"DELETE FROM {key[0]} WHERE {self._where(key)}", key[1:])  # noqa: S608 - of constants
            else:
                rest.append((key, value))
        for key, value in rest:
            table = self._tables[key[0]]
            if isinstance(value, dict):
                if not value:  # each column was set to the value that it had
                    continue
                names = ", ".join(f"{name} = ?" for name in value)
                bindings = (*value.values(), *key[1:])
                execute(f"UPDATE {table.name} SET {names} WHERE {self._where(key)}", bindings)  # noqa: S608 - of constants
            elif table.name == "history":
                # An event never changes. One that is there may be in its file already.
                execute("INSERT OR IGNORE INTO history VALUES (?, ?, ?, ?)", value)
            else:
                execute(table.put, value)

    def _where(self, key: RowKey) -> str:
        return " AND ".join(f"{name} = ?" for name in self._tables[key[0]].key_columns)
