"""Waiting for a future that others wait for, too."""

import asyncio

import pytest

from perdure.client.endings import Shielded

TASKS = [asyncio.Task, asyncio.tasks._PyTask]  # in C, and what takes its place where there is none


async def wait(future):
    return await Shielded(future)


def run(main, task_class):
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_task_factory(
            lambda loop, coroutine, context=None: task_class(coroutine, loop=loop, context=context)
        )
        return runner.run(main())


@pytest.mark.parametrize("task_class", TASKS)
def test_every_waiter_gets_the_result(task_class):
    async def main():
        future = asyncio.get_running_loop().create_future()
        waiters = [asyncio.create_task(wait(future)) for _ in range(3)]
        await asyncio.sleep(0)
        future.set_result("done")
        assert await asyncio.gather(*waiters) == ["done"] * 3
        assert await wait(future) == "done"

    run(main, task_class)


@pytest.mark.parametrize("task_class", TASKS)
def test_an_exception_reaches_the_waiter(task_class):
    async def main():
        future = asyncio.get_running_loop().create_future()
        waiter = asyncio.create_task(wait(future))
        await asyncio.sleep(0)
        future.set_exception(LookupError("gone"))
        with pytest.raises(LookupError, match="gone"):
            await waiter

    run(main, task_class)


@pytest.mark.parametrize("message", [None, "enough"])
@pytest.mark.parametrize("task_class", TASKS)
def test_a_waiter_that_is_cancelled_leaves_the_future_and_the_others_alone(task_class, message):
    async def main():
        future = asyncio.get_running_loop().create_future()
        first, second = (asyncio.create_task(wait(future)) for _ in range(2))
        await asyncio.sleep(0)
        assert first.cancel(message)
        assert first.cancel(message)
        with pytest.raises(asyncio.CancelledError) as raised:
            await first
        assert raised.value.args == (() if message is None else (message,))
        assert not future.done()
        future.set_result("done")
        assert await second == "done"

    run(main, task_class)


@pytest.mark.parametrize("task_class", TASKS)
@pytest.mark.parametrize("resolved_first", [False, True])
def test_a_waiter_that_is_cancelled_when_the_end_comes_is_cancelled(task_class, resolved_first):
    async def main():
        future = asyncio.get_running_loop().create_future()
        waiter = asyncio.create_task(wait(future))
        await asyncio.sleep(0)
        if resolved_first:
            future.set_result("done")
            waiter.cancel()
        else:
            waiter.cancel()
            future.set_result("done")
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert future.result() == "done"

    run(main, task_class)


@pytest.mark.parametrize("task_class", TASKS)
def test_a_waiter_that_was_cancelled_before_it_waits_is_cancelled(task_class):
    async def main():
        future = asyncio.get_running_loop().create_future()

        async def cancel_and_wait():
            asyncio.current_task().cancel()
            await wait(future)

        waiter = asyncio.create_task(cancel_and_wait())
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not future.done()

    run(main, task_class)


@pytest.mark.parametrize("task_class", TASKS)
def test_a_timeout_ends_the_wait_alone(task_class):
    async def main():
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await wait(future)
        assert asyncio.current_task().cancelling() == 0
        assert not future.done()

    run(main, task_class)
