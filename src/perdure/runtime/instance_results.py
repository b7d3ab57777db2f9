"""The built-in activities that read the state of another instance, or wait for its end.

The latter looks at the awaited instance. If that has ended, its end is the result. If not, it is
asked to notify the watcher at its end (``WatchEnd``), and the activity looks again later, because
an instance sends no notice if it is deleted or replaced, or has too many watchers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from perdure.arguments import in_seconds
from perdure.authoring.communication import instance_result, instance_state
from perdure.authoring.context import ActivityInfo, require_scope
from perdure.codec import require_open
from perdure.errors import InstanceFinished, NotFound
from perdure.limits import check_id
from perdure.model import events, work
from perdure.model.wire import envelope
from perdure.providers.records import EnqueueCondition
from perdure.runtime.attempts import LookAgain

if TYPE_CHECKING:
    from perdure.authoring.definitions import Activity
    from perdure.providers.contract import Provider
    from perdure.runtime.worker import RuntimeOptions

_LONGEST = 10
"""The longest time between two looks, in poll intervals."""


class _Note(msgspec.Struct, frozen=True):
    """Kept from one look to the next."""

    watcher: events.Watcher
    """Another one looks if this work item was copied by a rerun."""
    created_at_ms: int
    """Start of the instance that was asked to tell the watcher. If it is another one now, that
    instance was replaced."""
    looks: int


def instance_state_activity(provider: Provider) -> Activity[..., Any]:
    """Return the activity of one runtime that reads a key of the state of an instance."""

    async def read(id: str, key: str) -> Any:  # noqa: A002
        value = await provider.get_kv_value(check_id(id, "id"), key)
        if value is not None:
            require_open(value, f"state[{key!r}] of {id!r}")
        return value

    return instance_state(read)


def instance_result_activity(provider: Provider, options: RuntimeOptions) -> Activity[..., Any]:
    """Return the activity of one runtime that looks for the end of an instance."""

    async def look(id: str) -> Any:  # noqa: A002
        check_id(id, "id")
        scope = require_scope("instance().result()")
        note: _Note | None = scope.last_heartbeat(_Note)
        watcher = _watcher(scope.info, id)
        asked = None if note is None else (note.watcher, note.created_at_ms)
        while True:
            try:
                info = await provider.admin.get_instance_info(id)
                if info.status.is_final:
                    return work.instance_end(id, info.status, info.output)
                if asked != (watcher, info.created_at_ms):
                    request = work.WatchEnd(instance_id=id, watcher=watcher)
                    await provider.enqueue_for_orchestrator(
                        envelope(request), condition=EnqueueCondition.ALIVE
                    )
            except NotFound:
                return work.InstanceEnd(status=work.MISSING)
            except InstanceFinished:
                continue  # it has ended between the two calls
            looks = 1 if note is None else note.looks + 1
            delay = in_seconds(options.poll_interval) * min(2 ** (looks - 1), _LONGEST)
            raise LookAgain(delay, _Note(watcher, info.created_at_ms, looks))

    return instance_result(look)


def _watcher(info: ActivityInfo, watched_id: str) -> events.Watcher:
    return events.Watcher(
        instance_id=info.instance_id,
        execution_id=info.execution_id,
        activity_id=info.activity_id,
        seed=info.seed,
        watched_id=watched_id,
    )
