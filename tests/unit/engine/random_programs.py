"""Random orchestrations and random worlds for them: what is live must be what is replayed.

A program is a tree of lists, so that it travels as the argument of one orchestration. Its result is
a log of everything that happened in the order in which the code saw it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from engine_driver import OPENING, Driver

from perdure import (
    activity,
    continue_as_new,
    current,
    next_message,
    now,
    orchestration,
    patched,
    random,
    set_custom_status,
    side_effect,
    start_detached,
    state,
    uuid4,
    wait_for_event,
)
from perdure.model import events
from perdure.model.failures import Category

if TYPE_CHECKING:
    from random import Random

Tree = list[Any]

_LEAF_NAMES = """
    step step step step step step sleep sleep sleep event event message message child child detached
    status state unset random now effect patch yield raise orphan where callback again
"""
_NODE_NAMES = """
    seq seq gather gather outcomes group timeout wait_for race steps completed shield try finally
    stop limited queue spawn lock generator either shared
"""
LEAVES, NODES = _LEAF_NAMES.split(), _NODE_NAMES.split()


@activity
def step(label: str) -> str:
    return label


@orchestration
async def child(label: str) -> str:
    return label


@orchestration
async def program(tree: Any) -> list[str]:
    log: list[str] = []
    await execute(tree, log)
    return log


def random_tree(rng: Random, depth: int = 3) -> Tree:
    if depth == 0 or rng.random() < 0.12:
        return [rng.choice(LEAVES), rng.randint(1, 9)]
    kind = rng.choice(NODES)
    width = rng.randint(2, 3) if kind in _WIDE else 1 if kind in _NARROW else 2
    return [kind, rng.randint(1, 9), *(random_tree(rng, depth - 1) for _ in range(width))]


_WIDE = {"seq", "gather", "outcomes", "group", "race", "completed", "limited", "queue", "lock"}
_NARROW = {"timeout", "wait_for", "shield", "stop", "spawn", "generator"}


async def execute(tree: Tree, log: list[str]) -> str:
    kind, number, *parts = tree
    result = await PARTS[kind](number, parts, log)
    log.append(f"{kind}{number}={result}")
    return f"{kind}{number}"


# --- leaves


async def _step(number: int, _: Any, __: Any) -> str:
    return await step(f"s{number}")


async def _sleep(number: int, _: Any, __: Any) -> None:
    await asyncio.sleep(number)


async def _event(number: int, _: Any, __: Any) -> str:
    return str(await wait_for_event(f"e{number % 2}"))


async def _message(number: int, _: Any, __: Any) -> str:
    return str(await next_message(f"q{number % 2}", int))


async def _child(number: int, _: Any, __: Any) -> str:
    policy = "abandon" if number == 1 else "cancel"
    return await child.options(on_parent_close=policy)(f"c{number}")


async def _detached(number: int, _: Any, __: Any) -> str:
    return start_detached(child, f"d{number}")


async def _status(number: int, _: Any, __: Any) -> None:
    set_custom_status({"at": number})


async def _state(number: int, _: Any, __: Any) -> int:
    state[f"k{number % 3}"] = state.get(f"k{number % 3}", int, 0) + number
    return len(state)


async def _unset(number: int, _: Any, __: Any) -> list[str]:
    if number == 9:
        state.clear()
    state.delete(f"k{number % 3}")
    return state.keys()


async def _random(_: int, __: Any, ___: Any) -> str:
    return f"{random():.3f} {uuid4()}"


async def _now(_: int, __: Any, ___: Any) -> str:
    return now().isoformat()


async def _effect(number: int, _: Any, __: Any) -> int:
    return side_effect(lambda: number * 2, int)


async def _patch(number: int, _: Any, __: Any) -> bool:
    return patched(f"p{number}")


async def _yield(number: int, _: Any, __: Any) -> None:
    for _i in range(number):
        await asyncio.sleep(0)


async def _raise(number: int, _: Any, __: Any) -> None:
    if number < 4:
        raise ValueError(number)


async def _orphan(number: int, _: Any, __: Any) -> None:
    step(f"orphan{number}")
    asyncio.get_running_loop().call_later(number, int)


async def _where(_: int, __: Any, ___: Any) -> str:
    return f"{current().instance_id} {asyncio.current_task().get_name()}"


async def _callback(number: int, _: Any, log: list[str]) -> str:
    loop = asyncio.get_running_loop()
    called = loop.create_future()

    def call() -> None:
        step(f"called{number}").add_done_callback(lambda _: log.append("called back"))
        called.set_result("yes")

    loop.call_soon(call) if number % 2 else loop.call_later(number, call)
    return str(await called)


async def _again(number: int, _: Any, __: Any) -> None:
    if number == 1:
        continue_as_new(["step", number])


# --- nodes


async def _seq(_: int, parts: list[Tree], log: list[str]) -> list[str]:
    return [await execute(part, log) for part in parts]


async def _gather(_: int, parts: list[Tree], log: list[str]) -> list[str]:
    return list(await asyncio.gather(*(execute(part, log) for part in parts)))


async def _outcomes(_: int, parts: list[Tree], log: list[str]) -> list[str]:
    branches = (execute(part, log) for part in parts)
    return [_shown(each) for each in await asyncio.gather(*branches, return_exceptions=True)]


async def _group(_: int, parts: list[Tree], log: list[str]) -> list[str]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(execute(part, log)) for part in parts]
        tasks.append(group.create_task(step("in group")))
    return [task.result() for task in tasks]


async def _timeout(number: int, parts: list[Tree], log: list[str]) -> str:
    try:
        async with asyncio.timeout(number):
            return await execute(parts[0], log)
    except TimeoutError:
        return "late"


async def _wait_for(number: int, parts: list[Tree], log: list[str]) -> str:
    try:
        return await asyncio.wait_for(execute(parts[0], log), number)
    except TimeoutError:
        return "late"


async def _race(_: int, parts: list[Tree], log: list[str]) -> list[str]:
    tasks = {asyncio.ensure_future(execute(part, log)) for part in parts}
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return [_outcome(task) for task in done]


async def _steps(number: int, parts: list[Tree], log: list[str]) -> list[str]:
    steps = {step(f"w{number}"), step("w"), wait_for_event("e0"), next_message("q1", int)}
    done, pending = await asyncio.wait(steps, timeout=number, return_when=asyncio.FIRST_COMPLETED)
    await execute(parts[0], log)
    for each in pending:
        each.cancel()
    return [_outcome(each) for each in done]


async def _completed(_: int, parts: list[Tree], log: list[str]) -> list[str]:
    shown: list[str] = []
    for each in asyncio.as_completed([execute(part, log) for part in parts]):
        try:
            shown.append(await each)
        except Exception as error:
            shown.append(_shown(error))
    return shown


async def _shield(_: int, parts: list[Tree], log: list[str]) -> str:
    return await asyncio.shield(execute(parts[0], log))


async def _try(_: int, parts: list[Tree], log: list[str]) -> str:
    try:
        return await execute(parts[0], log)
    except Exception as error:
        log.append(_shown(error))
        return await execute(parts[1], log)


async def _finally(_: int, parts: list[Tree], log: list[str]) -> str:
    try:
        return await execute(parts[0], log)
    finally:
        await execute(parts[1], log)


async def _stop(number: int, parts: list[Tree], log: list[str]) -> str:
    task = asyncio.create_task(execute(parts[0], log))
    for _i in range(number % 3):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        return await task
    return "stopped"


async def _limited(_: int, parts: list[Tree], log: list[str]) -> list[str]:
    semaphore = asyncio.Semaphore(1)

    async def one(part: Tree) -> str:
        async with semaphore:
            return await execute(part, log)

    return list(await asyncio.gather(*map(one, parts)))


async def _queue(number: int, parts: list[Tree], log: list[str]) -> list[str]:
    queue: asyncio.Queue[str] = asyncio.Queue(maxsize=1 + number % 2)

    async def produce(part: Tree) -> None:
        await queue.put(await execute(part, log))

    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(produce(part))
        return [await queue.get() for _ in parts]


async def _lock(_: int, parts: list[Tree], log: list[str]) -> list[str]:
    condition = asyncio.Condition()
    entered: list[int] = []

    async def one(index: int, part: Tree) -> str:
        async with condition:
            await condition.wait_for(lambda: len(entered) == index)
            entered.append(index)
            condition.notify_all()
        return await execute(part, log)

    branches = [one(index, part) for index, part in enumerate(parts)]
    return list(await asyncio.gather(*reversed(branches)))


async def _spawn(_: int, parts: list[Tree], log: list[str]) -> str:
    task = asyncio.create_task(execute(parts[0], log))
    await asyncio.sleep(0)
    return "early" if task.done() else "running"


async def _generator(_: int, parts: list[Tree], log: list[str]) -> str:
    async def twice() -> Any:
        for _i in range(2):
            yield await execute(parts[0], log)

    async for value in twice():
        return str(value)
    return "none"


async def _either(_: int, parts: list[Tree], log: list[str]) -> str:
    return await execute(parts[len(log) % 2], log)


async def _shared(number: int, parts: list[Tree], log: list[str]) -> list[str]:
    one = step(f"shared{number}")

    async def use(part: Tree) -> str:
        return await one + await execute(part, log)

    return list(await asyncio.gather(*map(use, parts)))


PARTS = {
    name[1:]: value
    for name, value in list(globals().items())
    if name.startswith("_") and asyncio.iscoroutinefunction(value)
}


def _outcome(task: Any) -> str:
    if task.cancelled():
        return "cancelled"
    return _shown(task.exception() or task.result())


def _shown(value: object) -> str:
    if isinstance(value, BaseExceptionGroup):
        return f"{type(value).__name__}({', '.join(map(_shown, value.exceptions))})"
    return f"{type(value).__name__}" if isinstance(value, BaseException) else str(value)


# --- the world

TURNS_MAX = 40


def drive(tree: Tree, rng: Random) -> Driver:
    """Run the program to its end; the driver compares live and replayed on every turn."""
    with contextlib.closing(Driver(program, tree)) as run:
        _drive(run, rng)
    check(run)
    return run


def _drive(run: Driver, rng: Random) -> None:
    unsolicited = [_arrival(run, rng) for _ in range(rng.choice([0, 0, 1, 3]))]
    if rng.random() < 0.03:
        unsolicited.append(run.cancel())
    run.start(*unsolicited)
    while not run.execution.is_finished and len(run.outcomes) < TURNS_MAX:
        messages = _choose(run, rng)
        if messages:
            run.turn(*messages, after_ms=rng.choice([1, 700]))
        if rng.random() < 0.1:
            run.restart()
    if not run.execution.is_finished:
        run.turn(run.cancel("took too long"))
    while not run.execution.is_finished:
        timer = next(e for e in run.history if getattr(e, "op", "") == "cancel/1")
        run.turn(run.fired(timer.event_id))


def _choose(run: Driver, rng: Random) -> list[Any]:
    """A batch of messages, in any order: some of what is open, and some out of the blue."""
    candidates = [_resolution(run, event_id, rng) for event_id in run.open_ids()]
    candidates = [message for message in candidates if message is not None]
    rng.shuffle(candidates)
    batch = candidates[: rng.randint(1, 3)]
    if not batch or rng.random() < 0.1:
        batch.append(_arrival(run, rng))
    if rng.random() < 0.02:
        batch.append(run.cancel())
    if batch and rng.random() < 0.05:
        batch.append(batch[0])  # the same message twice
    if rng.random() < 0.1:
        scheduled = [e for e in run.history if isinstance(e, OPENING[:3])]
        if scheduled:  # perhaps completed or given up long ago
            late = _resolution(run, rng.choice(scheduled).event_id, rng)
            batch += [] if late is None else [late]
    return batch


def _resolution(run: Driver, event_id: int, rng: Random) -> Any:
    event: Any = run.history[event_id - 1]
    is_good = rng.random() < 0.85
    match event:
        case events.ActivityScheduled():
            return run.completed(event_id, f"r{event_id}") if is_good else run.failed(event_id)
        case events.TimerCreated():
            return None if event.op == "cancel/1" else run.fired(event_id)
        case events.SubOrchestrationScheduled():
            if is_good:
                return run.child_completed(event_id, f"r{event_id}")
            return run.child_failed(event_id, rng.choice(list(Category)))
        case events.ExternalSubscribed():
            return run.raised(event.name, event_id)
        case _:
            return run.message(event.name, event_id if is_good else "not a number")


def _arrival(run: Driver, rng: Random) -> Any:
    name = rng.choice(["0", "1"])
    return rng.choice([run.raised(f"e{name}", 1), run.message(f"q{name}", 2)])


def check(run: Driver) -> None:
    """Check the rules that hold for every history that has ended."""
    history = run.history
    assert [event.event_id for event in history] == list(range(1, len(history) + 1))
    ends = [event for event in history if isinstance(event, events.Terminal)]
    assert ends == [history[-1]]
    completions = [
        event.source_event_id
        for event in history
        if isinstance(event, (events.ActivityCompleted, events.ActivityFailed, events.TimerFired))
    ]
    assert len(completions) == len(set(completions))
    _check_sent(run)


def _check_sent(run: Driver) -> None:
    sent: set[int] = set()
    for outcome in run.outcomes:
        new = {entry.event.event_id for entry in outcome.activities}
        new |= {event.event_id for event in [*outcome.timers, *outcome.children]}
        assert not new & sent
        recalled = set(outcome.cancelled_activities) | set(outcome.cancelled_timers)
        assert recalled <= sent
        sent |= new
    opened = {
        event.event_id
        for event in run.history
        if isinstance(event, OPENING[:3]) and not _is_abandoned(event)
    }
    closed = {event.source_event_id for event in run.history if isinstance(event, events.Resolving)}
    assert opened <= closed


def _is_abandoned(event: Any) -> bool:
    return getattr(event, "on_parent_close", "") == "abandon"
