"""Waiting for an instance without asking too often: the store says when something changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.render import warn
from perdure.errors import WaitTimeout
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.providers.items import InstanceInfo

# A change in another process is noticed by the store; this only bounds a missed notice.
_WATCH_MS = 2_000


async def wait_for_end(
    session: Session, instance_id: str, timeout_ms: int | None = None
) -> InstanceInfo:
    """The instance once it has ended. Says so when it is parked meanwhile."""
    has_warned = False
    deadline_ms = None if timeout_ms is None else session.now_ms() + timeout_ms
    with session.provider.watch(instance_id) as watch:
        while True:
            info = await session.info(instance_id)
            if info.status.is_final:
                return info
            if info.status is Status.BLOCKED and not has_warned:
                has_warned = True
                reason = "" if info.block is None else f": {info.block.message}"
                warn(f"{instance_id} is Blocked{reason}; still waiting")
            patience_ms = _WATCH_MS
            if deadline_ms is not None:
                patience_ms = min(patience_ms, deadline_ms - session.now_ms())
                if patience_ms <= 0:
                    raise await _timeout(session, info)
            await watch.wait(patience_ms)


async def _timeout(session: Session, info: InstanceInfo) -> WaitTimeout:
    from perdure.cli.rows import insight_of

    insight = await insight_of(session, info, await session.admin.list_workers())
    return WaitTimeout(
        f"{info.instance_id!r} has not ended in time and goes on: {insight.sentence}"
    )
