"""The tasks that activities share: what one of them raises concerns that one alone."""

import asyncio
import weakref
from contextvars import ContextVar

import pytest

from patience import HANG_SECONDS
from perdure.model import work
from perdure.runtime.attempts import ActivityTasks, RunningActivity


def activity(number):
    item = work.ActivityExecute(
        instance_id="one", execution_id=1, activity_id=number, name=f"activity {number}"
    )
    return RunningActivity(item, lock_token=f"token {number}", key=("one", 1, number))


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()])
@pytest.mark.parametrize("waits", [False, True])
def test_an_error_of_a_run_is_reported_once_and_the_others_run(waits, error):
    ended, reported, unhandled = [], [], []

    async def run(running):
        if waits:
            await asyncio.sleep(0)
        if running.item.activity_id == 2:
            raise error
        ended.append(running.item.activity_id)

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, told: unhandled.append(told))
        tasks = set()
        activity_tasks = ActivityTasks(
            run, lambda running, raised: reported.append((running, raised)), tasks
        )
        launched = [activity(number) for number in range(1, 6)]
        for running in launched:
            activity_tasks.launch(running)
        while tasks:
            await asyncio.wait(tasks)
        activity_tasks.close()
        assert reported == [(launched[1], error)]
        assert not any(running.task or running.scope for running in launched)

    asyncio.run(main())
    assert sorted(ended) == [1, 3, 4, 5]
    assert not unhandled


class Connection:
    """Something that an activity keeps in its context."""


connection: ContextVar[Connection | None] = ContextVar("connection", default=None)


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_of_an_activity_outlives_it_in_the_task_that_ran_it(waits):
    seen, kept = [], []

    async def run(running):
        seen.append(connection.get())
        mine = Connection()
        connection.set(mine)
        kept.append(weakref.ref(mine))
        if waits:
            await asyncio.sleep(0)
        assert connection.get() is mine

    async def main():
        tasks = set()
        activity_tasks = ActivityTasks(run, lambda _running, _raised: None, tasks)
        for number in range(1, 4):
            activity_tasks.launch(activity(number))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not tasks
        assert [each() for each in kept] == [None, None, None]
        activity_tasks.close()

    asyncio.run(main())
    assert seen == [None, None, None]


def test_tasks_that_retire_end_instead_of_waiting_for_more():
    ended = []

    async def run(running):
        ended.append(running.item.activity_id)

    async def main():
        tasks = set()
        activity_tasks = ActivityTasks(run, lambda _running, _raised: None, tasks)
        activity_tasks.launch(activity(1))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not tasks  # it waits for more
        activity_tasks.launch(activity(2))
        activity_tasks.retire()
        async with asyncio.timeout(HANG_SECONDS):
            await asyncio.wait(tasks)
        activity_tasks.launch(activity(3))
        async with asyncio.timeout(HANG_SECONDS):
            await asyncio.wait(tasks)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert ended == [1, 2, 3]


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_task_that_is_cancelled_while_it_is_idle_delays_no_activity(is_woken):
    ended, cancel = [], []

    async def run(running):
        ended.append(running.item.activity_id)
        cancel.append(asyncio.current_task().cancel)

    async def main():
        activity_tasks = ActivityTasks(run, lambda _running, _raised: None, set())
        activity_tasks.launch(activity(1))
        for _ in range(10):
            await asyncio.sleep(0)
        if is_woken:
            activity_tasks.launch(activity(2))
            cancel[0]()  # as by a time limit that was not called off
        else:
            cancel[0]()
            activity_tasks.launch(activity(2))
        for _ in range(10):
            await asyncio.sleep(0)
        activity_tasks.launch(activity(3))
        for _ in range(10):
            await asyncio.sleep(0)
        activity_tasks.close()

    asyncio.run(main())
    assert ended == [1, 2, 3]


def test_a_cancellation_that_was_taken_back_does_not_reach_the_next_activity():
    ended, reported = [], []

    async def run(running):
        if running.item.activity_id == 1:
            asyncio.current_task().cancel()
            asyncio.current_task().uncancel()
        else:
            await asyncio.sleep(0)
        ended.append(running.item.activity_id)

    async def main():
        tasks = set()
        activity_tasks = ActivityTasks(run, lambda _running, raised: reported.append(raised), tasks)
        activity_tasks.launch(activity(1))
        activity_tasks.launch(activity(2))
        for _ in range(10):
            await asyncio.sleep(0)
        activity_tasks.close()

    asyncio.run(main())
    assert ended == [1, 2]
    assert not reported


def test_a_task_that_is_cancelled_before_it_begins_delays_no_activity():
    ended = []

    async def run(running):
        ended.append(running.item.activity_id)

    async def main():
        tasks = set()
        activity_tasks = ActivityTasks(run, lambda _running, _raised: None, tasks)
        activity_tasks.launch(activity(1))
        for task in tasks:
            task.cancel()  # as by code that cancels every task
        for _ in range(10):
            await asyncio.sleep(0)
        activity_tasks.launch(activity(2))
        for _ in range(10):
            await asyncio.sleep(0)
        activity_tasks.close()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not tasks

    asyncio.run(main())
    assert ended == [1, 2]
