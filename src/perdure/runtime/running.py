"""One activity while this process holds its lock: what it is, where it runs, how it ended."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from perdure.model import work
from perdure.runtime.scope import RunningScope

Completion = work.ActivityCompleted | work.ActivityFailed


class Running(msgspec.Struct, eq=False, gc=False):
    """An activity between the moment it was locked and the moment its outcome is committed.

    The collector does not see these: whoever runs one lets go of ``task`` and ``scope``.
    """

    item: work.ActivityExecute
    lock_token: str
    key: tuple[str, int, int]
    """Instance, execution and activity."""
    last_heartbeat: str | None = None
    """What an earlier attempt told last."""
    redelivered: int = 0
    """How often it was begun before without an outcome, because a worker was gone."""
    told: str | None = None
    """What this attempt told last."""
    is_being_told: bool = False
    """The store is writing what it told."""
    has_begun: bool = False
    task: asyncio.Task[None] | None = None
    """Where its code runs, while it does."""
    scope: RunningScope | None = None
    completion: Completion | None = None
    """The outcome, computed but not yet committed."""
    cancelled: bool = False
    """Nobody wants the outcome any more: the lock is gone."""
    is_cut_off: bool = False
    """The worker stops and has interrupted it: if it has no outcome, it is begun again."""

    def again(self, **changes: Any) -> work.ActivityExecute:
        """The work item of another attempt, which knows of this one."""
        told = self.last_heartbeat if self.told is None else self.told
        known = {"last_heartbeat": told, "redelivered": self.redelivered}
        return msgspec.structs.replace(self.item, **(known | changes))
