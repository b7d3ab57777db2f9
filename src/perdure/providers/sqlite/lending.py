"""The store's own connection in the hands of a transactional activity."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import apsw

from perdure.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class RaisedByCode(Exception):
    """What the code of an activity raised; it reaches the caller as it is."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


class LendableConnection(apsw.Connection):
    """Refuses what would stay behind and meet the statements of the store itself."""

    is_lent = False
    trouble: apsw.Error | None = None
    """With which the store's own disk last answered the borrower."""
    _busy_handler: Callable[[int], bool] | None = None

    def wait_with(self, busy_handler: Callable[[int], bool]) -> None:
        self._busy_handler = busy_handler
        self.set_busy_handler(busy_handler)

    def lend(self) -> None:
        self.is_lent = True
        self.trouble = None
        self.cursor_factory = _LentCursor

    def take_back(self) -> None:
        """How rows are read, and how long is waited, were the borrower's own affair."""
        self.is_lent = False
        self.cursor_factory = apsw.Cursor
        self.row_trace = self.exec_trace = self.authorizer = None
        self.convert_binding = self.convert_jsonb = None
        self.set_busy_handler(self._busy_handler)


@contextmanager
def lent(connection: apsw.Connection) -> Generator[None]:
    """While code that is not ours has it. A full or failing disk is no fault of that code."""
    assert isinstance(connection, LendableConnection)
    connection.lend()
    try:
        yield
    except BaseException as error:
        if error is connection.trouble:
            raise
        raise RaisedByCode(error) from error
    finally:
        connection.take_back()


class _LentCursor(apsw.Cursor):
    """Tells what goes wrong here from what goes wrong on other connections of the borrower."""


def _noting_trouble(name: str) -> Callable[..., Any]:
    own = getattr(apsw.Cursor, name)

    @wraps(own)
    def method(cursor: _LentCursor, *args: Any, **named: Any) -> Any:
        try:
            return own(cursor, *args, **named)
        except (apsw.FullError, apsw.IOError) as error:
            connection = cursor.connection
            assert isinstance(connection, LendableConnection)
            connection.trouble = error
            raise

    return method


for _name in ("execute", "executemany", "__next__", "fetchall", "fetchone"):
    setattr(_LentCursor, _name, _noting_trouble(_name))


def _refused_while_lent(name: str) -> Callable[..., Any]:
    own = getattr(apsw.Connection, name)

    @wraps(own)
    def method(connection: LendableConnection, *args: Any, **named: Any) -> Any:
        if connection.is_lent:
            raise UsageError(
                f"a transactional activity must not call {name}() of the store's connection: "
                "leave it out, or open a connection of your own for it"
            )
        return own(connection, *args, **named)

    return method


for _name in (
    "aclose", "close", "collation_needed", "collationneeded", "config", "deserialize",
    "preupdate_hook", "set_commit_hook", "set_profile", "set_progress_handler",
    "set_rollback_hook", "set_update_hook", "set_wal_hook", "setcommithook", "setprofile",
    "setprogresshandler", "setrollbackhook", "setupdatehook", "setwalhook", "trace_v2",
    "wal_autocheckpoint",
):  # fmt: skip
    setattr(LendableConnection, _name, _refused_while_lent(_name))
