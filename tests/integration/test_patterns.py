"""The patterns that people come for, on every store, live and always replayed."""

import asyncio

import pytest

from patience import HANG_SECONDS
from perdure import (
    ActivityFailed,
    OrchestrationFailed,
    Retry,
    activity,
    continue_as_new,
    next_message,
    orchestration,
    set_custom_status,
    state,
    wait_for_event,
)


@activity
async def double(value: int) -> int:
    return value * 2


@activity
def triple(value: int) -> int:
    return value * 3


@activity
async def fail(message: str) -> None:
    raise ValueError(message)


@orchestration
async def chain(value: int) -> int:
    value = await double(value)
    value = await triple(value)
    return await double(value)


async def test_steps_run_one_after_the_other(make_runtime):
    async with make_runtime([chain, double, triple]) as runtime:
        handle = await runtime.start(chain, 1, id="c-1")

        assert await handle.result(HANG_SECONDS) == 12


@orchestration
async def fan_out(width: int) -> int:
    return sum(await asyncio.gather(*[double(number) for number in range(width)]))


async def test_steps_run_side_by_side_and_are_joined(make_runtime):
    async with make_runtime([fan_out, double]) as runtime:
        handle = await runtime.start(fan_out, 50)

        assert await handle.result(HANG_SECONDS) == 50 * 49


@orchestration
async def approval() -> str:
    try:
        async with asyncio.timeout(3 * 86_400):
            approved = await wait_for_event("approval", bool)
    except TimeoutError:
        return "timed out"
    return "approved" if approved else "declined"


async def test_an_approval_comes_in_time(make_runtime):
    async with make_runtime([approval]) as runtime:
        handle = await runtime.start(approval, id="a-1")
        await handle.raise_event("approval", True)

        assert await handle.result(HANG_SECONDS) == "approved"


async def test_an_approval_that_does_not_come_times_out_after_days(make_environment):
    async with make_environment([approval]) as env:
        started_ms = env.clock.now_ms()

        assert await env.run(approval) == "timed out"
        assert env.clock.now_ms() - started_ms == 3 * 86_400_000


@orchestration
async def compensating() -> list[str]:
    undone: list[str] = []
    try:
        await double(1)
        await fail("no stock")
    except ActivityFailed as error:
        undone.append(f"{error.type_name}: {error.message}")
        undone.append(str(await triple(5)))
    return undone


async def test_a_failed_step_is_caught_and_compensated(make_runtime):
    async with make_runtime([compensating, double, triple, fail]) as runtime:
        handle = await runtime.start(compensating)

        assert await handle.result(HANG_SECONDS) == ["ValueError: no stock", "15"]


@orchestration
async def failing() -> None:
    await fail("it broke")


async def test_an_uncaught_failure_fails_the_orchestration(make_runtime):
    async with make_runtime([failing, fail]) as runtime:
        handle = await runtime.start(failing, id="f-1")

        with pytest.raises(OrchestrationFailed, match="it broke"):
            await handle.result(HANG_SECONDS)
        assert (await handle.describe()).status == "Failed"


async def test_a_flaky_step_is_retried_until_it_works(make_runtime):
    attempts: list[int] = []

    @activity(retry=Retry(max_attempts=4, first_delay=0.001))
    def flaky() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("try again")
        return "at last"

    @orchestration
    async def patient() -> str:
        return await flaky()

    async with make_runtime([patient, flaky]) as runtime:
        handle = await runtime.start(patient)

        assert await handle.result(HANG_SECONDS) == "at last"
        assert len(attempts) == 3


@orchestration
async def countdown(left: int, seen: int) -> int:
    seen += await double(1)
    if left:
        continue_as_new(left - 1, seen)
    return seen


async def test_an_eternal_loop_continues_as_new(make_runtime):
    async with make_runtime([countdown, double]) as runtime:
        handle = await runtime.start(countdown, 9, 0, id="loop")

        assert await handle.result(HANG_SECONDS) == 20
        assert (await handle.describe()).execution_id == 10


@orchestration
async def chat() -> list[str]:
    seen: list[str] = []
    while (message := await next_message("inbox", str)) != "bye":
        seen.append(message)
        set_custom_status(len(seen))
    return seen


async def test_a_mailbox_keeps_its_order(make_runtime):
    async with make_runtime([chat]) as runtime:
        handle = await runtime.start(chat, id="chat")
        for word in ("a", "b", "c", "bye"):
            await handle.send_message("inbox", word)

        assert await handle.result(HANG_SECONDS) == ["a", "b", "c"]
        assert (await handle.describe()).custom_status == 3


@orchestration
async def leaf(depth: int) -> int:
    if depth == 0:
        return await double(1)
    return 1 + await leaf(depth - 1)


async def test_children_report_to_their_parents(make_runtime):
    async with make_runtime([leaf, double]) as runtime:
        handle = await runtime.start(leaf, 5, id="root")

        assert await handle.result(HANG_SECONDS) == 7
        assert len((await runtime.admin.tree("root")).instance_ids) == 6


@orchestration
async def counter(times: int) -> int:
    for _ in range(times):
        state["count"] = state.get("count", int, 0) + await double(1)
    return state.get("count", int, 0)


async def test_state_is_kept_and_can_be_read_from_outside(make_runtime):
    async with make_runtime([counter, double]) as runtime:
        handle = await runtime.start(counter, 3)

        assert await handle.result(HANG_SECONDS) == 6
        assert await handle.state("count", int) == 6
        assert (await handle.state_items())["count"].value == "6"


@orchestration
async def short_sleep() -> str:
    await asyncio.sleep(0.02)
    return "woke"


async def test_a_timer_fires(make_runtime):
    async with make_runtime([short_sleep]) as runtime:
        handle = await runtime.start(short_sleep)

        assert await handle.result(HANG_SECONDS) == "woke"
