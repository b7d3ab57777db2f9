"""What has changed since the readable files were last written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.providers.filesystem.tables import Tables


@dataclass(slots=True)
class Dirty:
    """Keys of the files that are out of date."""

    instances: set[str] = field(default_factory=set[str])
    executions: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    messages: set[int] = field(default_factory=set[int])
    work: set[int] = field(default_factory=set[int])
    letters: set[int] = field(default_factory=set[int])
    sessions: bool = False
    workers: bool = False
    store: bool = False

    def __bool__(self) -> bool:
        return bool(
            self.instances
            or self.executions
            or self.messages
            or self.work
            or self.letters
            or self.sessions
            or self.workers
            or self.store
        )

    def add(self, other: Dirty) -> None:
        self.instances |= other.instances
        self.executions |= other.executions
        self.messages |= other.messages
        self.work |= other.work
        self.letters |= other.letters
        self.sessions |= other.sessions
        self.workers |= other.workers
        self.store |= other.store


def take_dirty(tables: Tables) -> Dirty:
    """What the tables have collected; they start to collect anew."""
    executions = tables.executions.dirty | tables.dirty_histories
    dirty = Dirty(
        instances=set[str]().union(
            tables.instances.dirty,
            tables.progress.dirty,
            tables.custom_statuses.dirty,
            tables.holds.dirty,
            tables.locks.dirty,
            (instance_id for instance_id, _ in executions),
            (instance_id for instance_id, _ in tables.kv_store.dirty),
            (instance_id for instance_id, _ in tables.kv_delta.dirty),
        ),
        executions=executions,
        messages=tables.messages.dirty | tables.tags.dirty,
        work=tables.work.dirty | tables.claims.dirty,
        letters=tables.letters.dirty,
        sessions=bool(tables.sessions.dirty),
        workers=bool(tables.workers.dirty),
        store=bool(tables.moved.dirty),
    )
    tables.forget_dirty()
    return dirty
