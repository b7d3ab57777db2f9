"""Seals payloads on their way into a store, and opens them on their way out.

The only place where the transforms of a codec are applied: runtimes, clients and the engine see
plain JSON. So a payload that moves to another instance is sealed for its new place by itself.
Sealed are payloads, state, custom status, heartbeats, the texts of failures, blocks and reasons.
Exports and imports pass as they are stored. What cannot be opened stays sealed; a reader that
needs it raises CannotUnwrap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
from msgspec.structs import replace

from perdure.codec import Codec, PayloadContext, is_sealed, require_open
from perdure.errors import CorruptData, InternalError
from perdure.model import events, wire, work
from perdure.model.failures import Block, Failure, Mismatch
from perdure.model.status import Status
from perdure.providers.contract import Provider
from perdure.providers.records import (
    CustomStatusChange,
    DeadLetter,
    ExecutionInfo,
    ExecutionSnapshot,
    FetchedOrchestration,
    FetchedWork,
    HistoryRecord,
    InstanceInfo,
    InstancePage,
    InstanceSnapshot,
    KvEntry,
    KvSet,
    OrchestratorMessage,
    QueuedMessage,
    QueuedWork,
    TurnCommit,
    WorkerMessage,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from perdure.providers.administration import ProviderAdmin

R = TypeVar("R", bound=msgspec.Struct)
I = TypeVar("I", InstanceInfo, ExecutionInfo, ExecutionSnapshot)  # noqa: E741
Q = TypeVar("Q", QueuedMessage, DeadLetter)

_MARK: Final = "$perdure"
_STATUS: Final = "custom status"
_JSON_TEXTS: Final = {
    "value": None,
    "status": _STATUS,
    "custom_status": _STATUS,
    "initial_custom_status": _STATUS,
    "last_heartbeat": "heartbeat",
}
"""Fields of events and work items with JSON as text, and the words for their places."""
_FAILED: Final = frozenset({Status.FAILED, Status.CANCELLED, Status.TERMINATED})
_BLOCK_DETAIL: Final = msgspec.json.Decoder(tuple[str, str | Mismatch])
_NO_TEXTS: Final = {"message": "", "traceback": "", "detail": "", "origin": "", "raised": None}
"""The fields of a failure that are sealed together, and those of one without any text."""
_FAILURE_TEXTS: Final = msgspec.json.Decoder(tuple[str, str, str, str, str | None])


class Sealing:
    """Seals or opens what records hold, for one codec."""

    def __init__(self, codec: Codec, *, is_opening: bool = False) -> None:
        self._codec = codec
        self._is_opening = is_opening
        self._change = codec.open if is_opening else codec.seal

    # --- values

    def json_text(self, text: str, instance_id: str, field: str) -> str:
        """Return a payload that is kept as text."""
        return self._change(text.encode(), PayloadContext(instance_id, field)).decode()

    def _packed(self, value: Any, text: str, instance_id: str, field: str) -> str:
        """Return ``value`` sealed as one text, unless the text that stands for it is sealed."""
        data = text.encode() if is_sealed(text) else msgspec.json.encode(value)
        return self._codec.seal(data, PayloadContext(instance_id, field)).decode()

    def text(self, text: str, instance_id: str, field: str) -> str:
        """Return a text that is no JSON."""
        if not self._is_opening:
            return self._packed(text, text, instance_id, field) if text else text
        if not is_sealed(text):
            return text
        opened = self.json_text(text, instance_id, field)
        return opened if is_sealed(opened) else msgspec.json.decode(opened, type=str)

    def failure(self, failure: Failure, instance_id: str, field: str) -> Failure:
        """Return the failure; category, type and counts stay readable."""
        if not self._is_opening:
            texts = [getattr(failure, name) for name in _NO_TEXTS]
            sealed = self._packed(texts, failure.message, instance_id, field)
            return replace(failure, **{**_NO_TEXTS, "message": sealed})
        if not is_sealed(failure.message):
            return failure
        opened = self.json_text(failure.message, instance_id, field)
        if is_sealed(opened):
            return replace(failure, message=opened)
        opened_texts = _FAILURE_TEXTS.decode(opened)
        return replace(failure, **dict(zip(_NO_TEXTS, opened_texts, strict=True)))

    def block(self, block: Block, instance_id: str) -> Block:
        """Return the block; its reason and the fingerprint of the code stay readable."""
        if not self._is_opening:
            content = (block.message, block.detail)
            sealed = self._packed(content, block.message, instance_id, "block")
            return replace(block, message=sealed, detail="")
        if not is_sealed(block.message):
            return block
        opened = self.json_text(block.message, instance_id, "block")
        if is_sealed(opened):
            return replace(block, message=opened)
        message, detail = _BLOCK_DETAIL.decode(opened)
        return replace(block, message=message, detail=detail)

    def state(self, values: dict[str, KvEntry], instance_id: str) -> dict[str, KvEntry]:
        return {
            key: replace(entry, value=self.json_text(entry.value, instance_id, f"state {key}"))
            for key, entry in values.items()
        }

    def output(self, status: Status | None, output: str | None, instance_id: str) -> str | None:
        """Return the output of an execution: a payload, the next input, or a failure."""
        if output is None:
            return None
        if status in _FAILED:
            try:
                failure = msgspec.json.decode(output, type=Failure)
            except msgspec.MsgspecError:
                return output
            return msgspec.json.encode(self.failure(failure, instance_id, "failure")).decode()
        field = "input" if status is Status.CONTINUED_AS_NEW else "output"
        return self.json_text(output, instance_id, field)

    # --- events and work items

    def record(self, record: R) -> R:
        """Return the event or work item with all that it holds."""
        instance_id: str = cast("Any", record).instance_id
        changes: dict[str, Any] = {}
        for name in record.__struct_fields__:
            value: Any = getattr(record, name)
            kind = cast("Any", type(value))
            if kind is msgspec.Raw:
                place = PayloadContext(instance_id, _field(record, name))
                changes[name] = msgspec.Raw(self._change(bytes(value), place))
            elif kind is Failure:
                changes[name] = self.failure(value, instance_id, _field(record, "failure"))
            elif kind is str and name in _JSON_TEXTS:
                changes[name] = self.json_text(value, instance_id, _field(record, name))
            elif name == "reason":
                changes[name] = self.text(value, instance_id, name)
            elif name == "initial_state" and value:
                changes[name] = {
                    key: self.json_text(text, instance_id, f"state {key}")
                    for key, text in value.items()
                }
            elif name == "carried":
                changes[name] = tuple(self._carried(each, instance_id) for each in value)
        return replace(record, **changes) if changes else record

    def _carried(self, mail: work.CarriedMessage, instance_id: str) -> work.CarriedMessage:
        field = f"message {mail.name}" if mail.mailbox else f"event {mail.name}"
        data = self._change(bytes(mail.data), PayloadContext(instance_id, field))
        return replace(mail, data=msgspec.Raw(data))

    def _body(self, text: str, decode: Callable[[str], Any]) -> str:
        if self._is_opening and _MARK not in text:
            return text
        try:
            return wire.encode(self.record(decode(text)))
        except CorruptData:
            return text  # readers say what is wrong with it

    def history(self, records: Iterable[HistoryRecord]) -> tuple[HistoryRecord, ...]:
        return tuple(
            [replace(each, data=self._body(each.data, wire.decode_event)) for each in records]
        )

    def message(self, message: OrchestratorMessage) -> OrchestratorMessage:
        return replace(message, body=self._body(message.body, wire.decode_item))

    def work(self, message: WorkerMessage) -> WorkerMessage:
        return replace(message, body=self._body(message.body, wire.decode_activity))

    def heartbeat(self, text: str | None, item: Any) -> str | None:
        """Return the heartbeat of an activity, or of its identity."""
        if text is None:
            return None
        field = f"heartbeat of {item.execution_id}/{item.activity_id}"
        return self.json_text(text, item.instance_id, field)

    # --- records of the contract

    def commit(self, commit: TurnCommit, instance_id: str | None = None) -> TurnCommit:
        owner = instance_id or _owner(commit)
        status = commit.custom_status
        if status is not None and status.value is not None:
            text = self.json_text(status.value, owner, _STATUS)
            status = CustomStatusChange(value=text)
        metadata = commit.metadata
        if metadata.output is not None:
            output = self.output(metadata.status, metadata.output, owner)
            metadata = replace(metadata, output=output)
        return replace(
            commit,
            history_delta=self.history(commit.history_delta),
            worker_items=tuple([self.work(each) for each in commit.worker_items]),
            orchestrator_items=tuple([self.message(each) for each in commit.orchestrator_items]),
            metadata=metadata,
            custom_status=status,
            kv_changes=tuple(
                [
                    replace(each, value=self.json_text(each.value, owner, f"state {each.key}"))
                    if isinstance(each, KvSet)
                    else each
                    for each in commit.kv_changes
                ]
            ),
        )

    def fetched(self, fetched: FetchedOrchestration) -> FetchedOrchestration:
        item = fetched.item
        messages = [
            replace(each, body=self._body(each.body, wire.decode_item)) for each in item.messages
        ]
        opened = replace(
            item,
            history=self.history(item.history),
            messages=tuple(messages),
            kv_snapshot=self.state(item.kv_snapshot, item.instance_id),
        )
        return replace(fetched, item=opened)

    def fetched_work(self, fetched: list[FetchedWork]) -> list[FetchedWork]:
        return [
            replace(
                each,
                body=self._body(each.body, wire.decode_activity),
                heartbeat=self.heartbeat(each.heartbeat, each.identity),
            )
            for each in fetched
        ]

    def queued(self, entries: Iterable[Q]) -> list[Q]:
        """Return messages in a queue, or dead letters."""
        return [replace(each, message=self.message(each.message)) for each in entries]

    def queued_work(self, entries: Iterable[QueuedWork]) -> list[QueuedWork]:
        return [
            replace(
                each,
                message=self.work(each.message),
                heartbeat=self.heartbeat(each.heartbeat, each.message.identity),
            )
            for each in entries
        ]

    def ended(self, info: I, instance_id: str) -> I:
        """Return the record of an execution with its output."""
        return replace(info, output=self.output(info.status, info.output, instance_id))

    def info(self, info: InstanceInfo) -> InstanceInfo:
        status, block = info.custom_status, info.block
        return replace(
            self.ended(info, info.instance_id),
            custom_status=status and self.json_text(status, info.instance_id, _STATUS),
            block=block and self.block(block, info.instance_id),
        )

    def snapshot(self, snapshot: InstanceSnapshot) -> InstanceSnapshot:
        """Return the whole instance: for a copy under another id, and for a replay."""
        instance_id, status, block = snapshot.instance_id, snapshot.custom_status, snapshot.block
        changed = {key: entry for key, entry in snapshot.kv_delta.items() if entry is not None}
        return replace(
            snapshot,
            custom_status=status and self.json_text(status, instance_id, _STATUS),
            block=block and self.block(block, instance_id),
            executions=tuple(
                replace(self.ended(each, instance_id), history=self.history(each.history))
                for each in snapshot.executions
            ),
            kv_store=self.state(snapshot.kv_store, instance_id),
            kv_delta={**snapshot.kv_delta, **self.state(changed, instance_id)},
            messages=tuple(self.queued(snapshot.messages)),
            work=tuple(self.queued_work(snapshot.work)),
        )


def _field(record: Any, name: str) -> str:
    """Return the words for the place of a value. An answer has the same ones in queue and history.

    Steps have the number of their execution and event, so that two of them cannot be exchanged.
    """
    step: int | None = None
    match record:
        case events.ExternalEvent() | work.ExternalRaised():
            return f"event {record.name}"
        case events.QueueEventDelivered() | work.QueueMessage():
            return f"message {record.name}"
        case events.KeyValueSet():
            return f"state {record.key}"
        case events.Resolving():
            step = record.source_event_id
        case events.Scheduled():
            step = record.event_id
        case work.Item():
            step = getattr(record, "activity_id", getattr(record, "event_id", None))
        case _:
            pass
    word = _JSON_TEXTS.get(name) or name
    if step is None or word == _STATUS:
        return word
    return f"{word} of {getattr(record, 'execution_id', 0)}/{step}"


def _owner(commit: TurnCommit) -> str:
    """Return the instance of a turn. Each turn that writes something to seal has an event."""
    for record in commit.history_delta:
        return wire.decode_event(record.data).instance_id
    for message in commit.orchestrator_items:
        if message.kind == work.ContinueAsNew.__name__:
            return message.instance_id
    values = (commit.metadata.output, commit.custom_status)
    if any(values) or any(isinstance(each, KvSet) for each in commit.kv_changes):
        raise InternalError("a commit without events writes values: their instance is not known")
    return ""


# --- the provider


def _fetched(to: Sealing, fetched: FetchedOrchestration, _: object) -> FetchedOrchestration:
    return to.fetched(fetched)


def _history(to: Sealing, records: list[HistoryRecord], _: object) -> list[HistoryRecord]:
    return list(to.history(records))


def _custom_status(to: Sealing, found: tuple[str | None, int], instance_id: str) -> Any:
    text, version = found
    return text and to.json_text(text, instance_id, _STATUS), version


def _page(to: Sealing, page: InstancePage, _: object) -> InstancePage:
    return replace(page, instances=tuple(map(to.info, page.instances)))


def _opens(verb: str, change: Callable[[Sealing, Any, str], Any]) -> Any:
    """Return a method that calls the verb inside and opens what it returns, unless that is None.

    ``change`` gets the answer and the first argument, which is the instance of most verbs. The verb
    inside is called at once, so that concurrent calls keep their order.
    """

    async def opened(answer: Awaitable[Any], opening: Sealing, first: Any) -> Any:
        found = await answer
        return None if found is None else change(opening, found, first)

    def method(sealed: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        first = args[0] if args else kwargs.get("instance_id")
        return opened(getattr(sealed.inner, verb)(*args, **kwargs), sealed.opening, first)

    return method


class SealedProvider:
    """A provider as it was given, with payloads sealed by a codec. It has all of its verbs."""

    def __init__(self, inner: Provider, codec: Codec) -> None:
        self.inner = inner
        self.sealing = Sealing(codec)
        self.opening = Sealing(codec, is_opening=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def admin(self) -> Any:
        return _SealedAdmin(self.inner.admin, self.opening)

    # --- out of the store

    fetch_orchestration_item = _opens("fetch_orchestration_item", _fetched)
    fetch_work_item = _opens("fetch_work_item", lambda to, work, _: to.fetched_work([work])[0])
    fetch_work_items = _opens("fetch_work_items", lambda to, work, _: to.fetched_work(work))
    read = _opens("read", _history)
    read_with_execution = _opens("read_with_execution", _history)
    get_custom_status = _opens("get_custom_status", _custom_status)
    get_kv_all_values = _opens("get_kv_all_values", Sealing.state)

    def get_kv_value(self, instance_id: str, key: str) -> Awaitable[str | None]:
        open_value = _opens(
            "get_kv_value",
            lambda to, text, owner: text and to.json_text(text, owner, f"state {key}"),
        )
        found: Awaitable[str | None] = open_value(self, instance_id, key)
        return found

    # --- into the store

    def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> Awaitable[None]:
        return self.inner.ack_orchestration_item(lock_token, self.sealing.commit(commit))

    def start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> Awaitable[bool]:
        sealed = self.sealing.commit(commit, start.instance_id)
        message = self.sealing.message(start)
        return self.inner.start_orchestration_item(message, sealed, lock_token, owner)

    def append_with_execution(
        self, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
    ) -> Awaitable[None]:
        sealed = self.sealing.history(records)
        return self.inner.append_with_execution(instance_id, execution_id, sealed)

    def enqueue_for_worker(self, message: WorkerMessage) -> Awaitable[None]:
        return self.inner.enqueue_for_worker(self.sealing.work(message))

    def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> Awaitable[None]:
        return self.inner.ack_work_item(
            lock_token,
            None if completion is None else self.sealing.message(completion),
            None if retry is None else self.sealing.work(retry),
        )

    def settle_in_transaction(
        self, lock_token: str, settle: Callable[[Any], OrchestratorMessage]
    ) -> Awaitable[None]:
        return self.inner.settle_in_transaction(
            lock_token, lambda connection: self.sealing.message(settle(connection))
        )

    def enqueue_for_orchestrator(
        self, message: OrchestratorMessage, *args: Any, **kwargs: Any
    ) -> Awaitable[bool]:
        return self.inner.enqueue_for_orchestrator(self.sealing.message(message), *args, **kwargs)

    def enqueue_many_for_orchestrator(
        self, messages: Sequence[OrchestratorMessage], *args: Any, **kwargs: Any
    ) -> Awaitable[list[bool]]:
        sealed = [self.sealing.message(each) for each in messages]
        return self.inner.enqueue_many_for_orchestrator(sealed, *args, **kwargs)


class _SealedAdmin:
    """The administration of a sealed provider. Exports and imports pass as they are."""

    def __init__(self, inner: ProviderAdmin, opening: Sealing) -> None:
        self.inner = inner
        self.opening = opening

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    list_instances = _opens("list_instances", _page)
    get_instance_info = _opens("get_instance_info", lambda to, info, _: to.info(info))
    get_execution_info = _opens("get_execution_info", Sealing.ended)
    read_history_with_execution_id = _opens("read_history_with_execution_id", _history)
    lock_instance = _opens("lock_instance", _fetched)
    list_messages = _opens("list_messages", lambda to, queued, _: to.queued(queued))
    list_work = _opens("list_work", lambda to, queued, _: to.queued_work(queued))
    list_dead_letters = _opens("list_dead_letters", lambda to, letters, _: to.queued(letters))


Provider.register(SealedProvider)


def sealed(provider: Provider, codec: Codec) -> Provider:
    """Return the provider for a runtime or client with this codec."""
    inner = stored_in(provider)
    return cast("Provider", SealedProvider(inner, codec)) if codec.transform_names else inner


async def export_opened(provider: Provider, instance_id: str) -> InstanceSnapshot:
    """Return an instance that is to be copied under another id.

    Raises CannotUnwrap if it has payloads that cannot be opened: the copy could not read them.
    """
    snapshot = await provider.admin.export_instance(instance_id)
    if isinstance(provider, SealedProvider):
        snapshot = provider.opening.snapshot(snapshot)
    for execution in snapshot.executions:
        for record in execution.history:
            _require_open(wire.decode_event(record.data))
    return snapshot


async def import_sealed(provider: Provider, snapshot: InstanceSnapshot) -> None:
    """Store an instance that was built from opened payloads."""
    if isinstance(provider, SealedProvider):
        snapshot = provider.sealing.snapshot(snapshot)
    await provider.admin.import_instance(snapshot)


def _require_open(event: Any) -> None:
    for name in event.__struct_fields__:
        value: Any = getattr(event, name)
        text = value.message if isinstance(value, Failure) else value
        if isinstance(text, str | msgspec.Raw):
            data = text if isinstance(text, str) else bytes(text)
            require_open(data, f"{name} of event {event.event_id} of {event.instance_id!r}")


def stored_in(provider: Provider) -> Provider:
    """Return the provider that stores, without the sealing of a codec."""
    return provider.inner if isinstance(provider, SealedProvider) else provider
