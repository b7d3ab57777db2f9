"""Reads a fetched item: decides what is to be run, or why nothing can be run.

Decodes history and messages, finds the code, and handles duplicate starts and late messages. Pure
apart from the random seed of a new execution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from perdure.engine.execution import Execution
from perdure.errors import CorruptData, Nondeterminism, NotRegistered, PayloadError
from perdure.model import events, wire, work
from perdure.model.envelopes import envelope
from perdure.model.failures import Block, BlockReason, Failure, Mismatch
from perdure.model.work import parent_link, started_by
from perdure.providers.records import OrchestratorMessage
from perdure.runtime.live_instances import Arrival

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from perdure.authoring.registry import Registry
    from perdure.codec import Codec
    from perdure.providers.records import (
        FetchedOrchestration,
        KvEntry,
        OrchestrationItem,
    )


class Runnable(msgspec.Struct, frozen=True, kw_only=True):
    """There is a turn to run."""

    execution: Execution
    parent: work.ParentLink | None
    arrivals: list[Arrival]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The instance has ended, so its messages came too late."""

    execution_id: int
    message_ids: list[int]
    replies: list[OrchestratorMessage]
    """Answers to starts that came for an id in use."""
    unread: list[str]
    """Names of the events and queue messages from outside among them."""


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """The instance cannot continue with this code. It is Blocked, and its history is kept."""

    block: Block


IntakeResult: TypeAlias = Runnable | Ended | Blocked


class Intake:
    """Reads fetched items with the handlers and the codec of one runtime."""

    def __init__(
        self, registry: Registry, codec: Codec, framework_version: str, max_attempts: int
    ) -> None:
        self._registry = registry
        self._codec = codec
        self._framework_version = framework_version
        self._max_attempts = max_attempts

    def read(self, fetched: FetchedOrchestration, now_ms: int) -> IntakeResult:
        item = fetched.item
        if fetched.attempt_count > self._max_attempts:
            return self.blocked(
                item,
                BlockReason.POISON,
                f"delivered {fetched.attempt_count} times without a committed turn",
                "\n".join(delivery.body for delivery in item.messages)[:10_000],
            )
        try:
            if item.history_error is not None:
                raise CorruptData("read_history", item.history_error)
            history = wire.decode_history(record.data for record in item.history)
            arrivals = [
                Arrival(wire.decode_item(delivery.body), delivery.message_id)
                for delivery in item.messages
            ]
        except CorruptData as error:
            return self.blocked(item, BlockReason.UNDECODABLE, error.message)
        try:
            return self._decide(item, history, arrivals, now_ms)
        except NotRegistered as error:
            return self.blocked(item, BlockReason.UNKNOWN_HANDLER, str(error))
        except Nondeterminism as error:
            return self.blocked(item, BlockReason.NONDETERMINISM, str(error), error.mismatch or "")
        except (CorruptData, PayloadError) as error:
            return self.blocked(item, BlockReason.UNDECODABLE, str(error))

    def _decide(
        self,
        item: OrchestrationItem,
        history: Sequence[events.Event],
        arrivals: list[Arrival],
        now_ms: int,
    ) -> IntakeResult:
        has_ended = bool(history) and isinstance(history[-1], events.TERMINAL_KINDS)
        if history and not has_ended:
            return self._continue(item, history, arrivals)
        start = _next_start(arrivals, item.execution_id + 1 if has_ended else None)
        if start is None:
            return Ended(
                execution_id=item.execution_id,
                message_ids=[arrival.message_id for arrival in arrivals if arrival.message_id],
                replies=replies_to([arrival.item for arrival in arrivals], None),
                unread=[
                    arrival.item.name
                    for arrival in arrivals
                    if isinstance(arrival.item, (work.ExternalRaised, work.QueueMessage))
                ],
            )
        return self._begin(item, start, arrivals, now_ms)

    def _continue(
        self,
        item: OrchestrationItem,
        history: Sequence[events.Event],
        arrivals: list[Arrival],
    ) -> Runnable:
        started = history[0]
        if not isinstance(started, events.OrchestrationStarted):
            raise CorruptData("replay", f"history begins with {type(started).__name__}")
        handler = self._registry.resolve_orchestration(started.name, started.version)
        execution = Execution.replay(
            handler, history, kv=_texts(item.kv_snapshot), codec=self._codec
        )
        return Runnable(execution=execution, parent=parent_link(started), arrivals=arrivals)

    def _begin(
        self, item: OrchestrationItem, start: Arrival, arrivals: list[Arrival], now_ms: int
    ) -> Runnable:
        first = start.item
        assert isinstance(first, (work.StartOrchestration, work.ContinueAsNew))
        execution = self.begin(first, kv=_texts(item.kv_snapshot), now_ms=now_ms)
        return Runnable(execution=execution, parent=first.parent, arrivals=arrivals)

    def begin(
        self,
        first: work.StartOrchestration | work.ContinueAsNew,
        *,
        kv: Mapping[str, str],
        now_ms: int,
    ) -> Execution:
        """Return a new execution, before its first turn."""
        handler = self._registry.resolve_orchestration(first.name, first.version)
        started = started_by(
            first,
            version=handler.version,
            framework_version=self._framework_version,
            now_ms=now_ms,
        )
        return Execution.begin(
            handler,
            started,
            kv=kv,
            codec=self._codec,
            carried=first.carried if isinstance(first, work.ContinueAsNew) else (),
        )

    def blocked(
        self,
        item: OrchestrationItem,
        reason: BlockReason,
        message: str,
        detail: str | Mismatch = "",
    ) -> Blocked:
        return Blocked(block=self.block(item.name, item.version, reason, message, detail))

    def block(
        self,
        name: str,
        version: str | None,
        reason: BlockReason,
        message: str,
        detail: str | Mismatch = "",
    ) -> Block:
        """Return a block that names the code of this worker, so that other code tries again."""
        code = self.fingerprint(name, version)
        return Block(reason=reason, message=message, detail=detail, code=code)

    def fingerprint(self, name: str, version: str | None) -> str:
        """Return the identity of an instance's code and codec; empty if the code is missing."""
        try:
            code = self._registry.resolve_orchestration(name, version).fingerprint
        except NotRegistered:
            return ""
        return "+".join((code, *self._codec.transform_names))


