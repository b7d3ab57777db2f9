"""Faults in fetching, committing and giving back turns."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from model import ModelProvider, turns, validation
from perdure.errors import CorruptData, DuplicateEvent
from perdure.model import wire
from perdure.providers.records import ExecutionMetadata

if TYPE_CHECKING:
    from model.state import Instance
    from perdure.model.failures import Block
    from perdure.providers.records import (
        FetchedOrchestration,
        OrchestrationFilter,
        TurnCommit,
    )


class LocksMessagesOnly(ModelProvider):
    """A message that arrives at a held instance lets a second owner in."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        now_ms = self._store.clock.now_ms()
        for instance in self._store.instances.values():
            arrival = instance.free.first()
            if instance.lock is not None and arrival is not None and arrival[0] <= now_ms:
                instance.lock.locked_until_ms = now_ms
                self._store.agenda.place(instance, now_ms)
        return await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )


class LetsZombiesCommit(ModelProvider):
    """A lock that has expired, but was not taken over, still commits."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        _revive(self, lock_token)
        await super().ack_orchestration_item(lock_token, commit)


class RevivesExpiredLocks(ModelProvider):
    """A lock that has expired can be renewed."""

    async def renew_orchestration_item_lock(self, lock_token: str, extend_for_ms: int) -> None:
        _revive(self, lock_token)
        await super().renew_orchestration_item_lock(lock_token, extend_for_ms)


class DropsLateArrivals(ModelProvider):
    """A commit deletes every message of the instance, not only those that it was given."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        instance = self._store.locks.get(lock_token)
        await super().ack_orchestration_item(lock_token, replace(commit, consumed=None))
        if instance is not None:
            for message_id in list(instance.messages):
                self._store.remove_message(instance, message_id)
            self._store.settle(instance, self._store.clock.now_ms())


class ConsumesWhatWasLeftOut(ModelProvider):
    """A commit consumes its whole batch, also the messages that it does not name."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        await super().ack_orchestration_item(lock_token, replace(commit, consumed=None))


class ConsumesWhatIsGone(ModelProvider):
    """A commit is taken although a message that it consumes is not there any more."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        instance = self._store.locks.get(lock_token)
        if instance is not None and instance.lock is not None and commit.consumed is not None:
            carried = instance.lock.carried
            commit = replace(commit, consumed=tuple(set(commit.consumed) & carried.keys()))
        await super().ack_orchestration_item(lock_token, commit)


class FiresTimersAtOnce(ModelProvider):
    """Messages of a turn are visible at once, timers too."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        items = tuple(replace(each, visible_at_ms=None) for each in commit.orchestrator_items)
        await super().ack_orchestration_item(lock_token, replace(commit, orchestrator_items=items))


class OverwritesEvents(ModelProvider):
    """An event id that exists already is overwritten instead of refused."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        instance = self._store.locks.get(lock_token)
        if instance is not None:
            stored = instance.histories.get(commit.execution_id, {})
            for record in commit.history_delta:
                stored.pop(record.event_id, None)
        await super().ack_orchestration_item(lock_token, commit)


class LeavesHolesInHistories(ModelProvider):
    """A turn is taken although the event that it goes on from is not there."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        instance = self._store.locks.get(lock_token)
        if instance is None or not commit.history_delta:
            await super().ack_orchestration_item(lock_token, replace(commit, after_event_id=0))
            return
        needed = commit.history_delta[0].event_id - 1
        stored = instance.histories.setdefault(commit.execution_id, {})
        is_hole = needed > 0 and needed not in stored
        if is_hole:
            stored[needed] = ""
        await super().ack_orchestration_item(lock_token, commit)
        if is_hole:
            del stored[needed]


class CommitsInTwoSteps(ModelProvider):
    """Work items are written before the rest of the turn, which may still be refused."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        validation.check_commit(commit)
        for item in commit.worker_items:
            self._store.add_work(item, self._store.clock.now_ms())
        await super().ack_orchestration_item(lock_token, replace(commit, worker_items=()))


