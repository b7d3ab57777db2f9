"""Starts instances: checks of the arguments, ids that are in use, and the way into the store.

A start goes in with its first turn if a runtime runs in this process, else through the queue.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Protocol,
    TypedDict,
    cast,
    get_args,
    runtime_checkable,
)

import msgspec

from perdure.arguments import Duration, check_moment, check_string, to_seconds, whole_milliseconds
from perdure.authoring.definitions import Activity, Orchestration
from perdure.client.admin import read_by_ids
from perdure.client.endings import EndWaiter, Finished, PendingStart, check_loop
from perdure.engine.decisions import is_same_payload
from perdure.errors import (
    AlreadyExists,
    InstanceFinished,
    InstanceStillRunning,
    NotFound,
    PayloadError,
    PerdureError,
    StoreBusy,
    UsageError,
    did_you_mean,
    shown,
)
from perdure.limits import check_id
from perdure.logs import get_logger
from perdure.model import events, wire, work
from perdure.model.wire import envelope
from perdure.providers.records import EnqueueCondition
from perdure.providers.rules import UNKNOWN_NAME

if TYPE_CHECKING:
    import datetime

    from perdure.codec import Codec
    from perdure.providers.contract import Provider

log = get_logger("perdure.client")

IfExists = Literal["get", "fail", "restart", "replace"]
IfChanged = Literal["warn", "fail", "ignore"]


class BulkOptions(TypedDict, total=False):
    """The options of ``start_many``, for its overloads; its docstring says what they do."""

    version: str | None
    delay: Duration | None
    if_exists: IfExists


class StartOptions(BulkOptions, total=False):
    """The options of ``start``."""

    id: str | None
    at: datetime.datetime | None
    message: tuple[str, object] | None
    if_changed: IfChanged


_IF_EXISTS: Final = get_args(IfExists)
_IF_CHANGED: Final = get_args(IfChanged)
_PAIRS: Final = "start_many takes pairs of an id and a tuple of arguments, such as ('o-1', (1200,))"


@runtime_checkable
class TraceCarrier(Protocol):
    """A tracer that writes the current trace as text."""

    def carrier(self) -> str | None:
        """Return the current trace as text. It is stored with the start."""
        ...


def current_trace(traces: TraceCarrier) -> str | None:
    try:
        trace = traces.carrier()
        return None if trace is None else check_string(trace, "what carrier() gives")
    except Exception:
        log.exception("a tracer failed")
        return None


async def other_names(
    items: Sequence[work.StartOrchestration], provider: Provider
) -> dict[str, str]:
    """Return the ids that belong to an instance of another orchestration, with its name."""
    if not provider.capabilities.admin:
        return {}
    names = {item.instance_id: item.name for item in items}
    return {
        info.instance_id: info.name
        async for info in read_by_ids(provider.admin, list(names))
        if info.name not in {names[info.instance_id], UNKNOWN_NAME}
    }


async def has_begun(pending: PendingStart | None, provider: Provider) -> bool:
    """Return True if this start created the instance, although its answer was lost."""
    if pending is None or pending.unsure is None:
        return False
    instance_id = pending.item.instance_id
    records = await provider.read_with_execution(instance_id, 1, limit=1)
    return [record.data for record in records] == [pending.unsure]


def delay_in_ms(delay: Duration | None) -> int | None:
    return None if delay is None else round(to_seconds(delay, "delay") * 1000)


def time_of_start(at: object, delay: object) -> int | None:
    """Return the time ``at`` in milliseconds since 1970, or None without one."""
    if at is None:
        return None
    if delay is not None:
        raise UsageError("a start has a delay or a time at which it begins, not both")
    check_moment(at, "at")
    return whole_milliseconds(cast("datetime.datetime", at), round_up=True)


def carried_message(message: Any, codec: Codec) -> work.CarriedMessage:
    """Return the message that a start carries; raise UsageError unless it is a pair."""
    is_pair = isinstance(message, (tuple, list)) and len(cast("Any", message)) == 2
    if not is_pair:
        raise UsageError(
            f"message takes a mailbox and a value, as ('inbox', 'hello'), not {shown(message)}"
        )
    queue, value = cast("tuple[Any, Any]", message)
    name = check_id(queue, "queue name")
    return work.CarriedMessage(name=name, data=codec.encode(value, where=f"message for {name}"))


def condition_of(if_exists: str) -> EnqueueCondition:
    if if_exists not in _IF_EXISTS:
        raise UsageError(f"if_exists is {if_exists!r}; use 'get', 'fail', 'restart' or 'replace'")
    return EnqueueCondition.REPLACE if if_exists == "replace" else EnqueueCondition.ABSENT


def check_if_changed(if_changed: str) -> None:
    if if_changed not in _IF_CHANGED:
        raise UsageError(f"if_changed is {if_changed!r}; use 'warn', 'fail' or 'ignore'")


def target_of(orchestration: Any) -> Orchestration[..., Any] | str:
    if isinstance(orchestration, Orchestration):
        return cast("Orchestration[..., Any]", orchestration)
    if isinstance(orchestration, Activity):
        activity = cast("Activity[..., Any]", orchestration)
        if activity.has_other_options:
            raise UsageError(
                f"a job runs with the options of @activity: start {activity.name} itself, or an "
                "orchestration that calls it with options"
            )
        return activity.job
    if isinstance(orchestration, str):
        return check_id(orchestration, "orchestration name")
    raise UsageError(
        f"start takes an orchestration or its name, not {orchestration!r}; decorate the function "
        "with @orchestration, or write start('its name', ...)"
    )


def refuse_options(unknown: Mapping[str, Any], start: Callable[..., Any]) -> None:
    """Raise UsageError for keywords that ``start`` does not have: they may be for the function."""
    name = next(iter(unknown))
    parameters = inspect.signature(start).parameters.values()
    meant = did_you_mean(name, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY])
    raise UsageError(
        f"start() has no option {name!r}{meant}; arguments of the orchestration are given by "
        f"position, start(orchestration, {shown(unknown[name])}), or by name in kwargs: "
        f"start(orchestration, kwargs={{{name!r}: {shown(unknown[name])}}})"
    )


def check_kwargs(kwargs: Any, target: Orchestration[..., Any] | str) -> None:
    if not isinstance(kwargs, Mapping):
        raise UsageError(
            f"kwargs takes a dict of the orchestration's arguments by name, not {shown(kwargs)}"
        )
    if isinstance(target, str):
        raise UsageError(
            f"{target!r} is started by its name, which does not tell the order of its parameters; "
            "give its arguments by position, without kwargs, or start the orchestration itself"
        )


def pairs_of(inputs: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the ids and the tuples of arguments of ``start_many``."""
    if isinstance(inputs, Mapping):
        raise UsageError(f"{_PAIRS}; of a dict, hand in its .items()")
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        raise UsageError(f"{_PAIRS}, in a list, not {shown(inputs)}")
    for pair in cast("Any", inputs):
        if not isinstance(pair, (tuple, list)) or len(cast("Any", pair)) != 2:
            raise UsageError(f"{_PAIRS}; {shown(cast('Any', pair))} is no such pair")
        each, args = cast("tuple[Any, Any]", pair)
        if not isinstance(args, (tuple, list)):
            raise UsageError(f"{_PAIRS}; {args!r} is no tuple")
        yield each, tuple(cast("Iterable[Any]", args))


