"""Tasks and generators that code leaves are cancelled and closed, as asyncio.run() does it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable

import pytest
from engine_driver import WAITS, Driver

from perdure import activity, continue_as_new, current, orchestration, wait_for_event
from perdure.engine.loop import DurableLoop
from perdure.engine.tasks import DurableTask
from perdure.model.events import OrchestrationFailed, TimerCreated


@activity
def work(label: str) -> str:
    return label


@activity
def undo(label: str) -> None: ...


async def booking(label: str) -> None:
    try:
        await work(label)
    except asyncio.CancelledError:
        await undo(label)
        raise


def left_at_clean_up() -> Driver:
    """A program that has returned, and left a task which waits for its undo."""

    @orchestration
    async def code() -> str:
        left = asyncio.create_task(booking("a"))
        await asyncio.sleep(1)
        return f"done {left.done()}"

    run = Driver(code)
    run.start()
    run.turn(run.fired())
    return run


def test_a_branch_that_a_failed_gather_leaves_is_cancelled_and_cleans_up():
    @orchestration
    async def code() -> None:
        await asyncio.gather(booking("hotel"), work("flight"))

    run = Driver(code)
    run.start()
    run.turn(run.failed(2))  # the flight, which is asked for first
    assert run.result == WAITS
    assert run.kinds()[-3:] == ["ActivityCancelRequested", "ActivityScheduled", "TimerCreated"]
    run.restart()
    outcome = run.turn(run.completed("undo"))

    assert isinstance(outcome.end, OrchestrationFailed)
    assert outcome.cancelled_timers


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_tasks_that_are_left_running_are_cancelled_and_clean_up(ends):
    @orchestration
    async def code() -> str:
        tasks = [asyncio.create_task(booking(label)) for label in "ab"]
        await work("first")
        if ends == "raises":
            raise ValueError(len(tasks))
        return "done"

    run = Driver(code)
    run.start()
    run.turn(run.completed(2, "first"))
    assert run.result == WAITS
    for _ in "ab":
        run.turn(run.completed("undo"))

    assert run.result == ("ValueError: 2" if ends == "raises" else "done")


@orchestration
async def child(label: str) -> str:
    return label


async def calling(step: Awaitable[str]) -> str:
    return await step


@pytest.mark.parametrize("wrap", [lambda step: step, asyncio.create_task, calling])
@pytest.mark.parametrize("ends", ["at once", "later", "cancelled"])
def test_a_child_that_is_to_outlive_its_parent_is_not_given_up_with_the_task_that_awaits_it(
    wrap, ends
):
    @orchestration
    async def code() -> str:
        step = wrap(child.options(on_parent_close="abandon", id="kid")("a"))
        kept = asyncio.ensure_future(step)
        left = asyncio.create_task(booking("a"))
        if ends == "cancelled":
            await kept
        elif ends == "later":
            await asyncio.sleep(1)
        return f"done {left.done()}"

    run = Driver(code)
    first = run.start()
    if ends != "at once":
        run.turn(run.fired() if ends == "later" else run.cancel())
    if run.result == WAITS:
        run.turn(run.child_completed("child", "late"))
        run.turn(run.completed("undo"))

    if ends != "at once" or wrap is not calling:  # a task that never began calls nothing
        assert [event.child_instance_id for event in first.children] == ["kid"]
    assert not any(outcome.cancelled_children for outcome in run.outcomes)
    assert run.result == ("cancelled: enough" if ends == "cancelled" else "done False")


def test_a_callback_of_a_left_task_may_read_how_it_ended(caplog):
    @orchestration
    async def code() -> str:
        asyncio.create_task(asyncio.sleep(100)).add_done_callback(lambda task: task.result())
        left = asyncio.create_task(booking("a"))
        await asyncio.sleep(1)
        return f"done {left.done()}"

    run = Driver(code)
    run.start()
    run.turn(run.fired(run.open_ids(TimerCreated)[0]))
    run.turn(run.completed("undo"))

    assert run.result == "done False"
    assert "Exception in callback" in caplog.text


async def leases() -> AsyncGenerator[int, None]:
    try:
        for number in range(10):
            yield number
    finally:
        await undo("lease")


def test_a_generator_that_is_left_half_way_is_closed_at_the_end():
    @orchestration
    async def code() -> int:
        async for number in leases():
            if number == 2:
                break
        return number

    run = Driver(code)
    run.start()
    assert run.result == WAITS
    run.turn(run.completed("undo"))

    assert run.result == 2


def test_a_clean_up_that_does_not_end_is_cut_off(caplog):
    run = left_at_clean_up()
    assert run.result == WAITS
    outcome = run.turn(run.fired())

    assert run.result == "done False"
    assert outcome.cancelled_activities
    assert {record.message for record in caplog.records} == {
        "instance 'i' has ended: the clean-up of what it left behind was cut off after 30 s"
    }


def test_what_waits_for_nothing_that_could_come_is_not_waited_for():
    async def deaf() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    @orchestration
    async def code() -> str:
        task = asyncio.create_task(deaf())
        await asyncio.sleep(0)
        return f"done {task.done()}"

    run = Driver(code)
    run.start()

    assert run.result == "done False"


def test_a_cancellation_during_that_clean_up_comes_too_late():
    undisturbed = left_at_clean_up()
    undisturbed.turn(undisturbed.completed("undo"))

    run = left_at_clean_up()
    outcome = run.turn(run.cancel("changed mind"))
    run.turn(run.completed("undo"))

    assert len(outcome.ignored) == 1
    assert run.result == undisturbed.result


def test_the_end_of_many_tasks_costs_with_their_number(monkeypatch):
    @orchestration
    async def code() -> int:
        tasks = [asyncio.create_task(asyncio.sleep(100)) for _ in range(300)]
        await asyncio.sleep(0)
        return len(tasks)

    looks = 0
    look = DurableLoop.live_tasks

    def live_tasks(loop: DurableLoop) -> list[DurableTask]:
        nonlocal looks
        looks += 1
        return look(loop)

    monkeypatch.setattr(DurableLoop, "live_tasks", live_tasks)
    run = Driver(code)
    run.start()

    assert run.result == 300
    assert 0 < looks < 20


def test_a_task_of_the_last_line_begins_before_it_is_cancelled():
    @orchestration
    async def code() -> str:
        asyncio.create_task(booking("a"))  # noqa: RUF006
        return "done"

    run = Driver(code)
    run.start()
    assert run.kinds()[1:3] == ["ActivityScheduled", "ActivityCancelRequested"]
    run.turn(run.completed("undo"))

    assert run.result == "done"


def test_callbacks_of_the_task_that_ends_last_are_run(caplog):
    @orchestration
    async def code() -> str:
        left = asyncio.create_task(asyncio.sleep(100))
        left.add_done_callback(lambda task: current().logger.warning("%s", task.cancelled()))
        await asyncio.sleep(0)
        return f"done {left.done()}"

    run = Driver(code)
    run.start()

    assert run.result == "done False"
    assert {record.getMessage() for record in caplog.records} == {"True"}


async def stay(label: str) -> None:
    try:
        await work(label)
    finally:
        await undo(label)
        await asyncio.Event().wait()


def test_what_waits_for_nothing_after_its_clean_up_is_not_waited_for_either():
    @orchestration
    async def code() -> str:
        left = asyncio.create_task(stay("a"))
        await asyncio.sleep(1)
        return f"done {left.done()}"

    run = Driver(code)
    run.start()
    run.turn(run.fired())
    run.turn(run.completed("undo"))

    assert run.result == "done False"


def test_a_cancellation_that_comes_after_a_failure_does_not_hide_it():
    @orchestration
    async def code() -> None:
        left = asyncio.create_task(booking("a"))
        await asyncio.sleep(1)
        raise ValueError(left.done())

    run = Driver(code)
    run.start()
    run.turn(run.fired())
    run.turn(run.cancel("changed mind"))
    run.turn(run.completed("undo"))

    assert run.result == "ValueError: False"


def test_continue_as_new_is_too_late_in_what_is_left(caplog):
    async def again() -> None:
        try:
            await work("a")
        finally:
            continue_as_new()

    @orchestration
    async def code() -> str:
        left = asyncio.create_task(again())
        await asyncio.sleep(1)
        return f"done {left.done()}"

    run = Driver(code)
    run.start()
    run.turn(run.fired())

    assert run.result == "done False"
    assert "continue_as_new() is too late" in caplog.text


# --- steps that are called without await


async def dropped_at_the_end() -> None:
    work("a")


async def dropped_and_completed() -> None:
    work("a")
    await asyncio.sleep(1)


async def kept_in_a_variable_only() -> None:
    kept = work("a")
    await asyncio.sleep(1)
    assert not kept.done()


async def in_a_branch() -> None:
    async def branch() -> None:
        work("a")

    await asyncio.gather(branch(), asyncio.sleep(1))


async def a_wait() -> None:
    wait_for_event("a")


@pytest.mark.parametrize(
    "code",
    [dropped_at_the_end, dropped_and_completed, kept_in_a_variable_only, in_a_branch, a_wait],
)
def test_a_step_without_await_is_told_with_its_line(code):
    run = Driver(orchestration(code))
    run.start()
    if code is dropped_and_completed:
        run.turn(run.completed("work", "x"))
    elif code is not a_wait and code is not dropped_at_the_end:
        run.turn(run.fired())

    (line,) = [line for outcome in run.outcomes for line in outcome.mistakes]
    called = "wait_for_event('a')" if code is a_wait else "activity 'work'"
    assert line.startswith(f"{called} was called at test_leaving.py:")
    assert "without await: its result and its errors are lost" in line


async def awaited_late() -> None:
    kept = work("a")
    await asyncio.sleep(1)
    await kept


async def raced() -> None:
    await asyncio.wait([work("a"), work("b")], return_when=asyncio.FIRST_COMPLETED)


async def raced_with_what_had_arrived() -> None:
    waits = [wait_for_event("early"), work("a")]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


async def shielded() -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            await asyncio.shield(work("a"))


async def in_a_task() -> None:
    task = asyncio.create_task(work("a"))
    await asyncio.sleep(1)
    task.cancel()


async def gathered() -> None:
    await asyncio.gather(work("a"), asyncio.sleep(1))


@orchestration
async def independent() -> None: ...


async def left_to_itself() -> None:
    independent.options(on_parent_close="abandon")()


@pytest.mark.parametrize(
    "code",
    [
        awaited_late,
        raced,
        raced_with_what_had_arrived,
        shielded,
        in_a_task,
        gathered,
        left_to_itself,
    ],
)
def test_a_step_that_was_awaited_once_is_not_told(code):
    run = Driver(orchestration(code))
    run.start(*[run.raised("early")] * (code is raced_with_what_had_arrived))
    if run.result == WAITS and code is not raced:
        run.turn(run.fired())
    if run.result == WAITS:
        run.turn(run.completed("work", "x"))

    assert run.result != WAITS
    assert [outcome.mistakes for outcome in run.outcomes] == [()] * len(run.outcomes)


def test_a_step_that_a_failure_or_a_cancellation_left_is_not_told():
    @orchestration
    async def code() -> None:
        started = [work("a"), work("b")]
        for each in started:
            await each

    for ended in (lambda run: run.failed(2), lambda run: run.cancel()):
        run = Driver(code)
        run.start()
        outcome = run.turn(ended(run))
        assert outcome.mistakes == ()