class RepeatsKeptCommits(ModelProvider):
    """A repeated commit under a kept lock is applied again, without its history."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        try:
            await super().ack_orchestration_item(lock_token, commit)
        except DuplicateEvent:
            if commit.keep_lock_ms is None:
                raise
            turns.ack(self._store, lock_token, replace(commit, history_delta=()))


class CancelsBeforeScheduling(ModelProvider):
    """An activity that one turn schedules and cancels stays in the queue."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        scheduled = {item.identity for item in commit.worker_items}
        cancelled = tuple(each for each in commit.cancelled_activities if each not in scheduled)
        await super().ack_orchestration_item(
            lock_token, replace(commit, cancelled_activities=cancelled)
        )


class LeavesTimersBehind(ModelProvider):
    """A cancelled timer stays queued and fires."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        await super().ack_orchestration_item(lock_token, replace(commit, cancelled_timers=()))


class EndsRenewedLocksLate(ModelProvider):
    """A renewed lock of an instance ends a moment later than it should."""

    async def renew_orchestration_item_lock(self, lock_token: str, extend_for_ms: int) -> None:
        await super().renew_orchestration_item_lock(lock_token, extend_for_ms + 1)


class SettlesNothing(ModelProvider):
    """Work that a fused commit settles stays in the queue and is done again."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        await super().ack_orchestration_item(lock_token, replace(commit, settled_work=()))


class IgnoresStatusWithoutEvents(ModelProvider):
    """A turn without new events cannot end the execution."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        if not commit.history_delta:
            commit = replace(commit, metadata=ExecutionMetadata())
        await super().ack_orchestration_item(lock_token, commit)


class CountsEveryTurnAsStatusChange(ModelProvider):
    """The version of the custom status rises with each turn."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        instance = self._store.locks.get(lock_token)
        await super().ack_orchestration_item(lock_token, commit)
        if instance is not None and commit.custom_status is None:
            instance.custom_status_version += 1


class RewritesCreationTimes(ModelProvider):
    """Each turn writes the creation time anew."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        instance = self._store.locks.get(lock_token)
        await super().ack_orchestration_item(lock_token, commit)
        if instance is not None:
            now_ms = self._store.clock.now_ms()
            instance.created_at_ms = now_ms
            self._store.settle(instance, now_ms)


class SharesStateWithReplay(ModelProvider):
    """A turn starts from the latest state instead of that at the beginning of its execution."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        fetched = await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )
        if fetched is None:
            return None
        latest = await self.get_kv_all_values(fetched.item.instance_id)
        return replace(fetched, item=replace(fetched.item, kv_snapshot=latest))


class DropsUndecodableMessages(ModelProvider):
    """Messages that cannot be decoded are left out of the batch, and deleted with it."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        fetched = await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )
        if fetched is None:
            return None
        decodable = tuple(each for each in fetched.item.messages if _is_decodable(each.body))
        return replace(fetched, item=replace(fetched.item, messages=decodable))


class RaisesOnDamagedHistory(ModelProvider):
    """History that cannot be decoded makes the fetch fail, and no attempt is counted."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        fetched = await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )
        if fetched is not None:
            try:
                wire.decode_history(fetched.item.history)
            except CorruptData:
                await self.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)
                raise
        return fetched


class BlocksOnOrphans(ModelProvider):
    """The oldest message is that of an unknown instance, and no fetch gets past it."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        if any(instance.opens_at_ms is None for instance in self._store.instances.values()):
            return None
        return await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )


class DeletesOrphans(ModelProvider):
    """A message that overtakes the start of its instance is deleted by the next fetch."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        for instance in list(self._store.instances.values()):
            if instance.opens_at_ms is None:
                self._store.delete(instance)
        return await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )


