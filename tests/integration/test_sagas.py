"""Sagas: compensations in reverse order, after errors, cancellations and crashes."""

import asyncio

import pytest

from perdure import (
    ActivityFailed,
    CompensationFailed,
    OrchestrationCancelled,
    OrchestrationFailed,
    activity,
    continue_as_new,
    orchestration,
    saga,
    wait_for_event,
)
from perdure.client.steps import steps_of
from perdure.errors import NotInOrchestration, PayloadError, UsageError
from perdure.testing import assert_crash_safe, assert_replays

done: list[str] = []


@activity
async def book(what: str) -> str:
    if what == "hotel":
        raise LookupError("fully booked")
    done.append(f"book {what}")
    return what


@activity
async def release(what: str, times: int = 1) -> None:
    done.append(f"release {what}")


@activity(name="give-back")
async def fail_to_release(what: str) -> None:
    raise RuntimeError(f"no answer for {what}")


@activity
async def slow_release(what: str) -> None:
    done.append(f"release {what}")


@orchestration
async def refund(what: str) -> None:
    await release(f"refund {what}")


@orchestration
async def trip(*, waits: bool = False) -> str:
    async with saga() as undo:
        for what in ("flight", "car"):
            await book(what)
            undo(release, what)
        undo(refund, "card")
        if waits:
            await wait_for_event("never")
        await book("hotel")
    return "have a nice trip"


@orchestration
async def good() -> str:
    async with saga() as undo:
        undo(release, await book("flight"))
    return "fine"


@orchestration
async def stuck() -> str:
    try:
        async with saga() as undo:
            undo(release, "first")
            undo(fail_to_release, "stuck")
            undo(release, "last")
            await book("hotel")
    except CompensationFailed as error:
        return f"{error} <- {type(error.__cause__).__name__}"
    return ""


@orchestration
async def long() -> None:
    """Its compensation takes longer than a clean-up may."""

    async def later() -> None:
        await asyncio.sleep(3600)
        await release("late")

    async with saga() as undo:
        undo(release, "early")
        undo(later)
        await wait_for_event("never")


@orchestration
async def continues(number: int) -> int:
    async with saga() as undo:
        undo(release, "never")
        if number < 3:
            continue_as_new(number + 1)
    return number


HANDLERS = [
    trip,
    good,
    stuck,
    long,
    continues,
    refund,
    book,
    release,
    fail_to_release,
    slow_release,
]


@pytest.fixture(autouse=True)
def _nothing_done():
    done.clear()


async def test_an_exception_undoes_in_reverse_order_and_goes_on(make_environment):
    async with make_environment(HANDLERS) as env:
        handle = await env.start(trip)
        with pytest.raises(OrchestrationFailed, match="fully booked") as caught:
            await handle.result()
        assert caught.value.is_(ActivityFailed)
        assert done == [
            "book flight",
            "book car",
            "release refund card",
            "release car",
            "release flight",
        ]
        history = await handle.history()
        assert_replays(history, trip)
        calls = [step.call for step in steps_of(history)]
        assert calls[-3:] == [
            'compensation: refund("card")',
            'compensation: release("car")',
            'compensation: release("flight")',
        ]
        assert calls[:3] == ['book("flight")', 'book("car")', 'book("hotel")']


async def test_a_good_end_undoes_nothing(make_environment):
    async with make_environment(HANDLERS) as env:
        assert await env.run(good) == "fine"
        assert await env.run(continues, 1) == 3
    assert done == ["book flight"]


async def test_a_cancellation_undoes_too(make_environment):
    async with make_environment(HANDLERS) as env:
        handle = await env.start(trip, kwargs={"waits": True})
        await env.settle()
        await handle.cancel("changed plans")
        with pytest.raises(OrchestrationCancelled, match="changed plans"):
            await handle.result()
        assert done[2:] == ["release refund card", "release car", "release flight"]


async def test_compensations_are_not_cut_off_after_the_time_of_a_clean_up(make_environment):
    async with make_environment(HANDLERS) as env:
        handle = await env.start(long)
        await env.settle()
        await handle.cancel("stop")
        with pytest.raises(OrchestrationCancelled, match="stop") as caught:
            await handle.result()
        assert "cut off" not in str(caught.value)
        assert done == ["release late", "release early"]
        assert_replays(await handle.history(), long)


async def test_a_second_cancellation_waits_for_the_compensations(make_environment):
    @orchestration
    async def twice() -> list[str]:
        async def work() -> None:
            async with saga() as undo:
                undo(asyncio.sleep, 60)
                undo(release, "one")
                await wait_for_event("never")

        task = asyncio.create_task(work())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.sleep(1)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return ["cancelled"]
        return []

    async with make_environment([*HANDLERS, twice]) as env:
        assert await env.run(twice) == ["cancelled"]
    assert done == ["release one"]


async def test_a_failed_compensation_is_told_and_the_others_run(make_environment):
    async with make_environment(HANDLERS) as env:
        text = await env.run(stuck)
        assert text.startswith("1 of 3 compensations failed, after ActivityFailed: ")
        assert "give-back: ActivityFailed: " in text
        assert "no answer" in text
        assert text.endswith("<- ActivityFailed")
    assert done == ["release last", "release first"]


async def test_nested_sagas_undo_the_inner_one_first(make_environment):
    @orchestration
    async def nested() -> None:
        async with saga() as outer:
            outer(release, "outer")
            async with saga() as inner:
                inner(release, "inner")
            inner_done = saga()
            async with inner_done as undo:
                undo(release, "second")
                await book("hotel")

    async with make_environment([*HANDLERS, nested]) as env:
        with pytest.raises(OrchestrationFailed):
            await env.run(nested)
    assert done == ["release second", "release outer"]


async def test_wrong_compensations_are_refused_where_they_are_registered(make_environment):
    @orchestration
    async def wrong(case: str) -> str:
        async with saga() as undo:
            try:
                match case:
                    case "type":
                        undo(release, 5)  # type: ignore[arg-type]
                    case "missing":
                        undo(release)  # type: ignore[call-arg]
                    case "function":
                        undo(print, 1)  # type: ignore[arg-type]
                    case "called":
                        undo(release("x"))  # type: ignore[arg-type]
            except (PayloadError, TypeError, UsageError) as error:
                return f"{type(error).__name__}: {error}"
        try:
            undo(release, "late")
        except UsageError as error:
            return str(error)
        return ""

    async with make_environment([*HANDLERS, wrong]) as env:
        assert "Expected `str`, got `int`" in await env.run(wrong, "type")
        assert (await env.run(wrong, "missing")).startswith("TypeError: activity 'release'")
        assert "undo(release, item); not" in await env.run(wrong, "function")
        assert "undo(release, item); not" in await env.run(wrong, "called")
        assert "inside of its async with" in await env.run(wrong, "late")
    with pytest.raises(NotInOrchestration):
        saga()


async def test_crashes_at_every_commit_change_nothing():
    assert await assert_crash_safe(stuck, handlers=HANDLERS) > 6
    assert await assert_crash_safe(trip, handlers=HANDLERS) > 6
