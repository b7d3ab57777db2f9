"""Faults at the door: what is taken, what is answered, and how long a fetch waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from model import ModelProvider, turns
from perdure.clock import SystemClock
from perdure.errors import LockLost, StoreBusy, StoreClosed
from perdure.providers.records import EnqueueCondition
from perdure.providers.waiting import ChangeHub, Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.clock import Clock
    from perdure.providers.records import (
        FetchedOrchestration,
        OrchestrationFilter,
        OrchestratorMessage,
        TurnCommit,
        WorkerMessage,
    )


class TakesAnyId(ModelProvider):
    """Ids are not looked at."""

    async def enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> bool:
        self._store.add_message(message, self._store.clock.now_ms(), delay_ms)
        return True


class TakesAnyAmountOfMail(ModelProvider):
    """Does not limit how much mail may wait for an instance."""

    def _refuse_too_much_mail(self, *_: object) -> None:
        pass


class TakesAPartOfACall(ModelProvider):
    """Of a call with too much mail the first messages are kept."""

    async def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> list[bool]:
        return [
            await self.enqueue_for_orchestrator(message, delay_ms, condition)
            for message in messages
        ]


class TakesAnySize(ModelProvider):
    """Work items are not looked at, however big."""

    async def enqueue_for_worker(self, message: WorkerMessage) -> None:
        self._store.add_work(message, self._store.clock.now_ms())


class TakesAnyWorkOfATurn(ModelProvider):
    """The work items of a turn are not looked at."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        await super().ack_orchestration_item(lock_token, replace(commit, worker_items=()))
        for message in commit.worker_items:
            self._store.add_work(message, self._store.clock.now_ms())


class TakesEventZero(ModelProvider):
    """Event ids are not looked at."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        turns.ack(self._store, lock_token, commit)


class StartsTwice(ModelProvider):
    """Does not check that the id is new."""

    async def enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> bool:
        if condition is EnqueueCondition.ABSENT:
            condition = None
        return await super().enqueue_for_orchestrator(message, delay_ms, condition)


class StartsManyInSilence(ModelProvider):
    """Clients that watch are not told of starts that are sent together."""

    async def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> list[bool]:
        changes, self._store.changes = self._store.changes, ChangeHub(self._store.clock)
        try:
            return await super().enqueue_many_for_orchestrator(messages, delay_ms, condition)
        finally:
            self._store.changes = changes


class StartsManyWithoutWaking(ModelProvider):
    """Fetches that wait are not woken by starts that are sent together."""

    async def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> list[bool]:
        signal, self._store.turn_signal = self._store.turn_signal, Signal(self._store.clock)
        try:
            return await super().enqueue_many_for_orchestrator(messages, delay_ms, condition)
        finally:
            self._store.turn_signal = signal


class GivesUpAmongMisfits(ModelProvider):
    """A fetch looks at the first instances only, whether they fit or not."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        if filter is not None and len(self._store.instances) > 50:
            return None
        return await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )


class CallsALostLockBusy(ModelProvider):
    """A lost lock looks like a transient error, and is retried for ever."""

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        try:
            await super().ack_orchestration_item(lock_token, commit)
        except LockLost as error:
            raise StoreBusy("ack_orchestration_item", "try again") from error


class AnswersErrorsWithNoWork(ModelProvider):
    """A store that cannot be reached looks like one without work."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        try:
            return await super().fetch_orchestration_item(
                lock_timeout_ms, poll_timeout_ms, filter, owner
            )
        except StoreClosed:
            return None


class NamesAnotherClock(ModelProvider):
    """Leases follow the clock that was handed in, but runtimes are told of the machine's."""

    def clock(self) -> Clock:
        return SystemClock()


class AnswersTheLastFetchFirst(ModelProvider):
    """Fetches that wait together are answered from the last one to the first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._waiting: list[asyncio.Future[None]] = []

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._answer)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn
        return await super().fetch_orchestration_item(
            lock_timeout_ms, poll_timeout_ms, filter, owner
        )

    def _answer(self) -> None:
        for turn in reversed(self._waiting):
            turn.set_result(None)
        self._waiting.clear()


class NeverWaits(ModelProvider):
    """Declares long polling, and returns at once."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        return await super().fetch_orchestration_item(lock_timeout_ms, 0, filter, owner)


class WaitsToTheEnd(ModelProvider):
    """A waiting fetch looks again only when its time is up."""

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        found = await super().fetch_orchestration_item(lock_timeout_ms, 0, filter, owner)
        if found is None and poll_timeout_ms:
            await self._store.clock.sleep(poll_timeout_ms / 1000)
            found = await super().fetch_orchestration_item(lock_timeout_ms, 0, filter, owner)
        return found
