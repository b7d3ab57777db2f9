"""Differences to plain asyncio: each is refused with a clear error, or made equal."""

import asyncio
import json
from collections import deque

import pytest
from engine_driver import Driver

from perdure import activity, orchestration
from perdure.model import events


@activity
def work(label: str) -> str:
    return label


def test_a_future_or_task_that_is_made_directly_is_refused():
    @orchestration
    async def code(kind: str) -> None:
        sleep = asyncio.sleep(1)
        try:
            asyncio.Future() if kind == "Future" else asyncio.Task(sleep)
        finally:
            sleep.close()

    for kind in ("Future", "Task"):
        run = Driver(code, kind)
        run.start()
        assert "a Future or Task is made directly at test_asyncio_differences.py:" in run.result
        assert "create_future() or asyncio.create_task(...)" in run.result


@pytest.mark.parametrize("kind", [dict, deque, list])
def test_as_completed_takes_every_collection_with_an_order(kind):
    async def one(label: str) -> str:
        return await work(label)

    @orchestration
    async def code() -> list[str]:
        given = [one(label) for label in "abc"]
        calls = dict(enumerate(given)).values() if kind is dict else kind(given)
        return [await each for each in asyncio.as_completed(calls)]

    run = Driver(code)
    run.start()
    assert [json.loads(bytes(event.input)) for event in run.history[1:]] == [
        [label] for label in "abc"
    ]
    for label in "bca":
        run.turn(run.completed(2 + "abc".index(label), label))
    assert run.result == ["b", "c", "a"]


def test_as_completed_of_a_set_of_coroutines_is_refused():
    given = []

    async def one(label: str) -> str:
        return await work(label)

    @orchestration
    async def code() -> None:
        given.extend(map(one, "ab"))
        for each in asyncio.as_completed(set(given)):
            await each

    run = Driver(code, is_checked=False)
    run.start()
    for each in given:
        each.close()
    assert "give it a list of coroutines, steps or tasks, not a set or a generator" in run.result


def test_timers_of_one_moment_fire_together():
    @orchestration
    async def code() -> int:
        sleeps = [asyncio.create_task(asyncio.sleep(5)) for _ in range(3)]
        done, _ = await asyncio.wait(sleeps, return_when=asyncio.FIRST_COMPLETED)
        return len(done)

    run = Driver(code)
    run.start()
    due = run.open_ids(events.TimerCreated)
    run.turn(*(run.fired(timer) for timer in due))
    assert run.result == 3


def test_timers_of_different_moments_fire_one_by_one():
    @orchestration
    async def code() -> int:
        sleeps = [asyncio.create_task(asyncio.sleep(n)) for n in (1, 2, 3)]
        done, _ = await asyncio.wait(sleeps, return_when=asyncio.FIRST_COMPLETED)
        return len(done)

    run = Driver(code)
    run.start()
    run.turn(*(run.fired(timer) for timer in run.open_ids(events.TimerCreated)))
    assert run.result == 1


def test_an_error_that_the_caller_handles_keeps_its_frames_when_the_code_is_closed():
    @orchestration
    async def code() -> None:
        await work("a")

    run = Driver(code)
    run.start()

    def fail() -> None:
        try:
            raise ValueError("of the caller")
        finally:
            run.close()

    with pytest.raises(ValueError, match="of the caller") as caught:
        fail()
    assert [entry.name for entry in caught.traceback][-1] == "fail"
