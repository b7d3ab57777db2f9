"""A load at the level of the provider whose outcome can be checked to the last event.

Each root runs some activities, then a child; every turn raises the version of the custom status by
one, so a turn that was lost or applied twice shows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perdure.errors import LockLost, ProviderError
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    CustomStatusChange,
    EnqueueCondition,
    ExecutionMetadata,
    HistoryRecord,
    OrchestratorMessage,
    StartRouting,
    TurnCommit,
    WorkerMessage,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.contract import Provider
    from perdure.providers.records import FetchedOrchestration

POLL_MS = 300


@dataclass
class Load:
    """The work to run, and the counts taken while it ran."""

    roots: int
    activities: int = 3
    lock_ms: int = 20_000
    prefix: str = "root"
    turns: dict[str, int] = field(default_factory=dict[str, int])
    """Turns of each instance whose commit was answered."""
    ended: set[str] = field(default_factory=set[str])
    held: set[str] = field(default_factory=set[str])
    """Instances that a fetcher is thinking about."""
    collisions: list[str] = field(default_factory=list[str])
    repeated: list[str] = field(default_factory=list[str])
    """Messages that were delivered again after a turn had consumed them."""
    errors: list[ProviderError] = field(default_factory=list[ProviderError])
    """Retryable errors that reached a caller."""

    @property
    def ids(self) -> list[str]:
        return [f"{self.prefix}-{number}" for number in range(self.roots)]

    @property
    def is_done(self) -> bool:
        return len(self.ended) == 2 * self.roots

    # --- running it

    async def start(self, provider: Provider) -> None:
        for instance_id in self.ids:
            await self._insist(
                lambda each=instance_id: provider.enqueue_for_orchestrator(
                    _start(each, None), None, EnqueueCondition.ABSENT
                )
            )

    async def run(self, providers: Sequence[Provider], *, fetchers: int, workers: int) -> None:
        """Until every instance has ended."""
        async with asyncio.TaskGroup() as group:
            for _, provider in zip(range(fetchers), itertools.cycle(providers), strict=False):
                group.create_task(self._fetch_turns(provider))
            for _, provider in zip(range(workers), itertools.cycle(providers), strict=False):
                group.create_task(self._fetch_work(provider))

    async def _insist(self, call: Any) -> Any:
        while True:
            try:
                return await call()
            except ProviderError as error:
                if not error.retryable:
                    raise
                self.errors.append(error)

    async def _fetch_turns(self, provider: Provider) -> None:
        while not self.is_done:
            fetched = await self._insist(
                lambda: provider.fetch_orchestration_item(self.lock_ms, POLL_MS)
            )
            if fetched is not None:
                await self._take_turn(provider, fetched)

    async def _take_turn(self, provider: Provider, fetched: FetchedOrchestration) -> None:
        instance_id, token = fetched.item.instance_id, fetched.lock_token
        if instance_id in self.held:
            self.collisions.append(instance_id)
        self.held.add(instance_id)
        for _ in range(5):
            await asyncio.sleep(0)  # others run while this one thinks
        self.held.discard(instance_id)
        commit = self._commit(fetched)
        try:
            await self._insist(lambda: provider.ack_orchestration_item(token, commit))
        except LockLost:
            # Only after an answer was lost for longer than a call is repeated.
            return
        self.turns[instance_id] = self.turns.get(instance_id, 0) + 1
        if commit.metadata.status is Status.COMPLETED:
            self.ended.add(instance_id)

    async def _fetch_work(self, provider: Provider) -> None:
        while not self.is_done:
            work = await self._insist(lambda: provider.fetch_work_item(self.lock_ms, POLL_MS))
            if work is not None:
                done = _message(
                    work.identity.instance_id, "done", activity=work.identity.activity_id
                )
                try:
                    await self._insist(
                        lambda item=work, message=done: provider.ack_work_item(
                            item.lock_token, message
                        )
                    )
                except LockLost:
                    continue

    # --- the orchestration

    def _commit(self, fetched: FetchedOrchestration) -> TurnCommit:
        item = fetched.item
        instance_id = item.instance_id
        is_child = "/child" in instance_id
        history = [json.loads(record.data) for record in item.history]
        arrivals = [json.loads(message.body) for message in item.messages]
        known = {(event["kind"], event.get("activity")) for event in history}
        new = [
            event
            for event in arrivals
            if event["kind"] != "start" and (event["kind"], event.get("activity")) not in known
        ]
        self.repeated += [
            f"{instance_id}: {event}"
            for event in arrivals
            if (event["kind"], event.get("activity")) in known
        ]
        metadata = ExecutionMetadata()
        work: tuple[WorkerMessage, ...] = ()
        sent: tuple[OrchestratorMessage, ...] = ()
        if not history:
            metadata = ExecutionMetadata(name="Load", version="1")
            new = [{"kind": "started"}, *new]
            if not is_child:
                work = tuple(_work(instance_id, number) for number in range(self.activities))
        done = {event["activity"] for event in [*history, *new] if event["kind"] == "done"}
        kinds = {event["kind"] for event in [*history, *new]}
        if not is_child and len(done) == self.activities and "child started" not in kinds:
            sent = (_start(f"{instance_id}/child", instance_id),)
            new.append({"kind": "child started"})
        if "completed" not in kinds and (is_child or "child done" in kinds):
            metadata = ExecutionMetadata(
                status=Status.COMPLETED, output='"ok"', name="Load", version="1"
            )
            new.append({"kind": "completed"})
            if is_child:
                sent = (_message(instance_id.removesuffix("/child"), "child done"),)
        return TurnCommit(
            execution_id=1,
            history_delta=tuple(
                HistoryRecord(event_id=number, data=json.dumps(event))
                for number, event in enumerate(new, len(history) + 1)
            ),
            worker_items=work,
            orchestrator_items=sent,
            metadata=metadata,
            custom_status=CustomStatusChange(value='"turn"'),
        )

    # --- checking it

    async def check(self, provider: Provider, *, locks_may_expire: bool = False) -> None:
        """Nothing lost, nothing doubled, nothing stuck."""
        admin = provider.admin
        assert admin is not None
        for instance_id in self.ids:
            for each, steps in (
                (instance_id, self._kinds()),
                (f"{instance_id}/child", ["completed", "started"]),
            ):
                info = await admin.get_instance_info(each)
                assert info.status is Status.COMPLETED, f"{each} is {info.status}"
                history = await provider.read(each)
                assert [record.event_id for record in history] == list(range(1, len(history) + 1))
                kinds = sorted(json.loads(record.data)["kind"] for record in history)
                assert kinds == steps, each
                assert info.custom_status_version == self.turns[each], each
        assert self.collisions == [] or locks_may_expire
        assert self.repeated == []
        depths = await admin.get_queue_depths()
        assert (depths.orchestrator.locked, depths.worker.locked) == (0, 0)
        assert (depths.orchestrator.visible, depths.worker.visible) == (0, 0)
        assert depths.dead_letters == 0

    def _kinds(self) -> list[str]:
        return sorted(
            ["started", "child started", "child done", "completed", *["done"] * self.activities]
        )


def _start(instance_id: str, parent: str | None) -> OrchestratorMessage:
    return OrchestratorMessage(
        instance_id=instance_id,
        kind="start",
        body=json.dumps({"kind": "start"}),
        start=StartRouting(name="Load", version="1", parent_instance_id=parent),
    )


def _message(instance_id: str, kind: str, **fields: Any) -> OrchestratorMessage:
    return OrchestratorMessage(
        instance_id=instance_id, kind=kind, body=json.dumps({"kind": kind, **fields})
    )


def _work(instance_id: str, number: int) -> WorkerMessage:
    return WorkerMessage(
        identity=ActivityIdentity(instance_id=instance_id, execution_id=1, activity_id=number + 1),
        name="step",
        body=json.dumps({"number": number}),
    )
