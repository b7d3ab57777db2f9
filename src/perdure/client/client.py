"""Start, message, watch and control instances. Talks to the store only; needs no worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    TypeVar,
    TypeVarTuple,
    cast,
    overload,
    runtime_checkable,
)
from weakref import WeakKeyDictionary

import msgspec

from perdure.arguments import (
    check_kind,
    check_methods,
    check_number,
    check_reason,
    check_string,
    timeout_seconds,
    to_seconds,
)
from perdure.authoring import Orchestration
from perdure.authoring.definitions import parse_version
from perdure.client.admin import Administration
from perdure.client.instance import (
    Handle,
    InstanceStatus,
    failure_error,
    failure_in_output,
    view_of,
)
from perdure.client.steps import read_open_steps
from perdure.client.terminate import cancel_delayed, terminate
from perdure.client.waiting import EndWaiter, check_loop
from perdure.clock import SystemClock
from perdure.codec import JSON, Codec
from perdure.errors import AlreadyExists, NotFound, UsageError, shown
from perdure.ids import new_id
from perdure.limits import check_id
from perdure.model import events, wire, work
from perdure.model.envelopes import envelope
from perdure.model.failures import Failure
from perdure.model.status import Status
from perdure.providers.records import EnqueueCondition, InstanceQuery
from perdure.providers.rules import UNKNOWN_NAME
from perdure.providers.url import open_provider

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from perdure.arguments import Duration
    from perdure.client.steps import OpenStep
    from perdure.client.waiting import Ending, Finished, LocalInstances
    from perdure.clock import Clock
    from perdure.providers.contract import Provider

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

log = logging.getLogger("perdure.client")

IfExists = Literal["get", "fail", "replace"]

_users: WeakKeyDictionary[Provider, int] = WeakKeyDictionary()
"""Clients and runtimes that share a provider. The last one to leave closes it."""

_PAGE = 500
_COMPLETED = Status.COMPLETED  # found at once: members of an enum are looked up in Python
_REPLACE = EnqueueCondition.REPLACE
_CONDITIONS = {
    "get": EnqueueCondition.ABSENT,
    "fail": EnqueueCondition.ABSENT,
    "replace": EnqueueCondition.REPLACE,
}


@runtime_checkable
class TraceCarrier(Protocol):
    """A tracer that writes the current trace as text."""

    def carrier(self) -> str | None:
        """Return the current trace as text. It is stored with the start."""
        ...


class Client:
    """Starts, messages and watches instances of a store. It runs no instance itself.

    ``async with Client("shop.db") as client: ...``
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Provider,
        *,
        codec: Codec = JSON,
        clock: Clock | None = None,
    ) -> None:
        check_kind(codec, Codec, "codec", "a Codec(...)")
        if clock is not None:
            check_methods(clock, ("now_ms", "sleep"), "clock")
        self.provider = open_provider(store, clock=clock)
        self.codec = codec
        self.clock: Clock = clock or self.provider.clock() or SystemClock()
        self._waiter = EndWaiter(self.provider, self.clock)
        self._traces: TraceCarrier | None = None

    @property
    def _local(self) -> LocalInstances | None:
        """The instances that are live in this process. A ``Runtime`` sets it while it runs."""
        return self._waiter.local

    @_local.setter
    def _local(self, local: LocalInstances | None) -> None:
        self._waiter.local = local

    async def __aenter__(self) -> Self:
        await self.provider.open()
        _users[self.provider] = _users.get(self.provider, 0) + 1
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        others = _users.pop(self.provider, 1) - 1
        if others > 0:
            _users[self.provider] = others
        else:
            await self.provider.close()

    @property
    def admin(self) -> Administration:
        """Verbs of operators: list, delete, prune, queues, workers, dead letters."""
        return Administration(self.provider.admin, self.codec)

    # --- starting

    @overload
    async def start(
        self,
        orchestration: Callable[[*Ts], Awaitable[R]],
        *args: *Ts,
        id: str | None = None,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[R]: ...
    @overload
    async def start(
        self,
        orchestration: Orchestration[..., R],
        *args: Any,
        kwargs: Mapping[str, Any],
        id: str | None = None,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[R]: ...
    @overload
    async def start(
        self,
        orchestration: str,
        *args: Any,
        id: str | None = None,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[Any]: ...
    async def start(  # type: ignore[misc]  # mypy does not accept *args: Any for *args: *Ts
        self,
        orchestration: Any,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        id: str | None = None,  # noqa: A002
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[Any]:
        """Start an instance and return its handle once the store has it.

        ``orchestration`` is the orchestration, or its name in a program that does not have its
        code. ``args`` and ``kwargs`` are the arguments of the orchestration; a name takes
        positional arguments only.

        ``id`` makes the start idempotent. If an instance with that id exists, it is returned as it
        is (``if_exists="get"``), refused (``"fail"``), or deleted with its tree and started anew
        (``"replace"``; NotARoot for a child whose parent has not ended). Without ``id``, a random
        id is made. ``delay`` is a number of seconds, or a timedelta.
        """
        target = _target(orchestration)
        item = self._start_item(target, args, kwargs, id, version)
        ended = await self._submit(item, _delay_ms(delay), if_exists)
        return Handle(self, item.instance_id, None if isinstance(target, str) else target, ended)

    def observe(self, exporter: TraceCarrier) -> None:
        """Store the trace of the caller with each start, so that the instance continues it.

        ``exporter`` is a tracer, such as ``OpenTelemetry()``.
        """
        if isinstance(exporter, type) or not isinstance(exporter, TraceCarrier):
            raise UsageError(
                f"a client observes a tracer, such as OpenTelemetry(), not {exporter!r}"
            )
        self._traces = exporter

    def _start_item(
        self,
        target: Orchestration[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        instance_id: str | None,
        version: str | None,
    ) -> work.StartOrchestration:
        if version is not None:
            parse_version(version)
        return work.StartOrchestration(
            instance_id=new_id() if instance_id is None else check_id(instance_id, "id"),
            name=target if isinstance(target, str) else target.name,
            input=self._arguments(target, args, kwargs),
            version=version,
            trace=None if self._traces is None else _current_trace(self._traces),
        )

    def _arguments(
        self,
        target: Orchestration[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> msgspec.Raw:
        if kwargs is not None:
            _check_kwargs(kwargs, target)
        if isinstance(target, str):
            return self.codec.encode(args, where=f"arguments of {target}")
        signature, named = target.signature, kwargs or {}
        payload = signature.encode_arguments(args, named, self.codec)
        # Report a wrong type to the caller now, not to the worker later.
        signature.check_arguments(args, named, payload, self.codec)
        return payload

    async def _submit(
        self, item: work.StartOrchestration, delay_ms: int | None, if_exists: IfExists
    ) -> Finished | None:
        """Start an instance; return the future of its end if it runs in this process.

        A running runtime begins the instance itself and commits its first turn. In all other cases
        the start goes through the store's queue, for any worker to fetch.
        """
        condition = _condition(if_exists)
        local = self._local
        if local is not None:
            check_loop(local.loop)
            if delay_ms is None and condition is not _REPLACE:
                pending = local.begin(item)
                if pending is not None and await pending.committed:
                    return pending.ended
        taken = await self.provider.enqueue_for_orchestrator(envelope(item), delay_ms, condition)
        if not taken:
            await self._check_existing(item, if_exists)
        return None

    async def _check_existing(self, item: work.StartOrchestration, if_exists: IfExists) -> None:
        """Raise AlreadyExists for a taken id, unless ``if_exists`` and the name allow it."""
        if if_exists == "fail":
            raise AlreadyExists(
                f"{item.instance_id!r} exists already; use if_exists='get' or 'replace', "
                "or another id"
            )
        for name in (await self._other_names([item])).values():
            raise AlreadyExists(
                f"the id {item.instance_id!r} belongs to an instance of {name!r}, "
                f"not of {item.name!r}; use another id"
            )

    @overload
    async def start_many(
        self,
        orchestration: Orchestration[..., R],
        inputs: Iterable[tuple[str, tuple[Any, ...]]],
        *,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> list[Handle[R]]: ...
    @overload
    async def start_many(
        self,
        orchestration: str,
        inputs: Iterable[tuple[str, tuple[Any, ...]]],
        *,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> list[Handle[Any]]: ...
    async def start_many(
        self,
        orchestration: Any,
        inputs: Iterable[tuple[str, tuple[Any, ...]]],
        *,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> list[Handle[Any]]:
        """Start many instances of an orchestration, or of a name.

        ``inputs`` are pairs of an id and a tuple of arguments.
        """
        target = _target(orchestration)
        items = [
            self._start_item(target, _tuple(args), None, each, version)
            for each, args in _pairs(inputs)
        ]
        definition = None if isinstance(target, str) else target
        _condition(if_exists)
        ended = await self._submit_many(items, _delay_ms(delay), if_exists)
        return [
            Handle(self, item.instance_id, definition, ended.get(item.instance_id))
            for item in items
        ]

    async def _submit_many(
        self, items: Sequence[work.StartOrchestration], delay_ms: int | None, if_exists: IfExists
    ) -> dict[str, Finished]:
        """Start many instances; return the ends, by id, of those that run in this process."""
        local = self._local
        if local is not None:
            check_loop(local.loop)
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
        taken = await self.provider.enqueue_many_for_orchestrator(
            [envelope(item) for item in items], delay_ms, _condition(if_exists)
        )
        existing = [item for item, ok in zip(items, taken, strict=True) if not ok]
        if if_exists == "get":
            others = await self._other_names(existing)
            existing = [item for item in existing if item.instance_id in others]
        if existing:
            what = "exist already" if if_exists == "fail" else "belong to another orchestration"
            raise AlreadyExists(
                f"{len(existing)} of {len(items)} ids {what}, the others were started: "
                f"{[item.instance_id for item in existing[:5]]}"
            )

    async def _other_names(self, items: Sequence[work.StartOrchestration]) -> dict[str, str]:
        """Return the ids that belong to an instance of another orchestration, with its name."""
        found: dict[str, str] = {}
        for first in range(0, len(items) if self.provider.capabilities.admin else 0, _PAGE):
            names = {item.instance_id: item.name for item in items[first : first + _PAGE]}
            query = InstanceQuery(instance_ids=tuple(names))
            for info in (await self.provider.admin.list_instances(query, limit=_PAGE)).instances:
                if info.name not in {names[info.instance_id], UNKNOWN_NAME}:
                    found[info.instance_id] = info.name
        return found

    # --- handles and waiting

    @overload
    def get(self, id: str) -> Handle[Any]: ...
    @overload
    def get(self, id: str, orchestration: Orchestration[..., R]) -> Handle[R]: ...
    def get(self, id: str, orchestration: Any = None) -> Handle[Any]:  # noqa: A002
        """Return the handle of an instance. With its orchestration the result is typed."""
        return Handle(self, check_id(id, "id"), orchestration)

    async def _result(self, handle: Handle[R], timeout: Duration | None) -> R:  # noqa: ASYNC109
        deadline_ms = self._deadline_ms(timeout)
        ending = await self._wait_finished(handle.id, handle._finished, deadline_ms)  # noqa: SLF001
        definition = handle._orchestration  # noqa: SLF001
        if ending.status is _COMPLETED:
            raw = msgspec.Raw(ending.output if ending.output is not None else "null")
            result: R
            if definition is not None:
                result = definition.signature.decode_result(raw, self.codec)
            else:
                result = self.codec.decode(raw, where=f"result of {handle.id}")
            return result
        label = ending.name if definition is None else definition.name
        failure = failure_in_output(ending.status, ending.output) or Failure()
        raise failure_error(ending.status, failure, f"{label} {handle.id!r}")

    def _deadline_ms(self, timeout: Duration | None) -> int | None:
        if timeout is None:
            return None
        return self.clock.now_ms() + round(max(timeout_seconds(timeout), 0) * 1000)

    def _wait_finished(
        self, instance_id: str, finished: Finished | None, deadline_ms: int | None
    ) -> Coroutine[Any, Any, Ending]:
        """Wait for the end. A test environment overrides it, to let time pass meanwhile."""
        return self._waiter.wait(instance_id, finished, deadline_ms)

    async def wait_for_status_change(
        self,
        id: str,  # noqa: A002
        last_seen_version: int,
        timeout: Duration | None = None,  # noqa: ASYNC109
    ) -> InstanceStatus:
        """Wait until the custom status is newer than that version, or the instance has ended."""
        check_number(last_seen_version, "last_seen_version", minimum=0)
        deadline_ms = self._deadline_ms(timeout)
        with self.provider.watch(id) as watch:
            while True:
                info = await self.provider.admin.get_instance_info(id)
                if info.status.is_final or info.custom_status_version > last_seen_version:
                    return view_of(info, self.codec)
                await watch.wait(self._waiter.rest_ms(info, deadline_ms))

    async def describe(self, id: str, *, waits: bool = True) -> InstanceStatus:  # noqa: A002
        """Return the instance's status, times and open steps. Raises NotFound for an unknown id."""
        info = await self.provider.admin.get_instance_info(check_id(id, "id"))
        steps: tuple[OpenStep, ...] = ()
        if waits and not info.status.is_final:
            steps = await read_open_steps(self.provider, id, info.execution_id)
        return view_of(info, self.codec, steps)

    async def history(self, id: str, execution_id: int | None = None) -> list[events.Event]:  # noqa: A002
        """Return the events of the latest execution, or of the given one.

        The list is empty before its first turn. Raises NotFound for an unknown id, and for an
        execution that never existed or was pruned.
        """
        if execution_id is not None:
            check_number(execution_id, "execution_id", minimum=1)
        if execution_id is None:
            records = await self.provider.read(check_id(id, "id"))
        else:
            records = await self.provider.read_with_execution(check_id(id, "id"), execution_id)
        if not records:
            await self._check_execution(id, execution_id)
        return wire.decode_history(record.data for record in records)

    async def _check_execution(self, instance_id: str, execution_id: int | None) -> None:
        """Raise NotFound for an unknown id or execution instead of returning []."""
        if not self.provider.capabilities.admin:
            return
        latest = (await self.provider.admin.get_instance_info(instance_id)).execution_id
        if execution_id not in {None, latest}:
            raise NotFound(
                f"{instance_id!r} has no execution {execution_id}; its latest is {latest}"
            )

    async def state(self, id: str, key: str, type: Any = Any) -> Any:  # noqa: A002
        """Return the current value of a key of the instance's ``state``, or None."""
        text = await self.provider.get_kv_value(id, check_string(key, "key"))
        where = f"state[{key!r}] of {id}"
        if text is None:
            self.codec.check_type(type, where=where)
            return None
        return self.codec.decode(msgspec.Raw(text), type, where=where)

    # --- messages and control

    async def raise_event(self, id: str, name: str, value: object = None) -> None:  # noqa: A002
        """Send an event. Raises NotFound or InstanceFinished if it cannot arrive."""
        check_id(name, "event name")
        data = self.codec.encode(value, where=f"event {name}")
        await self._send(work.ExternalRaised(instance_id=id, name=name, data=data))

    async def send_message(self, id: str, queue: str, value: object = None) -> None:  # noqa: A002
        """Put a message into a mailbox. Raises NotFound or InstanceFinished if it cannot arrive."""
        check_id(queue, "queue name")
        data = self.codec.encode(value, where=f"message for {queue}")
        await self._send(work.QueueMessage(instance_id=id, name=queue, data=data))

    async def cancel(self, id: str, reason: str = "") -> None:  # noqa: A002
        """Request the cancellation of an instance. Raises NotFound or InstanceFinished."""
        request = work.CancelInstance(instance_id=check_id(id, "id"), reason=check_reason(reason))
        if self.provider.capabilities.admin and await cancel_delayed(
            self.provider, id, reason, self.clock
        ):
            return
        await self._send(request)

    async def _send(self, item: work.OrchestratorItem) -> None:
        check_id(item.instance_id, "id")
        await self.provider.enqueue_for_orchestrator(
            envelope(item), condition=EnqueueCondition.ALIVE
        )

    async def terminate(self, id: str, reason: str = "") -> None:  # noqa: A002
        """End the instance now, without running its code. Its children are cancelled."""
        check_reason(reason)
        await terminate(self.provider, check_id(id, "id"), reason, self.clock)
        if self._local is not None:
            # Without this, the runtime of this process notices only at the next lock renewal.
            self._local.terminated(id)

    async def pause(self, id: str) -> None:  # noqa: A002
        """Stop running turns of the instance until ``resume``."""
        await self.provider.admin.suspend_instance(check_id(id, "id"))

    async def resume(self, id: str) -> None:  # noqa: A002
        """Continue after ``pause``, or retry a Blocked instance."""
        await self.provider.admin.resume_instance(check_id(id, "id"))


def _current_trace(traces: TraceCarrier) -> str | None:
    try:
        trace = traces.carrier()
        return None if trace is None else check_string(trace, "what carrier() gives")
    except Exception:
        log.exception("a tracer failed")
        return None


def _delay_ms(delay: Duration | None) -> int | None:
    return None if delay is None else round(to_seconds(delay, "delay") * 1000)


def _condition(if_exists: str) -> EnqueueCondition:
    try:
        return _CONDITIONS[if_exists]
    except KeyError:
        raise UsageError(f"if_exists is {if_exists!r}; use 'get', 'fail' or 'replace'") from None


def _target(orchestration: Any) -> Orchestration[..., Any] | str:
    if isinstance(orchestration, Orchestration):
        return cast("Orchestration[..., Any]", orchestration)
    if isinstance(orchestration, str):
        return check_id(orchestration, "orchestration name")
    raise UsageError(
        f"start takes an orchestration or its name, not {orchestration!r}; decorate the function "
        "with @orchestration, or write start('its name', ...)"
    )


def _check_kwargs(kwargs: Any, target: Orchestration[..., Any] | str) -> None:
    if not isinstance(kwargs, Mapping):
        raise UsageError(
            f"kwargs takes a dict of the orchestration's arguments by name, not {shown(kwargs)}"
        )
    if isinstance(target, str):
        raise UsageError(
            f"{target!r} is started by its name, which does not tell the order of its parameters; "
            "give its arguments by position, without kwargs, or start the orchestration itself"
        )


def _pairs(inputs: Any) -> Iterator[tuple[Any, Any]]:
    wanted = "start_many takes pairs of an id and a tuple of arguments, such as ('o-1', (1200,))"
    if isinstance(inputs, Mapping):
        raise UsageError(f"{wanted}; of a dict, hand in its .items()")
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        raise UsageError(f"{wanted}, in a list, not {shown(inputs)}")
    for pair in cast("Any", inputs):
        if not isinstance(pair, (tuple, list)) or len(cast("Any", pair)) != 2:
            raise UsageError(f"{wanted}; {shown(cast('Any', pair))} is no such pair")
        yield cast("tuple[Any, Any]", pair)


def _tuple(args: Any) -> tuple[Any, ...]:
    if isinstance(args, (tuple, list)):
        return tuple(cast("Iterable[Any]", args))
    raise UsageError(
        f"start_many takes pairs of an id and a tuple of arguments, such as ('o-1', (1200,)); "
        f"{args!r} is no tuple"
    )
