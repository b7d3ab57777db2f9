"""The orchestrations that the tests of the command line run, look at and act on."""

import asyncio

from perdure import (
    Retry,
    activity,
    continue_as_new,
    orchestration,
    set_custom_status,
    state,
    wait_for_event,
)


@activity
def greet(name: str) -> str:
    return f"hello {name}"


@activity
def fail(text: str) -> str:
    raise ValueError(text)


@activity(retry=Retry(max_attempts=5, first_delay=3600, max_delay=3600, jitter=0))
def flaky() -> None:
    raise ConnectionError("nobody answers")


@orchestration
async def hello(name: str) -> str:
    return await greet(name)


@orchestration
async def failing(text: str) -> str:
    await greet(text)
    return await fail(text)


@orchestration
async def failing_at_once(text: str) -> str:
    raise ValueError(text)


@orchestration
async def approval(number: int) -> str:
    await greet(str(number))
    set_custom_status("waiting for approval")
    state["number"] = number
    async with asyncio.timeout(86_400):
        answer = await wait_for_event("answer", str)
    return f"{number}: {answer}"


@orchestration
async def two_greetings() -> str:
    return await greet("ann") + await wait_for_event("more", str)


@orchestration
async def sleeper(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


@orchestration
async def family(names: list[str]) -> list[str]:
    return list(await asyncio.gather(*(hello(name) for name in names)))


@orchestration
async def clan(names: list[str]) -> list[str]:
    return await family(names)


@orchestration
async def parent_of_waiting() -> str:
    return await approval(7)


@orchestration
async def retrying() -> None:
    await flaky()


@orchestration
async def branches() -> list[str]:
    async def branch(name: str) -> str:
        marker = f"local of {name}"
        answer = await wait_for_event(name, str)
        return marker + answer

    return list(await asyncio.gather(branch("left"), branch("right")))


@orchestration
async def fan_out(width: int) -> int:
    return len(await asyncio.gather(*(greet(str(number)) for number in range(width))))


@orchestration
async def rounds(left: int) -> str:
    await wait_for_event("go", str)
    if left:
        continue_as_new(left - 1)
    return "done"


def broken_factory() -> list[object]:
    raise RuntimeError("not today")


def no_handlers() -> int:
    return 3
