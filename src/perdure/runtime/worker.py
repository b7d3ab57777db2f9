"""Shared by the parts of a runtime: its settings and its store, background tasks, retry delays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from perdure import limits
from perdure.arguments import (
    Duration,
    check_flag,
    check_kind,
    check_number,
    in_seconds,
    to_seconds,
)
from perdure.errors import InvalidValue, LockLost, PerdureError, ProviderError, StoreClosed
from perdure.providers.records import KeepRule, TagFilter
from perdure.runtime.health import parse_address
from perdure.runtime.metrics import Observer, UnregisteredHandlerLog, log

if TYPE_CHECKING:
    from perdure.authoring.definitions import Registry
    from perdure.client.client import Client
    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.providers.contract import Provider

_FIRST_SECONDS = 0.05
_LONGEST_SECONDS = 3.0

_LEAST_NUMBERS: Final = {
    **dict.fromkeys(("activity_slots", "threads", "processes", "max_attempts"), 1),
    **dict.fromkeys(("cached_instances", "cached_events"), 1),
    **dict.fromkeys(("history_events_max", "history_bytes_max"), 1),
    "sessions": 0,
}
_LEAST_SECONDS: Final = {
    **dict.fromkeys(("orchestration_lock_timeout", "activity_lock_timeout"), 0.1),
    "session_lock_timeout": 0.1,
    **dict.fromkeys(("session_idle_timeout", "poll_interval"), 0.1),
    "idle_timeout": 0,
    **dict.fromkeys(("cancel_grace", "drain_timeout"), 0),
    **dict.fromkeys(("turn_warn_after", "turn_abort_after"), 0),
}
_FLAGS: Final = ("housekeeping", "always_replay", "run_orchestrations", "run_activities")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """The settings of a runtime. Times are numbers of seconds, or timedeltas."""

    activity_slots: int = 1000
    """Activities that run at once; sync ones are also bounded by ``threads``."""
    threads: int = 32
    """Threads for sync activities."""
    processes: int = 2
    """Child processes for activities with ``executor="process"``."""
    cached_instances: int = 20_000
    """Live instances kept between turns. The least recently used are dropped, and replayed when
    they are needed."""
    cached_events: int = 2_000_000
    """Limit of the sum of their history lengths. An event takes roughly 300 bytes of memory."""
    idle_timeout: Duration = 10.0
    """A live instance that waits longer than this is dropped and its lock released."""
    orchestration_lock_timeout: Duration = 5.0
    activity_lock_timeout: Duration = 10.0
    """Locks are renewed while work goes on. After a crash, other workers wait this long."""
    session_lock_timeout: Duration = 30.0
    session_idle_timeout: Duration = 300.0
    sessions: int = 10
    """Number of sessions that may have activities in flight here."""
    worker_id: str | None = None
    """A stable name lets sessions survive a restart. The default is random."""
    tags: TagFilter = field(default_factory=TagFilter)
    max_attempts: int = limits.ATTEMPTS_MAX
    """Deliveries of one message before the instance is Blocked as poison."""
    history_events_max: int = limits.HISTORY_EVENTS_MAX
    history_bytes_max: int = limits.HISTORY_BYTES_MAX
    """An instance whose history would grow past one of these is Blocked. Payloads are bounded by
    ``Codec(payload_bytes_max=...)``."""
    cancel_grace: Duration = 10.0
    """Time for a cancelled activity to end by itself."""
    drain_timeout: Duration = 10.0
    """Time for running activities to end when the runtime stops."""
    turn_warn_after: Duration = limits.TURN_WARN_SECONDS
    turn_abort_after: Duration = limits.TURN_ABORT_SECONDS
    poll_interval: Duration = 30.0
    """Longest wait of one fetch, but at most a lock timeout. The store wakes it when there is
    work."""
    housekeeping: bool = True
    """Announce this worker, renew its sessions, retry Blocked instances with other code, and delete
    ended instances that are no longer kept."""
    always_replay: bool = False
    """Drop every instance after every turn. Finds nondeterminism in tests."""
    pinned_versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """The version of an orchestration, by name, that begins if the caller names none: starts,
    children and ``continue_as_new``. Without one the latest version begins."""
    run_orchestrations: bool = True
    run_activities: bool = True
    health: str | None = None
    """HOST:PORT at which ``/livez``, ``/readyz`` and ``/metrics`` answer."""

    def __post_init__(self) -> None:
        check_kind(self.tags, TagFilter, "tags", "a TagFilter, as TagFilter.only('gpu')")
        check_kind(self.pinned_versions, Mapping, "pinned_versions", "a dict of names and versions")
        if self.worker_id is not None:
            limits.check_id(self.worker_id, "worker_id")
        for name, least in _LEAST_NUMBERS.items():
            check_number(getattr(self, name), name, minimum=least)
        for name, least_seconds in _LEAST_SECONDS.items():
            to_seconds(getattr(self, name), name, minimum=least_seconds)
        if self.health is not None:
            parse_address(self.health)
        for name in _FLAGS:
            check_flag(getattr(self, name), name)
        idle, lock = in_seconds(self.session_idle_timeout), in_seconds(self.activity_lock_timeout)
        if idle < lock / 2:
            raise InvalidValue(
                f"session_idle_timeout ({idle:g} s) is less than half of activity_lock_timeout "
                f"({lock:g} s), after which locks are renewed: a session would move while its "
                f"activity runs; set it to at least {lock / 2:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One running runtime, as its parts see it."""

    worker_id: str
    client: Client
    """The runtime itself, for activities that start or message instances."""
    provider: Provider
    registry: Registry
    codec: Codec
    clock: Clock
    options: RuntimeOptions
    observer: Observer
    unregistered: UnregisteredHandlerLog
    schedules: tuple[str, ...]
    """Ids of the schedules that it declares."""
    keep: tuple[KeepRule, ...]
    on_closed: Callable[[StoreClosed], None]
    """Called when the store has closed for good."""


