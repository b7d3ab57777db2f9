"""One attempt of an activity as its own code sees it. Safe to use from any thread."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.authoring.activity_context import ActivityInfo
from perdure.errors import UsageError

if TYPE_CHECKING:  # a scope is never written or read, so its record needs no types at run time
    from perdure.runtime.bounds import Bound  # noqa: TC004
    from perdure.runtime.executors import Executors  # noqa: TC004
    from perdure.runtime.running import Running  # noqa: TC004


class RunningScope(msgspec.Struct, eq=False):
    """Implements the port that ``perdure.heartbeat()`` and its siblings call."""

    running: Running
    _executors: Executors
    _cancelled: bool = False
    _is_heard: bool = True
    """Whether the loop knows of the last heartbeat."""
    silence: Bound | None = None
    """What ends it when it has not reported for too long."""
    store_connection: Any = None
    """Set while a transactional activity runs."""

    @property
    def info(self) -> ActivityInfo:
        item = self.running.item
        return ActivityInfo(
            instance_id=item.instance_id,
            execution_id=item.execution_id,
            orchestration_name=item.orchestration_name,
            orchestration_version=item.orchestration_version,
            activity_name=item.name,
            activity_id=item.activity_id,
            attempt=item.attempt + self.running.redelivered,
            session=item.session_id,
            tag=item.tag,
            worker_id=self._executors.worker_id,
            seed=item.seed,
        )

    def heartbeat(self, details: object) -> None:
        executors = self._executors
        raw = executors.codec.encode(details, where=f"heartbeat of {self.running.item.name}")
        self.running.told = bytes(raw).decode()
        if self._is_heard:  # else it hears of this one together with those before
            self._is_heard = False
            with contextlib.suppress(RuntimeError):  # closed: nobody listens any more
                executors.loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        self._is_heard = True
        if self.silence is not None:
            self.silence.put_off()
        self._executors.send_heartbeat(self.running)

    def last_heartbeat(self, type_: Any) -> Any:
        told = self.running.last_heartbeat
        if told is None:
            return None
        return self._executors.codec.decode(msgspec.Raw(told), type_, where="heartbeat")

    def is_cancelled(self) -> bool:
        return self._cancelled

    def connection(self) -> Any:
        if self.store_connection is None:
            raise UsageError(
                f"activity {self.running.item.name!r} has no transaction; "
                "declare it with @activity(transactional=True)"
            )
        return self.store_connection

    def cancel(self) -> None:
        self._cancelled = True
