"""Start, message, watch and control instances. Talks to the store only; needs no worker."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack, cast, overload
from weakref import WeakKeyDictionary

import msgspec

from perdure.arguments import (
    check_kind,
    check_methods,
    check_number,
    check_reason,
    check_string,
    timeout_seconds,
)
from perdure.authoring.context import require_scope
from perdure.authoring.definitions import Activity, Orchestration, parse_version
from perdure.client import answers, starting
from perdure.client.admin import Administration
from perdure.client.endings import Ending, EndWaiter, Finished, LocalInstances
from perdure.client.insights import read_stats
from perdure.client.instance import (
    Handle,
    InstanceStats,
    InstanceStatus,
    failure_in_output,
    is_given,
    view_of,
)
from perdure.client.starting import IfChanged, IfExists, Submissions, TraceCarrier
from perdure.client.steps import OpenStep, read_history, read_open_steps
from perdure.client.terminate import cancel_delayed, terminate
from perdure.clock import Clock, SystemClock
from perdure.codec import JSON, Codec
from perdure.errors import InstanceFinished, UsageError
from perdure.ids import new_id
from perdure.limits import check_id
from perdure.logs import get_logger
from perdure.model import events, work
from perdure.model.failures import Failure, ended_error
from perdure.model.status import Status
from perdure.model.wire import envelope
from perdure.providers.records import EnqueueCondition, InstanceInfo
from perdure.providers.sealing import sealed, stored_in
from perdure.providers.url import open_provider

if TYPE_CHECKING:
    import datetime
    import os
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
        Mapping,
    )
    from typing import NoReturn, Self

    from perdure.arguments import Duration
    from perdure.client.answers import PromiseInfo
    from perdure.client.schedules import Schedules
    from perdure.client.starting import BulkOptions, StartOptions
    from perdure.providers.contract import Provider

log = get_logger("perdure.client")

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_users: WeakKeyDictionary[Provider, int] = WeakKeyDictionary()
"""Clients and runtimes that share a provider. The last one to leave closes it."""

_COMPLETED = Status.COMPLETED  # found at once: members of an enum are looked up in Python


def activity_client() -> Client:
    """Return a client of the store on which the running activity works, for an async activity.

    The runtime owns it: do not open or close it. An activity can run twice, so give instances that
    it starts an id, for example ``activity_info().idempotency_key``:

        await activity_client().start(ship, order, id=f"ship-{order}")
    """
    client, loop, _ = require_scope("activity_client()").client()
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        is_here = False
    if not is_here:
        raise UsageError(
            "activity_client() is for async activities; plain functions run in threads, and use "
            "blocking_activity_client()"
        )
    return cast("Client", client)


class Client:
    """Starts, messages and watches instances of a store. It runs no instance itself.

    ``async with Client("shop.db") as client: ...``
    """

    _runs_instances = False

    def __init__(
        self,
        store: str | os.PathLike[str] | Provider,
        *,
        codec: Codec = JSON,
        clock: Clock | None = None,
    ) -> None:
        check_kind(codec, Codec, "codec", "a Codec(...)")
        if not self._runs_instances and isinstance(store, str) and store.startswith("memory:"):
            log.warning(
                "Client(%r) has a store of its own, so no runtime runs what it starts: use a "
                "Runtime, or give Client and Runtime one InMemoryProvider()",
                store,
            )
        if clock is not None:
            check_methods(clock, ("now_ms", "sleep"), "clock")
        self.provider = sealed(open_provider(store, clock=clock), codec)
        self.codec = codec
        self.clock: Clock = clock or self.provider.clock() or SystemClock()
        self._waiter = EndWaiter(self.provider, self.clock)
        self._submissions = Submissions(self.provider, codec, self._waiter)
        self._traces: TraceCarrier | None = None
        self._is_open = False

    @property
    def _local(self) -> LocalInstances | None:
        """The instances that are live in this process. A ``Runtime`` sets it while it runs."""
        return self._waiter.local

    @_local.setter
    def _local(self, local: LocalInstances | None) -> None:
        self._waiter.local = local

    async def __aenter__(self) -> Self:
        await self.provider.open()
        store = stored_in(self.provider)
        _users[store] = _users.get(store, 0) + 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        store = stored_in(self.provider)
        others = _users.pop(store, 1) - 1
        if others > 0:
            _users[store] = others
        else:
            await self.provider.close()

    if not TYPE_CHECKING:  # a type checker finds this by itself

        def __enter__(self) -> NoReturn:
            raise UsageError(
                f"a {type(self).__name__} is opened by 'async with'; code without an event loop "
                "uses 'with BlockingClient(Client(...))'"
            )

        def __exit__(self, *exception: object) -> None: ...

    async def open(self) -> Self:
        """Do what ``async with`` does at its beginning; ``close()`` does the rest."""
        await self.__aenter__()
        self._is_open = True
        return self

    async def close(self) -> None:
        """Close what ``open()`` has opened. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            await self.__aexit__()

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncGenerator[None]:
        """Open and close with an ASGI application: ``FastAPI(lifespan=runtime.lifespan)``."""
        async with self:
            yield

    @property
    def admin(self) -> Administration:
        """Verbs of operators: list, delete, prune, queues, workers, dead letters."""
        return Administration(self.provider, self.codec, self.clock)

    @property
    def schedules(self) -> Schedules:
        """The schedules of the store: list, create, pause, trigger, backfill."""
        from perdure.client.schedules import Schedules

        return Schedules(self)

    # --- starting

    @overload
    async def start(
        self,
        orchestration: Callable[[*Ts], Awaitable[R]],
        *args: *Ts,
        **options: Unpack[StartOptions],
    ) -> Handle[R]: ...
    @overload
    async def start(
        self,
        orchestration: Orchestration[..., R] | Activity[..., R],
        *args: Any,
        kwargs: Mapping[str, Any],
        **options: Unpack[StartOptions],
    ) -> Handle[R]: ...
    @overload
    async def start(
        self,
        orchestration: str,
        *args: Any,
        **options: Unpack[StartOptions],
    ) -> Handle[Any]: ...
    async def start(  # type: ignore[misc]  # mypy does not accept *args: Any for *args: *Ts
        self,
        orchestration: Any,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        id: str | None = None,  # noqa: A002
        version: str | None = None,
        delay: Duration | None = None,
        at: datetime.datetime | None = None,
        message: tuple[str, object] | None = None,
        if_exists: IfExists = "get",
        if_changed: IfChanged = "warn",
        **unknown: Any,
    ) -> Handle[Any]:
        """Start an instance and return its handle once the store has it.

        ``orchestration`` is the orchestration, or its name in a program that does not have its
        code. An activity is started as a job: an orchestration of this one step. ``args`` and
        ``kwargs`` are the arguments; a name takes positional arguments only.

        ``id`` makes the start idempotent. If an instance with that id exists, it is returned as it
        is (``if_exists="get"``), refused (``"fail"``), started anew if it has ended
        (``"restart"``), or deleted with its tree and started anew in any case (``"replace"``;
        NotARoot for a child whose parent has not ended). If it was started with other arguments,
        ``if_changed`` says what happens: a warning in the log, AlreadyExists (``"fail"``), or
        nothing (``"ignore"``). Without ``id``, a random id is made.

        ``message`` is a mailbox and a value: the instance gets it with its start, or, if it exists,
        at once. ``delay`` is a number of seconds, or a timedelta; ``at`` is a time with a zone.
        """
        if unknown:
            starting.refuse_options(unknown, self.start)
        starting.check_if_changed(if_changed)
        target = starting.target_of(orchestration)
        at_ms = starting.time_of_start(at, delay)
        carried = () if message is None else (starting.carried_message(message, self.codec),)
        item = self._start_item(
            target, args, kwargs, id, version, carried=carried, scheduled_for_ms=at_ms
        )
        start = starting.Start(
            item=item,
            target=target,
            delay_ms=starting.delay_in_ms(delay),
            at_ms=None if at_ms is None or at_ms <= self.clock.now_ms() else at_ms,
            if_exists=if_exists,
            if_changed=if_changed,
        )
        ended = await self._submissions.submit(start)
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
        **more: Any,
    ) -> work.StartOrchestration:
        if version is not None:
            parse_version(version)
        return work.StartOrchestration(
            instance_id=new_id() if instance_id is None else check_id(instance_id, "id"),
            name=target if isinstance(target, str) else target.name,
            input=self._arguments(target, args, kwargs, version),
            version=version,
            trace=None if self._traces is None else starting.current_trace(self._traces),
            **more,
        )

    def _arguments(
        self,
        target: Orchestration[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        version: str | None,
    ) -> msgspec.Raw:
        if kwargs is not None:
            starting.check_kwargs(kwargs, target)
        if isinstance(target, str):
            payload = self.codec.encode(args, where=f"arguments of {target}")
            code = self._code_of(target, version)
            if code is not None:
                code.signature.decode_arguments(payload, self.codec)
            return payload
        signature, named = target.signature, kwargs or {}
        payload = signature.encode_arguments(args, named, self.codec)
        # Report a wrong type to the caller now, not to the worker later.
        if not signature.are_exact(args, named):
            signature.check_arguments(args, named, payload, self.codec)
        return payload

    def _code_of(self, name: str, version: str | None) -> Orchestration[..., Any] | None:
        """Return the orchestration of that name if this program has it; a runtime may have it."""
        return None

    @overload
    async def start_many(
        self,
        orchestration: Orchestration[..., R],
        inputs: Iterable[tuple[str, tuple[Any, ...]]],
        **options: Unpack[BulkOptions],
    ) -> list[Handle[R]]: ...
    @overload
    async def start_many(
        self,
        orchestration: str,
        inputs: Iterable[tuple[str, tuple[Any, ...]]],
        **options: Unpack[BulkOptions],
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

        ``inputs`` are pairs of an id and a tuple of arguments. The arguments of an instance that
        exists already are not compared.
        """
        target = starting.target_of(orchestration)
        items = [
            self._start_item(target, args, None, each, version)
            for each, args in starting.pairs_of(inputs)
        ]
        definition = None if isinstance(target, str) else target
        if if_exists == "restart":
            raise UsageError("start_many has no if_exists='restart'; start each of them")
        ended = await self._submissions.submit_many(
            items, target, starting.delay_in_ms(delay), if_exists
        )
        return [
            Handle(self, item.instance_id, definition, ended.get(item.instance_id))
            for item in items
        ]

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
        raise ended_error(ending.status, failure, f"{label} {handle.id!r}")

    def _deadline_ms(self, timeout: Duration | None) -> int | None:
        if timeout is None:
            return None
        return self.clock.now_ms() + round(max(timeout_seconds(timeout), 0) * 1000)

    def _wait_finished(
        self, instance_id: str, finished: Finished | None, deadline_ms: int | None
    ) -> Coroutine[Any, Any, Ending]:
        """Wait for the end. A test environment overrides it, to let its clock jump."""
        return self._waiter.wait(instance_id, finished, deadline_ms)

    async def wait_for_status_change(
        self,
        id: str,  # noqa: A002
        last_seen_version: int,
        timeout: Duration | None = None,  # noqa: ASYNC109
    ) -> InstanceStatus:
        """Wait until the custom status is newer than that version, or the instance has ended."""
        check_number(last_seen_version, "last_seen_version", minimum=0)

        async def look(info: InstanceInfo) -> InstanceStatus | None:
            is_new = info.status.is_final or info.custom_status_version > last_seen_version
            return view_of(info, self.codec) if is_new else None

        deadline_ms = self._deadline_ms(timeout)
        return await self._waiter.until(id, look, deadline_ms, "changed its custom status")

    async def wait_for_state(
        self,
        id: str,  # noqa: A002
        key: str,
        type: Any = Any,  # noqa: A002
        *,
        until: Callable[[Any], bool] = is_given,
        timeout: Duration | None = None,  # noqa: ASYNC109
    ) -> Any:
        """Wait until a key of the instance's ``state`` has a value, and ``until(value)`` is true.

        Raises InstanceFinished if the instance ends before, WaitTimeout after ``timeout``.
        """
        check_string(key, "key")

        async def look(info: InstanceInfo) -> tuple[Any] | None:
            if (await self.provider.get_kv_value(id, key)) is not None:
                value = await self.state(id, key, type)
                if until(value):
                    return (value,)
            if info.status.is_final:
                raise InstanceFinished(
                    f"{id!r} has ended ({info.status}) without that value of state[{key!r}]"
                )
            return None

        deadline_ms = self._deadline_ms(timeout)
        (found,) = await self._waiter.until(id, look, deadline_ms, f"set state[{key!r}]")
        return found

    async def stats(self, id: str) -> InstanceStats:  # noqa: A002
        """Return the size of the history, the queues and the state of an instance."""
        info = await self.provider.admin.get_instance_info(check_id(id, "id"))
        return await read_stats(self.provider, info)

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
        return await read_history(self.provider, check_id(id, "id"), execution_id)

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
        """Send an event. Raises NotFound or InstanceFinished if it cannot arrive.

        Raises PayloadError if the instance runs in this process and waits for another type.
        """
        check_id(name, "event name")
        data = self.codec.encode(value, where=f"event {name}")
        await self._send_checked(work.ExternalRaised(instance_id=id, name=name, data=data))

    async def send_message(self, id: str, queue: str, value: object = None) -> None:  # noqa: A002
        """Put a message into a mailbox. Raises NotFound or InstanceFinished if it cannot arrive.

        Raises PayloadError if the instance runs in this process and waits for another type.
        """
        check_id(queue, "queue name")
        data = self.codec.encode(value, where=f"message for {queue}")
        await self._send_checked(work.QueueMessage(instance_id=id, name=queue, data=data))

    async def cancel(self, id: str, reason: str = "") -> None:  # noqa: A002
        """Request the cancellation of an instance. Raises NotFound or InstanceFinished."""
        request = work.CancelInstance(instance_id=check_id(id, "id"), reason=check_reason(reason))
        if self.provider.capabilities.admin and await cancel_delayed(
            self.provider, id, reason, self.clock
        ):
            return
        await self._send(request)

    async def _send_checked(self, item: work.ExternalRaised | work.QueueMessage) -> None:
        local = self._local
        if local is not None and local.loop is asyncio.get_running_loop():
            local.check_arrival(item)
        await self._send(item)

    async def _send(self, item: work.OrchestratorItem) -> None:
        check_id(item.instance_id, "id")
        await self.provider.enqueue_for_orchestrator(
            envelope(item), condition=EnqueueCondition.ALIVE
        )

    async def resolve(self, key: str, value: object = None) -> None:
        """Answer ``promise(key)``, before or after an instance awaits it.

        The first answer counts. The same one again changes nothing. Another one raises
        AlreadyResolved, if the first has been taken up.
        """
        await answers.resolve(self, key, value)

    async def reject(self, key: str, reason: str = "") -> None:
        """Let ``await promise(key)`` raise PromiseRejected, as ``resolve`` lets it return."""
        await answers.reject(self, key, reason)

    def promises(self) -> AsyncIterator[PromiseInfo]:
        """Yield the promises without an answer, and the instances that await them."""
        return answers.open_promises(self)

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
