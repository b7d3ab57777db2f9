"""A load that touches everything durable, whose results are known beforehand."""

import asyncio

from perdure import (
    ActivityFailed,
    Retry,
    activity,
    activity_info,
    continue_as_new,
    next_message,
    orchestration,
    set_custom_status,
    state,
    wait_for_event,
)


@activity
async def add(left: int, right: int) -> int:
    return left + right


@activity
def slow_add(left: int, right: int) -> int:
    return left + right


@activity(retry=Retry(max_attempts=5, first_delay=0.001))
async def flaky(value: int) -> int:
    if activity_info().attempt < 3:
        raise ConnectionError("again")
    return value


@activity
async def broken() -> None:
    raise ValueError("always")


@orchestration
async def chain(seed: int) -> int:
    total = seed
    for step in range(5):
        total = await add(total, step)
    return total


@orchestration
async def long_chain(steps: int) -> int:
    total = 0
    for step in range(steps):
        total = await add(total, step)
    return total


@orchestration
async def fan(seed: int) -> int:
    values = await asyncio.gather(*[slow_add(seed, number) for number in range(6)])
    return sum(values)


@orchestration
async def timed(seed: int) -> str:
    try:
        async with asyncio.timeout(0.02):
            await wait_for_event("never", str)
    except TimeoutError:
        await asyncio.sleep(0.01)
        return f"timed out {await add(seed, 1)}"
    return "impossible"


@orchestration
async def family(seed: int) -> int:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(chain(seed))
        second = group.create_task(fan(seed))
    return first.result() + second.result()


@orchestration
async def saga(seed: int) -> list[str]:
    done = [str(await add(seed, 1))]
    try:
        await broken()
    except ActivityFailed as error:
        done.append(f"undone after {error.type_name}")
        await flaky(seed)
    return done


@orchestration
async def eternal(left: int, total: int) -> int:
    total = await add(total, left)
    state["total"] = total
    set_custom_status(left)
    if left:
        continue_as_new(left - 1, total)
    return state.get("total", int, 0)


@orchestration
async def mailbox(seed: int) -> list[int]:
    return [await add(seed, await next_message("numbers", int)) for _ in range(3)]


HANDLERS = [
    add, slow_add, flaky, broken, chain, long_chain, fan, timed, family, saga, eternal, mailbox,
]  # fmt: skip


def lone(steps):
    """Like ``load``, for one instance that has the store for itself."""
    yield long_chain, (steps,), "long", steps * (steps - 1) // 2


def load(instances):
    """(orchestration, arguments, id, expected result) for each instance."""
    kinds = [
        (chain, lambda n: (n,), lambda n: n + 10),
        (fan, lambda n: (n,), lambda n: 6 * n + 15),
        (timed, lambda n: (n,), lambda n: f"timed out {n + 1}"),
        (family, lambda n: (n,), lambda n: n + 10 + 6 * n + 15),
        (saga, lambda n: (n,), lambda n: [str(n + 1), "undone after ValueError"]),
        (eternal, lambda n: (4, n), lambda n: n + 10),
        (mailbox, lambda n: (n,), lambda n: [n, n + 1, n + 2]),
    ]
    for number in range(instances):
        flow, arguments, expected = kinds[number % len(kinds)]
        yield flow, arguments(number), f"{flow.name}-{number}", expected(number)
