"""Everything that a store knows, in memory, with its indexes; and the way to change it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.providers.filesystem.listing import Listing
from perdure.providers.filesystem.lookups import Lookups
from perdure.providers.filesystem.quarantine import Quarantine
from perdure.providers.filesystem.ready_instances import ReadyInstances
from perdure.providers.filesystem.ready_work import ReadyWork
from perdure.providers.filesystem.standing import Standing
from perdure.providers.filesystem.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


class State:
    """The tables and all that is derived from them."""

    def __init__(self, orphan_grace_ms: int) -> None:
        self.quarantine = Quarantine()
        self.tables = Tables()
        self.lookups = Lookups(self.tables)
        self.standing = Standing(self.tables, self.lookups)
        self.ready_instances = ReadyInstances(
            self.tables, self.lookups, self.standing, self.quarantine, orphan_grace_ms
        )
        self.ready_work = ReadyWork(self.tables, self.lookups)
        self.listing = Listing(self.lookups, self.standing)

    def settle(self, now_ms: int) -> AbstractSet[str]:
        """Bring the schedules up to date after changes; returns the instances touched."""
        lookups = self.lookups
        instances = lookups.touched_instances
        if instances:
            lookups.touched_instances = set()
            for instance_id in instances:
                self.ready_instances.refresh(instance_id, now_ms)
                self.listing.refresh(instance_id)
        self.settle_work(now_ms)
        return instances

    def settle_work(self, now_ms: int) -> None:
        """Only what concerns work items."""
        lookups = self.lookups
        if lookups.touched_sessions:
            for session_id in lookups.touched_sessions:
                self.ready_work.refresh_session(session_id, now_ms)
            lookups.touched_sessions = set()
        if lookups.touched_work:
            for message_id in lookups.touched_work:
                self.ready_work.refresh(message_id, now_ms)
            lookups.touched_work = set()

    def load_schedules(self, now_ms: int) -> None:
        """Place everything, once, after the tables were filled."""
        lookups, tables = self.lookups, self.tables
        lookups.touched_instances, lookups.touched_sessions = set(), set()
        lookups.touched_work = set()
        for instance_id in lookups.messages:
            self.ready_instances.refresh(instance_id, now_ms)
        for session_id in tables.sessions.rows:
            self.ready_work.refresh_session(session_id, now_ms)
        for message_id in tables.work.rows:
            self.ready_work.refresh(message_id, now_ms)
        self.listing.load({*tables.instances.rows, *lookups.starts})
