"""The status of an instance or execution."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """The status of an instance or execution.

    - ``Pending``: its start is queued.
    - ``Paused``: an operator paused it; ``resume`` lets it go on.
    - ``Blocked``: it cannot go on, and nothing of it is lost; the block holds the reason. A fixed
      deploy or an operator lets it go on.
    - ``ContinuedAsNew``: this execution has ended and the next one is queued.
    """

    PENDING = "Pending"
    RUNNING = "Running"
    PAUSED = "Paused"
    BLOCKED = "Blocked"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    TERMINATED = "Terminated"
    CONTINUED_AS_NEW = "ContinuedAsNew"

    @classmethod
    def _missing_(cls, value: object) -> Status | None:
        # Documents of version 0.1 call a paused instance Suspended.
        return cls.PAUSED if value == "Suspended" else None

    @property
    def is_final(self) -> bool:
        """True if the instance has ended."""
        return self in _FINAL

    @property
    def is_bad_end(self) -> bool:
        """True if the instance has ended without a result."""
        return self in _FINAL and self is not Status.COMPLETED

    @property
    def ends_execution(self) -> bool:
        """True if this execution has ended; the instance may go on with the next one."""
        return self in _FINAL or self is Status.CONTINUED_AS_NEW

    @property
    def of_instance(self) -> Status:
        """The status of an instance whose last execution has this one.

        Between two executions an instance is Running.
        """
        return Status.RUNNING if self is Status.CONTINUED_AS_NEW else self


_FINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.TERMINATED})
