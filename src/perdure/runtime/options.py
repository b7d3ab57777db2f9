"""The settings of a runtime, with defaults that suit one machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from perdure import limits
from perdure.arguments import Duration, check_flag, check_kind, check_number, to_seconds
from perdure.providers.records import TagFilter

_LEAST_NUMBERS: Final = {
    **dict.fromkeys(("activity_slots", "threads", "processes", "max_attempts"), 1),
    **dict.fromkeys(("cached_instances", "cached_events"), 1),
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
    cancel_grace: Duration = 10.0
    """Time for a cancelled activity to end by itself."""
    drain_timeout: Duration = 10.0
    """Time for running activities to end when the runtime stops."""
    turn_warn_after: Duration = limits.TURN_WARN_SECONDS
    turn_abort_after: Duration = limits.TURN_ABORT_SECONDS
    poll_interval: Duration = 30.0
    """Longest wait of one fetch. The store wakes it as soon as there is work."""
    housekeeping: bool = True
    """Announce this worker, renew its sessions, and retry Blocked instances with other code."""
    always_replay: bool = False
    """Drop every instance after every turn. Finds nondeterminism in tests."""
    run_orchestrations: bool = True
    run_activities: bool = True

    def __post_init__(self) -> None:
        check_kind(self.tags, TagFilter, "tags", "a TagFilter, as TagFilter.only('gpu')")
        if self.worker_id is not None:
            limits.check_id(self.worker_id, "worker_id")
        for name, least in _LEAST_NUMBERS.items():
            check_number(getattr(self, name), name, minimum=least)
        for name, least_seconds in _LEAST_SECONDS.items():
            to_seconds(getattr(self, name), name, minimum=least_seconds)
        for name in _FLAGS:
            check_flag(getattr(self, name), name)