# --- an id that is in use


async def other_arguments(
    instance_id: str,
    given: msgspec.Raw,
    target: Orchestration[..., Any] | str,
    provider: Provider,
    codec: Codec,
) -> str | None:
    """Return a text if the instance was started with other arguments; None if they may be equal."""
    records = await provider.read_with_execution(instance_id, 1, limit=1)
    first = wire.decode_event(records[0].data) if records else None
    if not isinstance(first, events.OrchestrationStarted):
        return None  # its first turn has not run, or its first execution was pruned
    try:
        if _are_same_arguments(first.input, given, target, codec):
            return None
    except PayloadError:
        return None  # written with another codec or for another signature
    return (
        f"{instance_id!r} was started with {_shown_arguments(first.input, codec)}, and not again "
        f"with {_shown_arguments(given, codec)}"
    )


def _are_same_arguments(
    then: msgspec.Raw, now: msgspec.Raw, target: Orchestration[..., Any] | str, codec: Codec
) -> bool:
    if is_same_payload(then, now, codec):
        return True
    if isinstance(target, str):
        return False
    # A default that one call wrote and the other left out is no difference.
    signature = target.signature
    return signature.decode_arguments(then, codec) == signature.decode_arguments(now, codec)


def _shown_arguments(payload: msgspec.Raw, codec: Codec) -> str:
    values = codec.decode(payload, list[Any], where="arguments")
    return f"({', '.join(map(shown, values))})"


async def warn_if_unserved(name: str, provider: Provider) -> None:
    """Log a warning if workers are running and none of them has this orchestration."""
    if not provider.capabilities.admin:
        return
    try:
        workers = await provider.admin.list_workers()
    except PerdureError as error:  # the start is stored already
        log.debug("cannot list the workers: %s", error)
        return
    served = {each for worker in workers for each, _ in worker.startable}
    if workers and name not in served:
        meant = did_you_mean(name, sorted(served))
        log.warning("no running worker has the orchestration %r; it waits for one%s", name, meant)


# --- into the store

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
            if start.if_exists == "restart" and await self._delete_ended(start.item):
                continue
            await self._check_existing(start.item, start.if_exists)
            if start.if_changed != "ignore":
                await self._check_arguments(start)
            if await self._deliver_message(start):
                return None
        raise StoreBusy(
            "start", f"{start.item.instance_id!r} was ended and started by others again and again"
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

    async def _delete_ended(self, item: work.StartOrchestration) -> bool:
        """Delete the instance with that id if it has ended. Return False if it goes on.

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

    async def _deliver_message(self, start: Start) -> bool:
        """Send the message of the start to the instance that exists.

        Return False if the instance is gone: it must be started again.
        """
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

    async def _check_arguments(self, start: Start) -> None:
        """Warn, or raise AlreadyExists, if the instance was started with other arguments."""
        item = start.item
        said = await other_arguments(
            item.instance_id, item.input, start.target, self._provider, self._codec
        )
        if said is not None and start.if_changed == "fail":
            raise AlreadyExists(f"{said}; use another id, or if_exists='replace'")
        if said is not None:
            log.warning(
                "%s; use another id, or if_exists='replace', or say if_changed='ignore'", said
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
