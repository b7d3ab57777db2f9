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

import msgspec

from perdure.arguments import (
    check_kind,
    check_methods,
    check_number,
    check_reason,
    check_seconds,
    check_string,
    check_timeout,
    shown,
)
from perdure.authoring import Orchestration
from perdure.authoring.definitions import parse_version
from perdure.client import sharing
from perdure.client.administration import Administration
from perdure.client.handle import Handle
from perdure.client.messages import envelope
from perdure.client.shielded import Shielded
from perdure.client.termination import cancel_delayed, terminate
from perdure.client.view import (
    Ending,
    InstanceStatus,
    failure_error,
    failure_in_output,
    view_of,
)
from perdure.client.waits import read_waits
from perdure.clock import SystemClock
from perdure.codec import JSON, Codec
from perdure.errors import AlreadyExists, NotFound, NotSupported, UsageError, WaitTimeout
from perdure.limits import check_id
from perdure.model import events, wire, work
from perdure.model.failures import Failure
from perdure.model.status import Status
from perdure.noise import unguessable
from perdure.providers._shared.rules import UNKNOWN_NAME
from perdure.providers.items import EnqueueCondition, InstanceQuery
from perdure.providers.url import open_provider

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from perdure.client.view import Finished
    from perdure.client.waits import OpenStep
    from perdure.clock import Clock
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.items import InstanceInfo

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

log = logging.getLogger("perdure.client")

IfExists = Literal["get", "fail", "replace"]

_PAGE = 500
_COMPLETED = Status.COMPLETED  # found at once: members of an enum are looked up in Python
_CONDITIONS = {
    "get": EnqueueCondition.ABSENT,
    "fail": EnqueueCondition.ABSENT,
    "replace": EnqueueCondition.REPLACE,
}


@runtime_checkable
class TraceCarrier(Protocol):
    """A tracer, as far as a client needs one."""

    def carrier(self) -> str | None:
        """The current trace as text, to travel with a start."""
        ...


