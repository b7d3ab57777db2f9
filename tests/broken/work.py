"""Faults in the worker queue and in sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from model import ModelProvider, rules, validation
from perdure.errors import LockLost
from perdure.providers.records import TagFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.records import (
        FetchedWork,
        OrchestratorMessage,
        SessionFetch,
        WorkerMessage,
    )


class AcceptsZombieCompletions(ModelProvider):
    """Settling deletes by token and does not look whether anything was deleted."""

    async def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> None:
        try:
            await super().ack_work_item(lock_token, completion, retry)
        except LockLost:
            if completion is None:
                raise
            self._store.add_message(completion, self._store.clock.now_ms())


class DeletesBeforeCompleting(ModelProvider):
    """The item is deleted first; if the completion is then refused, both are lost."""

    async def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> None:
        item = self._store.work.holder_of(lock_token)
        if item is None:
            raise rules.lock_lost("ack_work_item", lock_token)
        await super().ack_work_item(lock_token)
        validation.check_settlement(item.identity, completion, retry)
        now_ms = self._store.clock.now_ms()
        if completion is not None:
            self._store.add_message(completion, now_ms)
        if retry is not None:
            self._store.add_work(retry, now_ms)


class RetriesAtOnce(ModelProvider):
    """A retry forgets its delay."""

    async def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> None:
        if retry is not None:
            retry = replace(retry, visible_at_ms=None)
        await super().ack_work_item(lock_token, completion, retry)


class TakesSmallItemsFirst(ModelProvider):
    """A fetch of several leaves a large item in the queue while there are small ones."""

    async def fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> list[FetchedWork]:
        found = await super().fetch_work_items(
            limit, lock_timeout_ms, poll_timeout_ms, session, tag_filter, activities
        )
        small = [item for item in found if len(item.body) <= 65_536]
        for item in found if small else ():
            if item not in small:
                await self.abandon_work_item(item.lock_token, ignore_attempt=True)
        return small or found


class TakesTheNewestFirst(ModelProvider):
    """The worker queue is a stack."""

    async def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> FetchedWork | None:
        passed: list[str] = []
        newest: FetchedWork | None = None
        while True:
            found = await super().fetch_work_item(
                lock_timeout_ms, 0 if passed else poll_timeout_ms, session, tag_filter, activities
            )
            if found is None:
                break
            newest = found
            passed.append(found.lock_token)
        for token in passed[:-1]:
            await self.abandon_work_item(token, ignore_attempt=True)
        return newest


class ShowsEveryTag(ModelProvider):
    """A worker without tags is given tagged items."""

    async def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> FetchedWork | None:
        return await super().fetch_work_item(
            lock_timeout_ms, poll_timeout_ms, session, tag_filter or TagFilter.any(), activities
        )


class IgnoresActivityNames(ModelProvider):
    """A worker is given activities that it has no code for."""

    async def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> FetchedWork | None:
        return await super().fetch_work_item(lock_timeout_ms, poll_timeout_ms, session, tag_filter)


class ForgetsWhoOwnsSessions(ModelProvider):
    """Any owner may take items of a session that another holds."""

    async def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> FetchedWork | None:
        self._store.work.sessions.clear()
        return await super().fetch_work_item(
            lock_timeout_ms, poll_timeout_ms, session, tag_filter, activities
        )


class StarvesWorkersAtCapacity(ModelProvider):
    """A worker that takes no new sessions is not served from its own ones either."""

    async def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> FetchedWork | None:
        if session is not None and session.only_owned:
            session = None
        return await super().fetch_work_item(
            lock_timeout_ms, poll_timeout_ms, session, tag_filter, activities
        )


class RenewsIdleSessions(ModelProvider):
    """A session is renewed however long nothing has happened in it."""

    async def renew_session_lock(
        self, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
    ) -> int:
        return await super().renew_session_lock(owner_ids, extend_for_ms, 2**60)


class NeverRenewsSessions(ModelProvider):
    """A renewal counts the sessions, and leaves their leases as they are."""

    async def renew_session_lock(
        self, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
    ) -> int:
        ends = {each: lease.locked_until_ms for each, lease in self._store.work.sessions.items()}
        count = await super().renew_session_lock(owner_ids, extend_for_ms, idle_timeout_ms)
        for session_id, locked_until_ms in ends.items():
            self._store.work.sessions[session_id].locked_until_ms = locked_until_ms
        return count


class NeverRenewsWork(ModelProvider):
    """A renewal looks for the lock, and leaves it as it is."""

    async def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> None:
        if self._store.work.holder_of(lock_token) is None:
            raise rules.lock_lost("renew_work_item_lock", lock_token)


class EndsRenewedWorkLate(ModelProvider):
    """A renewed lock of a work item ends a moment later than it should."""

    async def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> None:
        await super().renew_work_item_lock(lock_token, extend_for_ms + 1, heartbeat)


class ForgetsHeartbeats(ModelProvider):
    """Loses the heartbeats of a worker with its lock."""

    async def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> None:
        await super().renew_work_item_lock(lock_token, extend_for_ms)


class RenewsCancelledWork(ModelProvider):
    """A worker whose activity was cancelled never learns of it."""

    async def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> None:
        if self._store.work.holder_of(lock_token) is not None:
            await super().renew_work_item_lock(lock_token, extend_for_ms, heartbeat)