class BackgroundTasks:
    """Keeps references to tasks until they end: asyncio itself keeps only weak ones."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def spawn_logged(self, answer: Awaitable[object]) -> None:
        """Await a call to the store whose failure only means that a lock expires instead."""
        task = self.spawn(log_failure(answer))
        if isinstance(answer, Coroutine):  # never awaited if the task is cancelled before it begins
            task.add_done_callback(lambda _: answer.close())

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


async def log_failure(answer: Awaitable[object]) -> None:
    """Await a call to the store; log its error instead of raising it."""
    try:
        await answer
    except LockLost as error:  # usual: the lock has ended, or another call has released it
        log.debug("%s", error)
    except PerdureError as error:
        log.info("%s", error)


class Backoff:
    """Delays that grow with each failure in a row: exponential with jitter, bounded."""

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_delay(self, *, retryable: bool) -> float:
        """Return the seconds to wait; the longest delay after an error that only people can fix."""
        self._failures = min(self._failures + 1, 10)
        if not retryable:
            return _LONGEST_SECONDS
        seconds: float = min(_FIRST_SECONDS * 2**self._failures, _LONGEST_SECONDS)
        return seconds * random.uniform(0.5, 1.0)


class FetchErrors:
    """Logs the errors of a fetch loop and delays the next fetch. No error ends the loop."""

    def __init__(self, what: str, worker: Worker) -> None:
        self._what = what
        self._on_closed = worker.on_closed
        self._backoff = Backoff()

    def reset(self) -> None:
        """Note that a fetch has succeeded."""
        self._backoff.reset()

    def delay_after(self, error: BaseException) -> float:
        """Log the error and return the seconds to wait. Raise it if it is no Exception."""
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, StoreClosed):
            self._on_closed(error)
        if isinstance(error, ProviderError):
            log.warning("cannot fetch %s: %s", self._what, error)
        else:
            log.error("cannot fetch %s", self._what, exc_info=error)
        return self._backoff.next_delay(
            retryable=isinstance(error, ProviderError) and error.retryable
        )
