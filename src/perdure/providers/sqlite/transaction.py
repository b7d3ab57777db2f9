"""Snapshots and transactions, the verbs that run in them, and statements for any number of rows.

A verb is an object, so that a search for it finds all its users. It is defined beside the function
that it runs, for example in ``commit``::

    ACK_TURN = Verb("ack_orchestration_item", run=ack, run_many=ack_many)

The provider passes it on: ``store.write(ACK_TURN, lock_token, commit)``. The writer calls
``verb.run(transaction, *args)``. ``Verb.run`` defines what is right. ``Verb.run_many`` does the
same for several calls with fewer statements, see ``commit`` for turns.

Each step of a statement releases the interpreter lock, and getting it back from a busy thread can
take milliseconds: the number of statements counts, not only the number of rows.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol
from zlib import crc32

import msgspec

from perdure.errors import CorruptData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import apsw

_READ_SEQUENCE: Final = "SELECT next_message_id FROM store_info"
_WRITE_SEQUENCE: Final = "UPDATE store_info SET next_message_id = ?"

_EVENTS: Final = """
SELECT event_id, data, checksum FROM history
WHERE instance_key = ? AND execution_id = ? AND event_id > ? ORDER BY event_id LIMIT ?
"""

_SIZES: Final = (256, 64, 16, 8, 4, 2, 1)
"""Rows of one statement: few sizes, so that each is prepared once and kept."""

_VALUES_MAX: Final = 1_300
"""Values of one statement; preparing a longer one takes longer than running it."""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(list[Any]).decode


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
        """Return the first row as a tuple, or None."""
        return self.execute(sql, bindings).fetchone()

    def rows(self, sql: str, bindings: Sequence[Any] = ()) -> list[Any]:
        return self.execute(sql, bindings).fetchall()

    def events(
        self, instance_key: int, execution_id: int, after_event_id: int = 0, limit: int = -1
    ) -> list[tuple[int, str]]:
        """Return (event id, text) of one execution in order; a limit of -1 means all of them.

        A store that keeps texts elsewhere overrides this. Errors: CorruptData, or
        UnicodeDecodeError for a text that is damaged.
        """
        rows = self.rows(_EVENTS, (instance_key, execution_id, after_event_id, limit))
        sound = [
            (event_id, data)
            for event_id, data, checksum in rows
            if checksum is None or crc32(data.encode()) == checksum
        ]
        if len(sound) < len(rows):
            sound_ids = {event_id for event_id, _ in sound}
            damaged = next(event_id for event_id, *_ in rows if event_id not in sound_ids)
            raise CorruptData("read", f"event {damaged} does not fit its checksum")
        return sound


class CommitHook(Protocol):
    """Takes part in each commit of a store, for example to write a journal first."""

    def before_commit(self) -> None:
        """Called just before COMMIT. Takes as long as it needs; an error rolls everything back."""
        ...

    def rolled_back(self) -> None:
        """Called after a rollback, also if nothing was changed."""
        ...


class Transaction(Snapshot):
    """A write transaction: it gives out new message ids, and notes which waiters to wake.

    Message ids are never used twice, not even after their message is gone: a commit that is
    repeated must not consume a younger message. Work items go by their tokens, so their ids need
    only be higher than those that are there: SQLite sees to that, and no counter is written.
    """

    __slots__ = (
        "_changes",
        "_hook",
        "_next_message_id",
        "_random_hex",
        "_tokens",
        "changed_instances",
        "execute_many",
        "holder",
        "orphan_grace_ms",
        "turns_awake",
        "turns_changed",
        "work_awake",
        "work_changed",
        "write",
    )

    keeps_checksums: ClassVar[bool] = False
    """True: events are written with a checksum, for a disk may change them."""
    first_key: ClassVar[int] = 1
    """New instances get no key below it."""

    def __init__(
        self,
        connection: apsw.Connection,
        orphan_grace_ms: int,
        random_hex: Callable[[int], str],
        hook: CommitHook | None = None,
        holder: str = "",
    ) -> None:
        super().__init__(connection)
        self.orphan_grace_ms = orphan_grace_ms
        self._random_hex = random_hex
        self._hook = hook
        self.holder = holder
        """Begins the tokens of all locks that are taken through this handle."""
        self.execute_many: Callable[..., apsw.Cursor] = connection.executemany
        # One cursor for all of them: a new one costs as much as a small statement.
        self.write: Callable[..., apsw.Cursor] = connection.cursor().execute
        """Runs a statement without rows, or one whose rows are read at once (``get``)."""
        self._changes: Callable[[], int] = connection.changes
        self._next_message_id: int | None = None
        """None as long as no message was added."""
        self._tokens = 0
        self.turns_changed = False
        """An instance may have become ready to be fetched, now or later."""
        self.work_changed = False
        """A work item may have become ready to be fetched, now or later."""
        self.turns_awake = False
        """``readiness.wake`` has run in this transaction."""
        self.work_awake = False
        """Work items whose wake time has come are ready."""
        self.changed_instances: list[str] = []

    def begin(self, now_ms: Callable[[], int]) -> None:
        self.write("BEGIN IMMEDIATE")
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
            self.write(_WRITE_SEQUENCE, (self._next_message_id,))
        if self._hook is not None:
            self._hook.before_commit()
        self.write("COMMIT")

    def end(self) -> None:
        super().end()
        if self._hook is not None:
            self._hook.rolled_back()

    def new_message_id(self) -> int:
        return self.new_message_ids(1)

    def new_message_ids(self, count: int) -> int:
        """Return the first of so many consecutive ids."""
        first = self._next_message_id
        if first is None:
            first = int(self.execute(_READ_SEQUENCE).get)
        self._next_message_id = first + count
        return first

    def new_lock_token(self) -> str:
        return self.new_lock_tokens(1)[0]

    def new_lock_tokens(self, count: int) -> list[str]:
        tokens = _new_tokens(self._random_hex, self.now, self._tokens, count)
        self._tokens += count
        return [self.holder + token for token in tokens] if self.holder else tokens

    def give_back_pages(self) -> None:
        """Make the store smaller by a few free pages; called after a deletion."""

    def held(self, sql: str, token: object) -> Any:
        """Return the only row of a lock token, or None: a value that is no token has no row."""
        try:
            return self.write(sql, (token,)).get if isinstance(token, str) else None
        except UnicodeEncodeError:
            return None

    def change(self, sql: str, bindings: Sequence[Any]) -> int:
        """Run a statement without rows and return how many rows it touched."""
        self.write(sql, bindings)
        return self._changes()


# --- verbs


class Verb:
    """An operation that runs inside a transaction or, if it only reads, inside a snapshot."""

    __slots__ = ("alone", "lasts", "name", "run", "run_many")

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        run_many: Callable[[Any, Sequence[Any]], Sequence[Any]] | None = None,
        alone: bool = False,
        lasts: bool = True,
    ) -> None:
        self.name = name
        """Name of the verb in the contract; errors carry it."""
        self.run = run
        """Takes a transaction (or snapshot) and the arguments of one call, returns its answer."""
        self.run_many = run_many
        """Takes a transaction and the arguments of several calls, each as a tuple, in order.

        Returns the answers of the first of them, as many as could be run together, perhaps none;
        an exception in the place of an answer is the error of that call. Raises
        ``PreconditionChanged`` if the calls have to be run one by one instead.
        """
        self.alone = alone
        """True: each call has a transaction of its own."""
        self.lasts = lasts
        """False: a loss of power may undo it, so its commit need not wait for the disk. It only
        takes or extends locks, whose holders are gone after a loss of power."""

    def __repr__(self) -> str:
        return f"Verb({self.name!r})"


class PreconditionChanged(Exception):
    """Calls that share a transaction cannot be written: roll back and run them one by one.

    Raised when a statement touches other rows than those that were read before, or when one of the
    calls is refused after the writing began.
    """


# --- tokens


def _new_tokens(
    random_hex: Callable[[int], str], now_ms: int, first_number: int, count: int
) -> list[str]:
    """Return new tokens: unguessable, and different by their numbers if made in one moment.

    A token begins with its time and a number, so that an index of tokens grows at one end. Tokens
    that callers make up themselves may lie anywhere in the index.
    """
    secret, moment = random_hex(16 * count), f"{now_ms & 0xFFFFFFFFFFF:011x}"
    return [
        f"{moment}{first_number + index & 0xFFFFF:05x}{secret[32 * index : 32 * index + 32]}"
        for index in range(count)
    ]


def is_text(token: str) -> bool:
    """Return True if a token can be stored as text; a value that cannot is not a token."""
    try:
        return token.isascii() or bool(token.encode())
    except UnicodeEncodeError:
        return False


# --- statements for many rows


class ManyRows:
    """A statement around VALUES with a text for each of the sizes."""

    __slots__ = ("_after", "_before", "_row", "_statements", "_whole")

    def __init__(self, before: str, columns: int, after: str = "") -> None:
        row = f"({','.join('?' * columns)})"
        self._before, self._row, self._after = before, row, after
        self._statements = [
            (size, self.of(size)) for size in _SIZES if size * columns <= _VALUES_MAX
        ]
        self._whole = dict(self._statements)

    def of(self, size: int) -> str:
        """Return the statement for so many rows."""
        return f"{self._before} VALUES {','.join([self._row] * size)} {self._after}"

    def execute(
        self, tx: Transaction, rows: Sequence[Sequence[Any]], more: Sequence[Any] = ()
    ) -> None:
        """Run it for these rows; ``more`` is bound to the parameters after the rows."""
        if (sql := self._whole.get(len(rows))) is not None:
            tx.write(sql, (*chain.from_iterable(rows), *more))
            return
        begin, left = 0, len(rows)
        for size, sql in self._statements:
            while left >= size:
                part = chain.from_iterable(rows[begin : begin + size])
                tx.write(sql, (*part, *more))
                begin += size
                left -= size

    def count(
        self, tx: Transaction, rows: Sequence[Sequence[Any]], more: Sequence[Any] = ()
    ) -> int:
        """Like ``execute``; return how many rows were touched."""
        before = tx.connection.total_changes()
        self.execute(tx, rows, more)
        return tx.connection.total_changes() - before


class ForKeys:
    """A statement for the rows of given keys: ``{given}`` stands for one key or for a list."""

    __slots__ = ("many", "one")

    def __init__(self, sql: str) -> None:
        self.one = sql.format(given="= ?1")
        self.many = sql.format(given="IN (SELECT value FROM json_each(?1))")

    def execute(self, tx: Transaction, keys: Sequence[Any], *more: Any) -> None:
        """Run it for these keys; ``more`` is bound to ?2 and so on."""
        if len(keys) == 1:
            tx.write(self.one, (keys[0], *more))
        else:
            tx.write(self.many, (as_list(keys), *more))

    def count(self, tx: Transaction, keys: Sequence[Any]) -> int:
        """Run it for these keys and return how many rows were touched."""
        self.execute(tx, keys)
        return tx.connection.changes()

    def rows(self, tx: Snapshot, keys: Sequence[Any]) -> list[Any]:
        """Return the rows that a SELECT finds."""
        if len(keys) == 1:
            return tx.rows(self.one, keys)
        return tx.rows(self.many, (as_list(keys),))


def as_list(values: Iterable[Any]) -> str:
    """Return keys, ids or tokens as a text for ``json_each(?)``. Errors: UnicodeEncodeError."""
    return _encode(list(values)).decode()


def as_object(values: dict[str, str]) -> str:
    """Return pairs as a text for ``json_each(?)``. Errors: UnicodeEncodeError."""
    return _encode(values).decode()


def rows_at_once(tx: Snapshot, sql: str, bindings: Sequence[Any]) -> list[Any]:
    """Return rows that the statement has gathered into one JSON list of lists."""
    return _decode(tx.row(sql, bindings)[0])
