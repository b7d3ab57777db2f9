"""Classifies errors of the server and of the connection: repeat, reconnect or give up.

Reads SQLSTATE. For a refused connection the driver gives no SQLSTATE, only the server's text.
"""

from __future__ import annotations

import asyncio
import random
import re
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeVar

import psycopg

from perdure.errors import (
    CorruptData,
    InvalidValue,
    PerdureError,
    ProviderError,
    StoreBusy,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from perdure.logs import get_logger
from perdure.providers import rules
from perdure.providers.postgres.address import PRIMARY_WANTED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = get_logger(__name__)

_Answer = TypeVar("_Answer")


class Remedy(Enum):
    """The action that may help against an error."""

    REPEAT = auto()
    """Nothing was written; the same call on the same connection may succeed."""
    RECONNECT = auto()
    """The connection is unusable; it can be unknown whether something was written."""
    NONE = auto()


_REPEAT: Final = frozenset(
    {
        "40001",  # serialization failure
        "40P01",  # deadlock
        "55P03",  # lock not available
        "57014",  # statement timeout
        "53000",  # insufficient resources
        "53100",  # disk full
        "53200",  # out of memory
    }
)
_RECONNECT: Final = frozenset(
    {
        "0A000",  # a cached plan must not change its result type
        "25006",  # read only: the server is a replica now
        "26000",  # a prepared statement is gone
        "42P05",  # a prepared statement exists already: a pooler mixes sessions
        "53300",  # too many connections
        "57P01",  # administrator shut the server down
        "57P02",  # crash of another session
        "57P03",  # server is starting up
        "57P04",  # database dropped
        "57P05",  # idle session timeout
        "25P03",  # idle in transaction timeout
        "25P04",  # transaction timeout
    }
)
_CORRUPT: Final = frozenset({"XX001", "XX002", "22021", "22P05"})
_MISSING: Final = frozenset({"3F000", "42P01", "42883", "42704", "42703"})

_MOVED: Final = "PDMOV"
"""Raised by the trigger of a store that is marked as moved; the message is the mark."""

_REFUSED: Final = "FATAL:"
"""Part of a connection error if the server was reached and refused the connection."""
_NO_SETTINGS: Final = "unsupported startup parameter"
_SOON: Final = re.compile(
    r"too many (connections|clients)|connection slots are reserved|not accepting connections|"
    r"system is (starting up|shutting down|in recovery mode|not yet accepting connections)"
)


_PAUSE_SECONDS: Final = (0.01, 0.5)


class NotPrimary(psycopg.OperationalError):
    """The server accepts no writes: it is a standby, or the session is read-only."""


class OldPrimary(psycopg.OperationalError):
    """The server is on an older timeline than another one, or belongs to another system."""


class Backoff:
    """Pauses between tries: growing and jittered, until the time is up.

    The time counts from the first failure, so there is a second try even if the first took long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._give_up_at: float | None = None
        self._ceiling = _PAUSE_SECONDS[0]

    async def pause(self) -> bool:
        """Wait after a failure. Return False at once if there is no time left."""
        now = asyncio.get_running_loop().time()
        if self._give_up_at is None:
            self._give_up_at = now + self._seconds
        seconds = random.uniform(0, self._ceiling)
        if now + seconds > self._give_up_at:
            return False
        await asyncio.sleep(seconds)
        self._ceiling = min(2 * self._ceiling, _PAUSE_SECONDS[1])
        return True


def remedy_for(error: BaseException) -> Remedy:
    if isinstance(error, TimeoutError | OSError):
        return Remedy.RECONNECT
    if not isinstance(error, psycopg.Error):
        return Remedy.NONE
    state = error.sqlstate
    if state is None:
        # Raised by the driver: the connection broke or is closed, unless the program is wrong.
        broken = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return Remedy.RECONNECT if broken else Remedy.NONE
    if state in _REPEAT:
        return Remedy.REPEAT
    if state in _RECONNECT or state.startswith("08"):
        return Remedy.RECONNECT
    return Remedy.NONE


def is_unusable_after(error: BaseException) -> bool:
    """Return True if the connection on which the error occurred must be closed.

    If it stayed open, it would keep a stale plan, or an answer that was not awaited would be taken
    for the answer to the next statement.
    """
    return remedy_for(error) is Remedy.RECONNECT or not isinstance(error, psycopg.Error)


async def repeat(
    operation: str,
    location: str,
    seconds: float,
    attempt: Callable[[bool], Awaitable[_Answer]],
    *,
    was_sent: bool = False,
    is_commit: bool = False,
) -> _Answer:
    """Repeat ``attempt`` while that can help, but not longer than that; raise ``refusal`` then.

    ``attempt`` gets True if its statement may have run before. The error of a commit whose
    answer was lost says that it may have been applied.
    """
    backoff = Backoff(seconds)
    while True:
        try:
            return await attempt(was_sent)
        except (psycopg.Error, OSError, UnicodeDecodeError) as error:
            remedy = remedy_for(error)
            was_sent = was_sent or remedy is Remedy.RECONNECT
            if remedy is Remedy.NONE:
                raise refusal(operation, error, location) from error
            if not await backoff.pause():
                refused = refusal(operation, error, location)
                if is_commit and was_sent and isinstance(refused, ProviderError):
                    refused = _outcome_unknown(operation, refused)
                raise refused from error


def asks_for_patience(error: BaseException) -> bool:
    """Return True if the server answers and expects the same request to succeed soon."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    if state is None:
        return _is_refused(error) and _SOON.search(str(error)) is not None
    return state in _REPEAT or state in {"53300", "57P03"}


def may_change(error: BaseException) -> bool:
    """Return True if one of several servers may accept the connection soon, after a failover."""
    is_lost = remedy_for(error) is Remedy.RECONNECT
    return asks_for_patience(error) or (is_lost and not _is_refused(error))


def _is_refused(error: BaseException) -> bool:
    return isinstance(error, psycopg.OperationalError) and _REFUSED in str(error)


def _is_damage(error: BaseException) -> bool:
    """Return True if the error says that stored data cannot be read."""
    return isinstance(error, UnicodeDecodeError) or (
        isinstance(error, psycopg.Error) and error.sqlstate in _CORRUPT
    )


def violated(error: BaseException) -> str | None:
    """Return the name of the unique constraint that the write would have broken."""
    if isinstance(error, psycopg.errors.UniqueViolation):
        return error.diag.constraint_name
    return None


def refusal(operation: str, error: BaseException, location: str) -> PerdureError:
    """Return the error that the caller gets when repeating did not help."""
    log.debug("%s: %s", operation, error)
    said = f"{location}: {message_of(error)}"
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    match remedy_for(error):
        case Remedy.REPEAT if state == "53100":
            return StoreFull(operation, f"{said}; free some space, then calls succeed again")
        case Remedy.REPEAT:
            return StoreBusy(operation, said)
        case Remedy.RECONNECT if isinstance(error, NotPrimary) and operation == "open":
            return StoreRefused(operation, f"{said}{_advice(error)}")
        case Remedy.RECONNECT:
            return StoreUnavailable(operation, f"{said}{_advice(error)}")
        case Remedy.NONE:
            pass
    if _is_damage(error):
        return CorruptData(operation, said)
    if state == _MOVED:
        return rules.store_moved(location, message_of(error), operation)
    if state == "42501":
        return StoreRefused(
            operation, f"{said}; grant this role its rights with the function grant_worker"
        )
    if state in _MISSING:
        return StoreRefused(operation, f"{said}; was the schema dropped or changed by hand?")
    if state is not None and state.startswith("22"):
        return InvalidValue(f"{operation}: {said}")
    return ProviderError(operation, said)


def _advice(error: BaseException) -> str:
    if isinstance(error, NotPrimary):
        return f"; {PRIMARY_WANTED}"
    if isinstance(error, OldPrimary) or _notes_of(error):
        return ""
    if asks_for_patience(error):
        return "; try again later"
    if _is_refused(error) and _NO_SETTINGS in str(error):
        return (
            "; a pooler such as PgBouncer is between client and server and takes no settings from "
            "a client: use prepare=False, in transaction mode listen=False as well "
            "(in the URL: prepare=false&listen=false); in session mode "
            "ignore_startup_parameters = options in the settings of the pooler works too"
        )
    if _is_refused(error):
        return "; check user, password and database, and pg_hba.conf of the server"
    return "; is the server up and reachable?"


def _outcome_unknown(operation: str, error: ProviderError) -> ProviderError:
    """Return the same error with a text that says that the call may have been applied."""
    return type(error)(
        operation, f"{error.message}; it is not known whether the call was applied", retryable=True
    )


def message_of(error: BaseException) -> str:
    """Return the server's message in one line, without the details of the schema it adds.

    Notes that the pool has added to the error follow.
    """
    text = str(error)
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        hint = (error.diag.message_hint or "").strip().removesuffix(".")
        text = error.diag.message_primary + (f" ({hint})" if hint else "")
    message = " ".join(text.split()) or type(error).__name__
    return "; ".join([message, *_notes_of(error)])


def _notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])
