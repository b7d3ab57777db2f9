"""Waiting for an instance without asking too often: the store says when something changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.render import warn
from perdure.errors import WaitTimeout
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.cli.session import Session
    from perdure.providers.items import InstanceInfo

# A change in another process is noticed by the store; this only bounds a missed notice.
_WATCH_MS = 2_000


async def wait_for_end(
    session: Session, instance_id: str, timeout_ms: int | None = None
) -> InstanceInfo:
    """The instance once it has ended. Says so when it is parked meanwhile."""
    warned = False

    def has_ended(info: InstanceInfo) -> bool:
        nonlocal warned
        if info.status is Status.BLOCKED and not warned:
            warned = True
            reason = "" if info.block is None else f": {info.block.message}"
            warn(f"{instance_id} is Blocked{reason}; still waiting")
        return info.status.is_final

    return await wait_until(session, instance_id, has_ended, timeout_ms)


async def wait_until(
    session: Session,
    instance_id: str,
    is_enough: Callable[[InstanceInfo], bool],
    timeout_ms: int | None = None,
) -> InstanceInfo:
    deadline_ms = None if timeout_ms is None else session.now_ms() + timeout_ms
    with session.provider.watch(instance_id) as watch:
        info = await session.info(instance_id)
        while not is_enough(info):
            patience_ms = _WATCH_MS
            if deadline_ms is not None:
                patience_ms = min(patience_ms, deadline_ms - session.now_ms())
                if patience_ms <= 0:
                    raise WaitTimeout(f"{instance_id!r} has not ended in time; it goes on")
            await watch.wait(patience_ms)
            info = await session.info(instance_id)
    return info