class Client:
    """A store from outside. ``async with Client("shop.db") as client: ...``"""

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
        # The store notices changes, also of other processes; this only bounds a missed notice.
        self._watch_ms = 5_000
        self._traces: TraceCarrier | None = None

    async def __aenter__(self) -> Self:
        await sharing.enter(self.provider)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await sharing.leave(self.provider)

    @property
    def admin(self) -> Administration:
        """Listing, deleting, pruning, queues, workers, moving."""
        return Administration(self._admin(), self.codec)

    def _admin(self) -> ProviderAdmin:
        admin = self.provider.admin()
        if admin is None:
            raise NotSupported(
                "admin", f"the provider {self.provider.name!r} has no administration"
            )
        return admin

    # --- starting

    async def start(
        self,
        orchestration: Callable[[*Ts], Awaitable[R]],
        *args: *Ts,
        id: str | None = None,  # noqa: A002
        version: str | None = None,
        delay: float | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[R]:
        """Start an instance and return its handle once the store has it.

        ``id`` makes it idempotent: an instance that exists already is returned as it is
        (``if_exists="get"``), refused (``"fail"``), or deleted with its tree and started anew
        (``"replace"``; NotARoot for a child whose parent has not ended). Without one, a random id
        is made. ``delay`` is in seconds.
        """
        definition = _definition(orchestration)
        item = self._start_item(definition.name, self._arguments(definition, args), id, version)
        delay_ms, condition = _delay_ms(delay), _condition(if_exists)
        begun = self._begin(item, delay_ms, condition)
        finished = None if begun is None else await begun
        if finished is None:
            await self._enqueue(item, delay_ms, if_exists)
        return Handle(self, item.instance_id, definition, finished)

    async def start_named(
        self,
        name: str,
        *args: Any,
        id: str | None = None,  # noqa: A002
        version: str | None = None,
        delay: float | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[Any]:
        """As ``start``, for a program that does not have the orchestration's code."""
        payload = self.codec.encode(args, where=f"arguments of {name}")
        item = self._start_item(check_id(name, "orchestration name"), payload, id, version)
        delay_ms, condition = _delay_ms(delay), _condition(if_exists)
        begun = self._begin(item, delay_ms, condition)
        finished = None if begun is None else await begun
        if finished is None:
            await self._enqueue(item, delay_ms, if_exists)
        return Handle(self, item.instance_id, None, finished)

    def observe(self, exporter: TraceCarrier) -> None:
        """Let what is started here continue the trace of whoever starts it: ``OpenTelemetry()``."""
        if isinstance(exporter, type) or not isinstance(exporter, TraceCarrier):
            raise UsageError(
                f"a client observes a tracer, such as OpenTelemetry(), not {exporter!r}"
            )
        self._traces = exporter

    def _start_item(
        self, name: str, payload: msgspec.Raw, instance_id: str | None, version: str | None
    ) -> work.StartOrchestration:
        if version is not None:
            parse_version(version)
        return work.StartOrchestration(
            instance_id=unguessable() if instance_id is None else check_id(instance_id, "id"),
            name=name,
            input=payload,
            version=version,
            trace=None if self._traces is None else _current_trace(self._traces),
        )

    def _arguments(self, definition: Orchestration[..., Any], args: tuple[Any, ...]) -> msgspec.Raw:
        signature = definition.signature
        payload = signature.encode_arguments(args, {}, self.codec)
        # A wrong type is an error here and now.
        signature.check_arguments(args, {}, payload, self.codec)
        return payload

    def _begin(
        self, item: work.StartOrchestration, delay_ms: int | None, condition: EnqueueCondition
    ) -> Awaitable[asyncio.Future[Any] | None] | None:
        """For a runtime, which can begin an instance by itself: gives what its end will resolve.

        None, at once or later: its start has to be enqueued.
        """
        return None

    async def _enqueue(
        self, item: work.StartOrchestration, delay_ms: int | None, if_exists: IfExists
    ) -> None:
        """Hand a start to the store."""
        taken = await self.provider.enqueue_for_orchestrator(
            envelope(item), delay_ms, _condition(if_exists)
        )
        if not taken:
            await self._check_existing(item, if_exists)

    async def _check_existing(self, item: work.StartOrchestration, if_exists: IfExists) -> None:
        """The id is taken: refuse, unless it is what was asked for and may be had."""
        if if_exists == "fail":
            raise AlreadyExists(
                f"{item.instance_id!r} exists already; use if_exists='get' or 'replace', "
                "or another id"
            )
        admin = self.provider.admin()
        try:
            info = None if admin is None else await admin.get_instance_info(item.instance_id)
        except NotFound:
            return  # deleted meanwhile: the handle says so, too
        if info is not None and info.name not in {item.name, UNKNOWN_NAME}:
            raise AlreadyExists(
                f"the id {item.instance_id!r} belongs to an instance of {info.name!r}, "
                f"not of {item.name!r}; use another id"
            )

    async def start_many(
        self,
        orchestration: Orchestration[..., R],
        inputs: Iterable[tuple[str, tuple[Any, ...]]],
        *,
        version: str | None = None,
        delay: float | None = None,
        if_exists: IfExists = "get",
    ) -> list[Handle[R]]:
        """Start many instances at once: pairs of id and arguments."""
        definition = _definition(orchestration)
        items = [
            self._start_item(
                definition.name, self._arguments(definition, _tuple(args)), each, version
            )
            for each, args in _pairs(inputs)
        ]
        _condition(if_exists)
        endings = await self._submit_many(items, _delay_ms(delay), if_exists)
        return [
            Handle(self, item.instance_id, definition, finished)
            for item, finished in zip(items, endings, strict=True)
        ]

    async def _submit_many(
        self, items: Sequence[work.StartOrchestration], delay_ms: int | None, if_exists: IfExists
    ) -> list[asyncio.Future[Any] | None]:
        """Hand many starts to the store at once; a runtime may know of a shorter way."""
        taken = await self.provider.enqueue_many_for_orchestrator(
            [envelope(item) for item in items], delay_ms, _condition(if_exists)
        )
        existing = [item for item, ok in zip(items, taken, strict=True) if not ok]
        if if_exists == "get":
            existing = await self._of_other_names(existing)
        if existing:
            what = "exist already" if if_exists == "fail" else "belong to another orchestration"
            raise AlreadyExists(
                f"{len(existing)} of {len(items)} ids {what}, the others were started: "
                f"{[item.instance_id for item in existing[:5]]}"
            )
        return [None] * len(items)

    async def _of_other_names(
        self, items: Sequence[work.StartOrchestration]
    ) -> list[work.StartOrchestration]:
        """Those whose id belongs to an instance of another orchestration."""
        admin = self.provider.admin()
        found: list[work.StartOrchestration] = []
        for first in range(0, len(items) if admin is not None else 0, _PAGE):
            page = items[first : first + _PAGE]
            query = InstanceQuery(instance_ids=tuple(item.instance_id for item in page))
            infos = (await self._admin().list_instances(query, limit=_PAGE)).instances
            names = {info.instance_id: info.name for info in infos}
            found += [
                item
                for item in page
                if names.get(item.instance_id, UNKNOWN_NAME) not in {item.name, UNKNOWN_NAME}
            ]
        return found

    # --- handles and waiting

    @overload
    def get(self, id: str) -> Handle[Any]: ...
    @overload
    def get(self, id: str, orchestration: Orchestration[..., R]) -> Handle[R]: ...
    def get(self, id: str, orchestration: Any = None) -> Handle[Any]:  # noqa: A002
        """The handle of an instance; with its orchestration the result is typed."""
        return Handle(self, check_id(id, "id"), orchestration)

    async def _result(self, handle: Handle[R], timeout: float | None) -> R:  # noqa: ASYNC109
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

    def _deadline_ms(self, timeout: float | None) -> int | None:
        if timeout is None:
            return None
        check_timeout(timeout)
        return self.clock.now_ms() + round(max(timeout, 0) * 1000)

    async def _wait_finished(
        self, instance_id: str, finished: Finished | None, deadline_ms: int | None
    ) -> Ending:
        """``finished``: what the end resolves, if it is known to run in this process."""
        if finished is None or _can_be_retried(finished):
            finished = self._finishes_here(instance_id)
        while True:
            ending = None if finished is None else await self._wait_here(finished, deadline_ms)
            if ending is None:
                ending, finished = await self._watch_for_end(instance_id, deadline_ms)
            if ending is not None:
                return ending

    async def _wait_here(self, finished: Finished, deadline_ms: int | None) -> Ending | None:
        """None: it left this process before it ended, or there is no time left."""
        check_loop(finished.get_loop())
        if finished.done():
            return finished.result()
        if deadline_ms is None:
            return await Shielded(finished)
        seconds = (deadline_ms - self.clock.now_ms()) / 1000
        alarm = asyncio.ensure_future(self.clock.sleep(seconds))
        try:
            await asyncio.wait((finished, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            alarm.cancel()
        return finished.result() if finished.done() else None

    async def _watch_for_end(
        self, instance_id: str, deadline_ms: int | None
    ) -> tuple[Ending | None, Finished | None]:
        """The end as stored; or what it resolves, as soon as the instance runs in this process."""
        has_warned = False
        with self.provider.watch(instance_id) as watch:
            while True:
                info = await self._info_until_here(instance_id)
                if info is not None:
                    if info.status.is_final:
                        return Ending(info.status, info.output, info.name or instance_id), None
                    if info.status is Status.BLOCKED and not has_warned:
                        # Whoever waits for ever must learn why.
                        log.warning("%r is %s; still waiting", instance_id, _standing(info))
                        has_warned = True
                    patience_ms = self._patience_ms(info, deadline_ms)
                    if self._finishes_here(instance_id) is None:
                        await watch.wait(patience_ms)
                finished = self._finishes_here(instance_id)
                if finished is not None:
                    return None, finished

    async def _info_until_here(self, instance_id: str) -> InstanceInfo | None:
        """None if it comes to this process meanwhile: a store with much to do answers later."""
        was_here = self._finishes_here(instance_id) is not None
        reading = asyncio.ensure_future(self._admin().get_instance_info(instance_id))
        try:
            with self.provider.watch(instance_id) as watch:
                while not reading.done():
                    if not was_here and self._finishes_here(instance_id) is not None:
                        return None
                    changing = asyncio.ensure_future(watch.wait(self._watch_ms))
                    try:
                        await asyncio.wait((reading, changing), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changing.cancel()
            return reading.result()
        finally:
            reading.cancel()

    def _finishes_here(self, instance_id: str) -> Finished | None:
        """What the end of an instance resolves that runs in this process."""
        return None

    def _patience_ms(self, info: InstanceInfo, deadline_ms: int | None) -> int:
        if deadline_ms is None:
            return self._watch_ms
        left_ms = deadline_ms - self.clock.now_ms()
        if left_ms <= 0:
            raise WaitTimeout(
                f"{info.instance_id!r} has not got there in time and goes on: it is "
                f"{_standing(info)}"
            )
        return min(left_ms, self._watch_ms)

    async def wait_for_status_change(
        self,
        id: str,  # noqa: A002
        last_seen_version: int,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> InstanceStatus:
        """Wait until the custom status is newer than that version, or the instance has ended."""
        check_number(last_seen_version, "last_seen_version", minimum=0)
        deadline_ms = self._deadline_ms(timeout)
        admin = self._admin()
        with self.provider.watch(id) as watch:
            while True:
                info = await admin.get_instance_info(id)
                if info.status.is_final or info.custom_status_version > last_seen_version:
                    return view_of(info, self.codec)
                await watch.wait(self._patience_ms(info, deadline_ms))

    async def status(self, id: str, *, waits: bool = True) -> InstanceStatus:  # noqa: A002
        """Where the instance stands now. Raises NotFound for an unknown id."""
        info = await self._admin().get_instance_info(check_id(id, "id"))
        steps: tuple[OpenStep, ...] = ()
        if waits and not info.status.is_final:
            steps = await read_waits(self.provider, id, info.execution_id)
        return view_of(info, self.codec, steps)

    async def history(self, id: str, execution_id: int | None = None) -> list[events.Event]:  # noqa: A002
        """The events of the latest execution, or of the one named; none before it has begun.

        Raises NotFound for an unknown id, and for an execution that the instance does not have, or
        has no more.
        """
        if execution_id is not None:
            check_number(execution_id, "execution_id", minimum=1)
        history = await self._history(check_id(id, "id"), execution_id)
        if not history:
            await self._check_execution(id, execution_id)
        return history

    async def _check_execution(self, instance_id: str, execution_id: int | None) -> None:
        """What nobody knows is no empty history."""
        if (admin := self.provider.admin()) is None:
            return
        latest = (await admin.get_instance_info(instance_id)).execution_id
        if execution_id not in {None, latest}:
            raise NotFound(
                f"{instance_id!r} has no execution {execution_id}; its latest is {latest}"
            )

    async def _history(self, id: str, execution_id: int | None) -> list[events.Event]:  # noqa: A002
        if execution_id is None:
            records = await self.provider.read(id)
        else:
            records = await self.provider.read_with_execution(id, execution_id)
        return wire.decode_history(record.data for record in records)

    async def state(self, id: str, key: str, type: Any = Any) -> Any:  # noqa: A002
        """The live value of a key of the instance's ``state``, or None."""
        text = await self.provider.get_kv_value(id, check_string(key, "key"))
        where = f"state[{key!r}] of {id}"
        if text is None:
            self.codec.check_type(type, where=where)
            return None
        return self.codec.decode(msgspec.Raw(text), type, where=where)

    # --- messages and control

    async def raise_event(self, id: str, name: str, value: object = None) -> None:  # noqa: A002
        """Send an event. Raises NotFound or InstanceFinished instead of losing it."""
        check_id(name, "event name")
        data = self.codec.encode(value, where=f"event {name}")
        await self._send(work.ExternalRaised(instance_id=id, name=name, data=data))

    async def enqueue_event(self, id: str, queue: str, value: object = None) -> None:  # noqa: A002
        """Put a message into a mailbox. Raises NotFound or InstanceFinished, never loses it."""
        check_id(queue, "queue name")
        data = self.codec.encode(value, where=f"message for {queue}")
        await self._send(work.QueueMessage(instance_id=id, name=queue, data=data))

    async def cancel(self, id: str, reason: str = "") -> None:  # noqa: A002
        """Ask the instance to stop. Raises NotFound or InstanceFinished."""
        request = work.CancelInstance(instance_id=check_id(id, "id"), reason=check_reason(reason))
        admin = self.provider.admin()
        if admin is None or not await cancel_delayed(self.provider, admin, id, reason, self.clock):
            await self._send(request)

    async def _send(self, item: work.OrchestratorItem) -> None:
        check_id(item.instance_id, "id")
        await self.provider.enqueue_for_orchestrator(
            envelope(item), condition=EnqueueCondition.ALIVE
        )

    async def terminate(self, id: str, reason: str = "") -> None:  # noqa: A002
        """End the instance now, without running any of its code; its children are cancelled."""
        check_reason(reason)
        await terminate(self.provider, self._admin(), check_id(id, "id"), reason, self.clock)

    async def pause(self, id: str) -> None:  # noqa: A002
        """Let no further turn run until ``resume``."""
        await self._admin().suspend_instance(check_id(id, "id"))

    async def resume(self, id: str) -> None:  # noqa: A002
        """Go on after ``pause``, or try a Blocked instance again."""
        await self._admin().resume_instance(check_id(id, "id"))


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """What runs in this process is driven by one event loop, and can be waited for only there."""
    if asyncio.get_running_loop() is not loop:
        raise UsageError(
            "this runtime runs on another event loop: from here, hand the call over to it with "
            "asyncio.run_coroutine_threadsafe(..., its_loop), or use a Client of your own"
        )


def _can_be_retried(finished: Finished) -> bool:
    """It has not ended well: an operator may have let it begin again since."""
    ending = finished.result() if finished.done() else None
    return ending is not None and ending.status is not _COMPLETED


def _current_trace(traces: TraceCarrier) -> str | None:
    try:
        trace = traces.carrier()
        return None if trace is None else check_string(trace, "what carrier() gives")
    except Exception:
        log.exception("a tracer failed")
        return None


def _standing(info: InstanceInfo) -> str:
    if info.status is Status.BLOCKED and info.block is not None:
        return f"Blocked: {info.block.message}"
    return str(info.status)


def _delay_ms(delay: float | None) -> int | None:
    if delay is None:
        return None
    check_seconds(delay, "delay")
    return round(delay * 1000)


def _condition(if_exists: str) -> EnqueueCondition:
    try:
        return _CONDITIONS[if_exists]
    except KeyError:
        raise UsageError(f"if_exists is {if_exists!r}; use 'get', 'fail' or 'replace'") from None


def _definition(orchestration: Any) -> Orchestration[..., Any]:
    if isinstance(orchestration, Orchestration):
        return cast("Orchestration[..., Any]", orchestration)
    raise UsageError(
        f"start takes an orchestration, not {orchestration!r}; decorate the function with "
        "@orchestration, or use start_named('its name', ...)"
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
