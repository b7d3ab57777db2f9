"""The states of an instance or execution."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Where an instance stands.

    ``Pending``: its start is queued. ``Blocked``: parked intact with a reason; a fixed deploy or an
    operator lets it go on. ``ContinuedAsNew``: this execution ended and the next one is queued.
    """

    PENDING = "Pending"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    BLOCKED = "Blocked"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    TERMINATED = "Terminated"
    CONTINUED_AS_NEW = "ContinuedAsNew"

    @property
    def is_final(self) -> bool:
        """The instance has ended for good."""
        return self in _FINAL

    @property
    def ends_execution(self) -> bool:
        """This execution has ended, although the instance may go on with the next one."""
        return self in _FINAL or self is Status.CONTINUED_AS_NEW


_FINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.TERMINATED})
