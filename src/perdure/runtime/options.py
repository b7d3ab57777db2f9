"""The settings of a runtime, each with its unit and a default that suits one machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from perdure import limits
from perdure.arguments import check_flag, check_kind, check_number, check_seconds
from perdure.providers.items import TagFilter

_LEAST_NUMBERS: Final = {
    **dict.fromkeys(("activity_slots", "threads", "processes", "max_attempts"), 1),
    **dict.fromkeys(("cached_instances", "cached_events"), 1),
    "sessions": 0,
}
_LEAST_SECONDS: Final = {
    **dict.fromkeys(("orchestration_lock_seconds", "activity_lock_seconds"), 0.1),
    "session_lock_seconds": 0.1,
    **dict.fromkeys(("session_idle_seconds", "poll_seconds"), 0.1),
    "idle_seconds": 0,
    **dict.fromkeys(("cancel_grace_seconds", "drain_seconds"), 0),
    **dict.fromkeys(("turn_warn_seconds", "turn_abort_seconds"), 0),
}
_FLAGS: Final = ("housekeeping", "always_replay", "run_orchestrations", "run_activities")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How a runtime works. Times are in seconds."""

    activity_slots: int = 1000
    """Activities that run at once; sync ones are also bounded by ``threads``."""
    threads: int = 32
    """Threads for sync activities."""
    processes: int = 2
    """Child processes for activities with ``executor="process"``."""
    cached_instances: int = 20_000
    """Live instances kept between turns; the least used are dropped and replayed when needed."""
    cached_events: int = 2_000_000
    """Bound on the sum of their history lengths: memory, roughly 300 bytes each."""
    idle_seconds: float = 10.0
    """A live instance that waits longer than this is dropped and its lock released."""
    orchestration_lock_seconds: float = 5.0
    activity_lock_seconds: float = 10.0
    """Locks are renewed while work goes on; this is how long a crash holds it up."""
    session_lock_seconds: float = 30.0
    session_idle_seconds: float = 300.0
    sessions: int = 10
    """Distinct sessions with activities in flight here."""
    worker_id: str | None = None
    """Stable identity: sessions survive a restart. Default: random."""
    tags: TagFilter = field(default_factory=TagFilter)
    max_attempts: int = limits.ATTEMPTS_MAX
    """Deliveries of one message before the instance is Blocked as poison."""
    cancel_grace_seconds: float = 10.0
    """Time for a cancelled activity to end by itself."""
    drain_seconds: float = 10.0
    """Time for running activities to end when the runtime stops."""
    turn_warn_seconds: float = limits.TURN_WARN_SECONDS
    turn_abort_seconds: float = limits.TURN_ABORT_SECONDS
    poll_seconds: float = 30.0
    """How long a fetch waits before it asks again; the store wakes it as soon as there is work."""
    housekeeping: bool = True
    """Announce this worker, keep its sessions, and try Blocked instances with other code."""
    always_replay: bool = False
    """Drop every instance after every turn; finds nondeterminism in tests."""
    run_orchestrations: bool = True
    run_activities: bool = True

    def __post_init__(self) -> None:
        check_kind(self.tags, TagFilter, "tags", "a TagFilter, as TagFilter.only('gpu')")
        if self.worker_id is not None:
            limits.check_id(self.worker_id, "worker_id")
        for name, least in _LEAST_NUMBERS.items():
            check_number(getattr(self, name), name, minimum=least)
        for name, least_seconds in _LEAST_SECONDS.items():
            check_seconds(getattr(self, name), name, minimum=least_seconds)
        for name in _FLAGS:
            check_flag(getattr(self, name), name)
