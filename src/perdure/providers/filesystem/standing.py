"""What an instance is to the outside: who it is, where it stands, whether it can be found.

Pure reading of the tables; the one place that combines an instance's rows with its queued starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.providers import rules
from perdure.providers.records import InstanceInfo, StartRouting

if TYPE_CHECKING:
    from perdure.model.status import Status
    from perdure.providers.filesystem.lookups import Lookups
    from perdure.providers.filesystem.rows import ExecutionRow
    from perdure.providers.filesystem.tables import Tables


class Standing:
    """Answers about instances."""

    def __init__(self, tables: Tables, lookups: Lookups) -> None:
        self._tables = tables
        self._lookups = lookups

    # --- who it is

    def has_turns(self, instance_id: str) -> bool:
        return instance_id in self._tables.instances.rows

    def exists(self, instance_id: str) -> bool:
        """For administration: a queued start is enough."""
        return self.has_turns(instance_id) or instance_id in self._lookups.starts

    def is_known(self, instance_id: str) -> bool:
        """For a fetch: there is something to go on with."""
        return self.has_turns(instance_id) or instance_id in self._lookups.histories

    def is_there(self, instance_id: str) -> bool:
        """Whether anything at all lies under that id."""
        return (
            self.is_known(instance_id)
            or instance_id in self._lookups.messages
            or instance_id in self._lookups.work
        )

    def who(self, instance_id: str, visible_ms: int | None = None) -> StartRouting:
        """As a turn named it, else from its start; with a time only from one visible by then."""
        row = self._tables.instances.get(instance_id)
        if row is not None and row.name is not None:
            return StartRouting(
                name=row.name, version=row.version, parent_instance_id=row.parent_instance_id
            )
        start = row.start if row is not None else None
        if start is None:
            start = self._queued_start(instance_id, visible_ms)
        return StartRouting(name=rules.UNKNOWN_NAME) if start is None else start

    def parent_id(self, instance_id: str) -> str | None:
        return self._lookups.parent_of(instance_id)

    def execution_id(self, instance_id: str) -> int:
        """The current one; for history without an instance its highest; else 1."""
        progress = self._tables.progress.get(instance_id)
        if progress is not None:
            return progress.execution_id
        return max(self._lookups.histories.get(instance_id, (1,)))

    def created_at_ms(self, instance_id: str) -> int:
        row = self._tables.instances.get(instance_id)
        if row is not None:
            return row.created_at_ms
        start = self._lookups.first_start(instance_id)
        return start.enqueued_at_ms if start is not None else 0

    def _queued_start(self, instance_id: str, visible_ms: int | None) -> StartRouting | None:
        for message_id in sorted(self._lookups.starts.get(instance_id, ())):
            row = self._tables.messages.rows[message_id]
            if visible_ms is None or rules.is_visible(row.visible_at_ms, visible_ms):
                return row.message.start
        return None

    # --- where it stands

    def current_execution(self, instance_id: str) -> ExecutionRow | None:
        progress = self._tables.progress.get(instance_id)
        if progress is None:
            return None
        return self._tables.executions.get((instance_id, progress.execution_id))

    def status(self, instance_id: str) -> Status:
        execution = self.current_execution(instance_id)
        hold = self._tables.holds.get(instance_id)
        return rules.shown_status(
            execution.status if execution is not None else None,
            suspended=hold is not None and hold.suspended,
            blocked=hold is not None and hold.block is not None,
        )

    def has_ended(self, instance_id: str) -> bool:
        execution = self.current_execution(instance_id)
        return execution is not None and rules.has_ended(
            execution.status, start_queued=instance_id in self._lookups.starts
        )

    def is_locked(self, instance_id: str, now_ms: int) -> bool:
        lock = self._tables.locks.get(instance_id)
        return lock is not None and rules.is_live(lock.locked_until_ms, now_ms)

    def info(self, instance_id: str) -> InstanceInfo:
        who = self.who(instance_id)
        created_at_ms = self.created_at_ms(instance_id)
        progress = self._tables.progress.get(instance_id)
        execution = self.current_execution(instance_id)
        custom = self._tables.custom_statuses.get(instance_id)
        hold = self._tables.holds.get(instance_id)
        return InstanceInfo(
            instance_id=instance_id,
            name=who.name,
            version=who.version,
            execution_id=self.execution_id(instance_id),
            status=self.status(instance_id),
            output=execution.output if execution is not None else None,
            created_at_ms=created_at_ms,
            updated_at_ms=progress.updated_at_ms if progress is not None else created_at_ms,
            completed_at_ms=execution.completed_at_ms if execution is not None else None,
            parent_instance_id=who.parent_instance_id,
            custom_status=custom.value if custom is not None else None,
            custom_status_version=custom.version if custom is not None else 0,
            block=hold.block if hold is not None else None,
        )
