"""Functions that an activity can call: its ids, heartbeats, cancellation, transaction.

The runtime sets one context variable around every attempt, in the thread or process in which the
function runs.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from perdure.errors import UsageError

if TYPE_CHECKING:
    from contextvars import Token

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityInfo:
    """Ids and settings of the attempt that is running."""

    instance_id: str
    execution_id: int
    orchestration_name: str
    orchestration_version: str
    activity_name: str
    activity_id: int
    attempt: int
    """Counted from 1, with failed attempts and attempts whose worker died: 1 means that no earlier
    attempt has begun."""
    session: str | None = None
    tag: str | None = None
    worker_id: str = ""
    seed: str = ""
    """Seed of the execution: differs if the instance is replaced, or deleted and started again."""

    @property
    def idempotency_key(self) -> str:
        """A key for other systems: equal in all attempts of this call, different in other calls."""
        call = f"{self.instance_id}/{self.execution_id}/{self.activity_id}"
        return f"{call}/{self.seed}" if self.seed else call


class ActivityScope(Protocol):
    """Provided by the runtime around an attempt. Every method may be called from any thread."""

    @property
    def info(self) -> ActivityInfo: ...

    def heartbeat(self, details: object) -> None:
        """Report that the activity is alive; the next attempt can read the details."""
        ...

    def last_heartbeat(self, type_: Any) -> Any:
        """Return the details of the last heartbeat of an earlier attempt, or None."""
        ...

    def is_cancelled(self) -> bool: ...

    def connection(self) -> Any:
        """Return the connection of the store, in the transaction that completes the activity."""
        ...


_scope: ContextVar[ActivityScope] = ContextVar("perdure_activity")


def enter_scope(scope: ActivityScope) -> Token[ActivityScope]:
    """Make this the attempt of the current context. Called by the runtime."""
    return _scope.set(scope)


def leave_scope(token: Token[ActivityScope]) -> None:
    _scope.reset(token)


def activity_info() -> ActivityInfo:
    """Return ids and attempt of the activity that is running here."""
    return _require("activity_info()").info


def heartbeat(details: object = None) -> None:
    """Report that the activity is alive. The next attempt can read the details."""
    _require("heartbeat()").heartbeat(details)


@overload
def last_heartbeat() -> Any: ...
@overload
def last_heartbeat(type: type[T]) -> T | None: ...
def last_heartbeat(type: Any = Any) -> Any:  # noqa: A002
    """Return the details of the last heartbeat of an earlier attempt, or None."""
    return _require("last_heartbeat()").last_heartbeat(type)


def is_cancelled() -> bool:
    """Return True if the activity was cancelled. A long sync activity should check it regularly."""
    return _require("is_cancelled()").is_cancelled()


def transaction() -> Any:
    """Return the connection of the store, in an activity declared with ``transactional=True``.

    Rows written through it are committed together with the completion: exactly once.
    On SQLite it is an ``apsw.Connection``.
    """
    return _require("transaction()").connection()


def _require(what: str) -> ActivityScope:
    scope = _scope.get(None)
    if scope is None:
        raise UsageError(
            f"{what} works only inside an activity that a runtime started; in a thread that the "
            "activity starts, it works with contextvars.copy_context().run(...) or "
            "asyncio.to_thread(...)"
        )
    return scope