class UsesTheFirstRangeOnly(ModelProvider):
    """Of several ranges of framework versions only the first counts."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        if filter is not None and filter.framework_versions:
            filter = replace(filter, framework_versions=filter.framework_versions[:1])  # noqa: A001
        return await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )


class FiltersAfterLocking(ModelProvider):
    """An instance that the filter excludes is locked before it is found unfit."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        fetched = await super().fetch_orchestration_item(lock_timeout_ms, 0, filter, owner)
        if fetched is None and filter is not None:
            await super().fetch_orchestration_item(lock_timeout_ms, 0, None, owner)
        return fetched


class GivesUpAfterALostRace(ModelProvider):
    """A fetch that loses its first candidate says that there is no work."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        now_ms = self._store.clock.now_ms()
        chosen = next(iter(self._store.agenda.candidates(owner, now_ms)), None)
        await asyncio.sleep(0)
        if chosen is not None and chosen.locked(now_ms):
            return None
        return await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )


class HandsOutGuessableTokens(ModelProvider):
    """Lock tokens are numbered."""

    _numbers = count(1)

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        fetched = await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )
        if fetched is None:
            return None
        instance = self._store.locks.pop(fetched.lock_token)
        assert instance.lock is not None
        instance.lock.token = f"lock-token-of-this-very-store-{next(self._numbers):08}"
        self._store.locks[instance.lock.token] = instance
        return replace(fetched, lock_token=instance.lock.token)


class DelaysMessagesInsteadOfInstances(ModelProvider):
    """Giving a turn back with a delay moves the visibility of every message of the instance."""

    async def abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None = None,
        *,
        ignore_attempt: bool = False,
        block: Block | None = None,
    ) -> None:
        instance = self._store.locks.get(lock_token)
        await super().abandon_orchestration_item(
            lock_token, ignore_attempt=ignore_attempt, block=block
        )
        if instance is not None and delay_ms is not None:
            self._delay_messages(instance, self._store.clock.now_ms(), delay_ms)

    def _delay_messages(self, instance: Instance, now_ms: int, delay_ms: int) -> None:
        for entry in instance.messages.values():
            if entry.visible_at_ms <= now_ms:
                instance.free.remove(entry.key)
                entry.visible_at_ms = now_ms + delay_ms
                instance.free.add(entry.key)
        self._store.settle(instance, now_ms)


class ForgivesEveryMessage(ModelProvider):
    """Ignoring an attempt takes it off late arrivals, too."""

    async def abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None = None,
        *,
        ignore_attempt: bool = False,
        block: Block | None = None,
    ) -> None:
        instance = self._store.locks.get(lock_token)
        await super().abandon_orchestration_item(lock_token, delay_ms, block=block)
        if instance is not None and ignore_attempt:
            for entry in instance.messages.values():
                entry.attempt_count -= 1


class CountsOnlyExpiredAttempts(ModelProvider):
    """A turn that is given back counts no attempt, so that poison is never noticed."""

    async def abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None = None,
        *,
        ignore_attempt: bool = False,
        block: Block | None = None,
    ) -> None:
        await super().abandon_orchestration_item(
            lock_token, delay_ms, ignore_attempt=True, block=block
        )


def _revive(provider: ModelProvider, lock_token: str) -> None:
    store = provider._store
    instance = store.locks.get(lock_token)
    if instance is not None and instance.lock is not None:
        now_ms = store.clock.now_ms()
        instance.lock.locked_until_ms = max(instance.lock.locked_until_ms, now_ms + 1)


def _is_decodable(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return False
    return True


class NeverOpensAgain(ModelProvider):
    """The first end of an execution is final."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        instance = self._store.locks.get(lock_token)
        current = None if instance is None else instance.current
        if current is not None and current.status.is_final:
            commit = replace(commit, metadata=replace(commit.metadata, status=None))
        await super().ack_orchestration_item(lock_token, commit)