def _next_start(arrivals: Sequence[Arrival], execution_id: int | None) -> Arrival | None:
    """Return the message that begins the execution: a start, or after an end its continuation."""
    for arrival in arrivals:
        item = arrival.item
        if isinstance(item, work.ContinueAsNew):
            if execution_id is None or item.execution_id == execution_id:
                return arrival
        elif isinstance(item, work.StartOrchestration) and execution_id is None:
            return arrival
    return None


def replies_to(
    items: Iterable[work.OrchestratorItem], parent: work.ParentLink | None
) -> list[OrchestratorMessage]:
    """Return answers to parents whose child id is in use: without one they would wait for ever."""
    replies: list[OrchestratorMessage] = []
    for item in items:
        if isinstance(item, work.StartOrchestration) and item.parent not in {None, parent}:
            assert item.parent is not None
            failure = Failure(
                type_name="AlreadyExists",
                lineage=("AlreadyExists", "PerdureError"),
                message=f"an instance with the id {item.instance_id!r} exists already",
            )
            reply = work.SubOrchFailed(
                instance_id=item.parent.instance_id,
                execution_id=item.parent.execution_id,
                event_id=item.parent.event_id,
                child_instance_id=item.instance_id,
                failure=failure,
            )
            replies.append(envelope(reply))
    return replies


def _texts(snapshot: Mapping[str, KvEntry]) -> dict[str, str]:
    return {key: entry.value for key, entry in snapshot.items()}
