"""Stores starts: with the first turn if a runtime runs in this process, else through the queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.client.starting import (
    IfChanged,
    IfExists,
    compare_arguments,
    condition_of,
    has_begun,
    other_names,
    warn_if_unserved,
)
from perdure.client.waiting import check_loop
from perdure.errors import (
    AlreadyExists,
    InstanceFinished,
    InstanceStillRunning,
    NotFound,
    StoreBusy,
)
from perdure.model import work
from perdure.model.envelopes import envelope
from perdure.providers.records import EnqueueCondition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.authoring import Orchestration
    from perdure.client.waiting import EndWaiter, Finished, PendingStart
    from perdure.codec import Codec
    from perdure.providers.contract import Provider

_TRIES: Final = 20
"""Tries to start an instance that others end, delete or start at the same time."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A start with its options."""

    item: work.StartOrchestration
    target: Any
    """The orchestration, or its name."""
    delay_ms: int | None
    at_ms: int | None
    if_exists: IfExists
    if_changed: IfChanged

    @property
    def is_at_once(self) -> bool:
        return self.delay_ms is None and self.at_ms is None


class Submissions:
    """Starts instances of one store."""

    def __init__(self, provider: Provider, codec: Codec, waiter: EndWaiter) -> None:
        self._provider = provider
        self._codec = codec
        self._waiter = waiter
        self._started_names: set[str] = set()

    async def submit(self, start: Start) -> Finished | None:
        """Start an instance; return the future of its end if it runs in this process.

        A running runtime begins the instance itself and commits its first turn. In all other cases
        the start goes through the store's queue, for any worker to fetch. The message of a start is
        a part of it. An instance that exists gets the message by itself.
        """
        condition = condition_of(start.if_exists)
        for _ in range(_TRIES):
            is_taken, ended = await self._send(start, condition)
            if is_taken:
                return ended
            if start.if_exists == "restart" and await self._is_cleared(start.item):
                continue
            await self._check_existing(start.item, start.if_exists)
            if start.if_changed != "ignore":
                await compare_arguments(
                    start.item, start.target, start.if_changed, self._provider, self._codec
                )
            if await self._is_told(start):
                return None
        raise StoreBusy(
            "start", f"{start.item.instance_id!r} is ended and started by others all the time"
        )

    async def _send(
        self, start: Start, condition: EnqueueCondition
    ) -> tuple[bool, Finished | None]:
        """Return True if the instance was started, and the future of its end if it runs here."""
        item, local = start.item, self._waiter.local
        pending: PendingStart | None = None
        if local is not None:
            check_loop(local.loop)
            local.check_start(item, start.target)
            if start.is_at_once and condition is not EnqueueCondition.REPLACE:
                pending = local.begin(item)
                if pending is not None and await pending.committed:
                    return True, pending.ended
        message = envelope(item, visible_at_ms=start.at_ms)
        taken = await self._provider.enqueue_for_orchestrator(message, start.delay_ms, condition)
        if not taken:
            return await has_begun(pending, self._provider), None
        if local is None and item.name not in self._started_names:
            self._started_names.add(item.name)
            await warn_if_unserved(item.name, self._provider)
        return True, None

    async def _is_cleared(self, item: work.StartOrchestration) -> bool:
        """Delete the instance with that id if it has ended; False if it goes on.

        The store deletes it only if it has ended, so a restart of another client is not deleted.
        """
        admin = self._provider.admin
        try:
            info = await admin.get_instance_info(item.instance_id)
            if not info.status.is_final:
                return False
            await self._check_existing(item, "restart")
            await admin.delete_instance(item.instance_id)
        except NotFound:
            return True
        except InstanceStillRunning:
            return False
        return True

    async def _is_told(self, start: Start) -> bool:
        """Send the message of the start to the instance that exists; False to start it again."""
        for each in start.item.carried:
            message = work.QueueMessage(
                instance_id=start.item.instance_id, name=each.name, data=each.data
            )
            local = self._waiter.local
            if local is not None:
                local.check_arrival(message)
            try:
                await self._provider.enqueue_for_orchestrator(
                    envelope(message), condition=EnqueueCondition.ALIVE
                )
            except NotFound:
                return False
            except InstanceFinished as error:
                if start.if_exists == "restart":
                    return False
                raise InstanceFinished(
                    f"{error}; it gets no message: if_exists='restart' starts it anew"
                ) from None
        return True

    async def _check_existing(self, item: work.StartOrchestration, if_exists: IfExists) -> None:
        """Raise AlreadyExists for a taken id, unless ``if_exists`` and the name allow it."""
        if if_exists == "fail":
            raise AlreadyExists(
                f"{item.instance_id!r} exists already; use if_exists='get', 'restart' or "
                "'replace', or another id"
            )
        for name in (await other_names([item], self._provider)).values():
            raise AlreadyExists(
                f"the id {item.instance_id!r} belongs to an instance of {name!r}, "
                f"not of {item.name!r}; use another id"
            )

    async def submit_many(
        self,
        items: Sequence[work.StartOrchestration],
        target: Orchestration[..., Any] | str,
        delay_ms: int | None,
        if_exists: IfExists,
    ) -> dict[str, Finished]:
        """Start many instances; return the ends, by id, of those that run in this process."""
        local = self._waiter.local
        if local is not None:
            check_loop(local.loop)
            if items:
                local.check_start(items[0], target)
        if local is None or delay_ms is not None or if_exists != "get":
            await self._enqueue_many(items, delay_ms, if_exists)
            return {}
        # Begin only as many as fit: the others wait in the queue and evict no live instance.
        begun = [local.begin(item) for item in items[: local.room]]
        pending = [each for each in begun if each is not None]
        answers = await asyncio.gather(
            *(each.committed for each in pending), return_exceptions=True
        )
        answer_of = dict(zip((each.item.instance_id for each in pending), answers, strict=True))
        queued = [item for item in items if answer_of.get(item.instance_id, False) is False]
        if queued:
            await self._enqueue_many(queued, delay_ms, if_exists)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return {
            each.item.instance_id: each.ended
            for each, is_committed in zip(pending, answers, strict=True)
            if is_committed
        }

    async def _enqueue_many(
        self, items: Sequence[work.StartOrchestration], delay_ms: int | None, if_exists: IfExists
    ) -> None:
        """Enqueue many starts in one call of the store."""
        taken = await self._provider.enqueue_many_for_orchestrator(
            [envelope(item) for item in items], delay_ms, condition_of(if_exists)
        )
        existing = [item for item, ok in zip(items, taken, strict=True) if not ok]
        if if_exists == "get":
            others = await other_names(existing, self._provider)
            existing = [item for item in existing if item.instance_id in others]
        if existing:
            what = "exist already" if if_exists == "fail" else "belong to another orchestration"
            raise AlreadyExists(
                f"{len(existing)} of {len(items)} ids {what}, the others were started: "
                f"{[item.instance_id for item in existing[:5]]}"
            )
