"""What an operation works with: one consistent look at the file, or a share in one commit."""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.providers.sqlite.tokens import new_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import apsw

_READ_SEQUENCE: Final = "SELECT next_message_id FROM store_info"
_WRITE_SEQUENCE: Final = "UPDATE store_info SET next_message_id = ?"


class Snapshot:
    """A read transaction, and the time at which it began."""

    __slots__ = ("connection", "execute", "now")

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.execute: Callable[..., apsw.Cursor] = connection.execute
        self.now = 0

    def begin(self, now_ms: Callable[[], int]) -> None:
        self.execute("BEGIN")
        self.now = now_ms()

    def end(self) -> None:
        # Some errors, a full disk among them, have rolled back already.
        if self.connection.in_transaction:
            self.execute("ROLLBACK")

    def row(self, sql: str, bindings: Sequence[Any] = ()) -> Any:
        """The first row as a tuple, or None."""
        return self.execute(sql, bindings).fetchone()

    def held(self, sql: str, token: object) -> Any:
        """The row that a lock token names, or None; whatever cannot be a token names nothing."""
        try:
            if isinstance(token, str):
                return self.execute(sql, (token,)).fetchone()
        except UnicodeEncodeError:
            pass
        return None

    def rows(self, sql: str, bindings: Sequence[Any] = ()) -> list[Any]:
        return self.execute(sql, bindings).fetchall()


class Transaction(Snapshot):
    """A write transaction: fresh message ids, and a note of who has to be woken afterwards.

    Message ids are never used twice, not even after their message is gone: a commit that is
    repeated must not consume a younger message. Work items go by their tokens, so their ids need
    only be higher than those that are there: SQLite sees to that, and no counter is written.
    """

    __slots__ = (
        "_next_message_id",
        "_tokens",
        "_write",
        "changed_instances",
        "execute_many",
        "orphan_grace_ms",
        "turns_awake",
        "turns_changed",
        "work_awake",
        "work_changed",
    )

    def __init__(self, connection: apsw.Connection, orphan_grace_ms: int) -> None:
        super().__init__(connection)
        self.orphan_grace_ms = orphan_grace_ms
        self.execute_many: Callable[..., apsw.Cursor] = connection.executemany
        # For statements without rows: a cursor for each of them costs as much as a small one.
        self._write: Callable[..., apsw.Cursor] = connection.cursor().execute
        self._next_message_id: int | None = None
        """None as long as no message was added."""
        self._tokens = 0
        self.turns_changed = False
        """An instance may have become ready to be fetched, now or later."""
        self.work_changed = False
        """A work item may have become ready to be fetched, now or later."""
        self.turns_awake = False
        """Instances whose time has come by ``now`` have been looked at."""
        self.work_awake = False
        """Work items whose time has come by ``now`` have been looked at."""
        self.changed_instances: list[str] = []

    def begin(self, now_ms: Callable[[], int]) -> None:
        self._write("BEGIN IMMEDIATE")
        # Read after the wait for other writers: a lease granted now must start now.
        self.now = now_ms()
        self._next_message_id = None
        self.turns_changed = False
        self.work_changed = False
        self.turns_awake = False
        self.work_awake = False
        self.changed_instances = []

    def commit(self) -> None:
        if self._next_message_id is not None:
            self._write(_WRITE_SEQUENCE, (self._next_message_id,))
        self._write("COMMIT")

    def new_message_id(self) -> int:
        return self.new_message_ids(1)

    def new_message_ids(self, count: int) -> int:
        """The first of so many ids in a row."""
        first = self._next_message_id
        if first is None:
            first = int(self.execute(_READ_SEQUENCE).get)
        self._next_message_id = first + count
        return first

    def new_lock_token(self) -> str:
        return self.new_lock_tokens(1)[0]

    def new_lock_tokens(self, count: int) -> list[str]:
        tokens = new_tokens(self.now, self._tokens, count)
        self._tokens += count
        return tokens

    def change(self, sql: str, bindings: Sequence[Any]) -> int:
        """Run it and say how many rows it touched."""
        self._write(sql, bindings)
        return self.connection.changes()
