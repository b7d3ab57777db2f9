"""A live instance: its lock, its suspended execution, and what has arrived for it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from perdure.model import work

if TYPE_CHECKING:
    from perdure.client.view import Ending, Finished
    from perdure.engine.execution import Execution
    from perdure.providers.items import OrchestratorMessage
    from perdure.runtime.commits import ExecutionFacts


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A work item for the next turn, and what its consumption settles in the store."""

    item: work.OrchestratorItem
    message_id: int | None = None
    """Set when it came through the orchestrator queue."""
    work_token: str | None = None
    """Set when it is the completion of an activity that ran here: settled with the turn."""


class LiveInstance:
    """Owned by the dispatcher. At most one turn is under way at any time."""

    __slots__ = (
        "busy",
        "counted_events",
        "execution",
        "facts",
        "finished",
        "inbox",
        "instance_id",
        "lock_token",
        "start",
        "used_at_ms",
    )

    def __init__(
        self,
        lock_token: str,
        execution: Execution,
        facts: ExecutionFacts,
        start: OrchestratorMessage | None = None,
    ) -> None:
        self.instance_id = execution.instance_id
        self.lock_token = lock_token
        self.execution = execution
        self.facts = facts
        self.start = start
        """The start message, until the first commit has created the instance in the store."""
        self.inbox: deque[Arrival] = deque()
        self.busy = False
        """A turn was run and its commit is under way."""
        self.used_at_ms = 0
        self.counted_events = 0
        """By the cache."""
        self.finished: Finished = asyncio.get_running_loop().create_future()
        """The committed end; None when the instance left this runtime before it ended."""

    @property
    def is_idle(self) -> bool:
        return not self.busy and not self.inbox

    def leave(self, ending: Ending | None = None) -> None:
        """Drop the coroutine and tell whoever waits here."""
        self.execution.close()
        if not self.finished.done():
            self.finished.set_result(ending)
