"""What an activity may ask while it runs: who it is, heartbeats, whether it is still wanted.

The runtime fills the one context variable here around every attempt, in the thread or process
where the function runs.
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
    """The attempt that is running."""

    instance_id: str
    execution_id: int
    orchestration_name: str
    orchestration_version: str
    activity_name: str
    activity_id: int
    attempt: int
    """From 1. Counts failed attempts and those whose worker was gone before they ended: 1 means
    that no earlier one can have done anything."""
    session: str | None = None
    tag: str | None = None
    worker_id: str = ""
    seed: str = ""
    """Of the execution: another one when the instance is replaced, or deleted and started anew."""

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this call and for no other call: hand it to the outside."""
        call = f"{self.instance_id}/{self.execution_id}/{self.activity_id}"
        return f"{call}/{self.seed}" if self.seed else call


class ActivityScope(Protocol):
    """What the runtime provides around an attempt. Every method may be called from any thread."""

    @property
    def info(self) -> ActivityInfo: ...

    def heartbeat(self, details: object) -> None:
        """Tell that the activity lives; the details are there for the next attempt."""
        ...

    def last_heartbeat(self, type_: Any) -> Any:
        """What an earlier attempt told last, or None."""
        ...

    def is_cancelled(self) -> bool: ...

    def connection(self) -> Any:
        """The store's own connection, inside the transaction that settles the activity."""
        ...


_scope: ContextVar[ActivityScope] = ContextVar("perdure_activity")


def enter_scope(scope: ActivityScope) -> Token[ActivityScope]:
    """For the runtime: what runs in this context from here on is that attempt."""
    return _scope.set(scope)


def leave_scope(token: Token[ActivityScope]) -> None:
    _scope.reset(token)


def activity_info() -> ActivityInfo:
    """Ids and attempt of the activity that is running here."""
    return _require("activity_info()").info


def heartbeat(details: object = None) -> None:
    """Tell that the activity lives. A new attempt can read the details."""
    _require("heartbeat()").heartbeat(details)


@overload
def last_heartbeat() -> Any: ...
@overload
def last_heartbeat(type: type[T]) -> T | None: ...
def last_heartbeat(type: Any = Any) -> Any:  # noqa: A002
    """The details of the last heartbeat of an earlier attempt, or None."""
    return _require("last_heartbeat()").last_heartbeat(type)


def is_cancelled() -> bool:
    """Whether nobody wants the result any more; a long sync activity should look now and then."""
    return _require("is_cancelled()").is_cancelled()


def transaction() -> Any:
    """The store's own connection, in an activity declared with ``transactional=True``.

    What is written through it is committed together with the activity's completion: exactly once.
    On SQLite it is an ``apsw.Connection``.
    """
    return _require("transaction()").connection()


def _require(what: str) -> ActivityScope:
    scope = _scope.get(None)
    if scope is None:
        raise UsageError(
            f"{what} works only inside an activity that a runtime started; a thread that the "
            "activity starts knows of it only by contextvars.copy_context().run(...) or "
            "asyncio.to_thread(...)"
        )
    return scope
