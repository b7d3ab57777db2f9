"""asyncio's own functions inside an orchestration: durable, and the same on replay."""

import asyncio
import contextvars

import pytest
from engine_driver import Driver

from perdure import activity, next_message, orchestration, wait_for_event
from perdure.engine.tasks import DurableGathering, ReadTrackingGathering


@activity
def work(label: str) -> str:
    return label


def test_awaiting_a_call_gives_its_result():
    @orchestration
    async def code() -> str:
        return await work("a") + await work("b")

    run = Driver(code)
    run.start()
    run.turn(run.completed("work", "x"))
    run.turn(run.completed("work", "y"))

    assert run.result == "xy"


def test_gather_takes_calls_and_keeps_their_order():
    @orchestration
    async def code() -> list[str]:
        return list(await asyncio.gather(work("a"), work("b"), work("c")))

    run = Driver(code)
    run.start()
    run.turn(run.completed(4, "C"), run.completed(2, "A"))
    run.turn(run.completed(3, "B"))

    assert run.result == ["A", "B", "C"]


def test_gather_runs_branches_of_several_steps():
    async def branch(label: str) -> str:
        return await work(label + "1") + await work(label + "2")

    @orchestration
    async def code() -> list[str]:
        return list(await asyncio.gather(branch("a"), branch("b")))

    run = Driver(code)
    run.start()
    run.turn(run.completed(3, "B1"))
    run.turn(run.completed(2, "A1"), run.completed(5, "B2"))
    run.turn(run.completed(8, "A2"))

    assert run.result == ["A1A2", "B1B2"]
    assert [e.op for e in run.history if hasattr(e, "op")] == ["0.1/1", "0.2/1", "0.2/2", "0.1/2"]


def test_gather_can_return_exceptions():
    @orchestration
    async def code() -> list[str]:
        results = await asyncio.gather(work("a"), work("b"), return_exceptions=True)
        return [type(result).__name__ for result in results]

    run = Driver(code)
    run.start()
    run.turn(run.failed(2))
    run.turn(run.completed(3, "ok"))

    assert run.result == ["ActivityFailed", "str"]


def test_a_task_group_takes_calls_as_they_are():
    @orchestration
    async def code() -> list[str]:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(work("a"))
            second = group.create_task(work("b"))
        return [first.result(), second.result()]

    run = Driver(code)
    run.start()
    run.turn(run.completed(3, "B"))
    run.turn(run.completed(2, "A"))

    assert run.result == ["A", "B"]


def test_a_failing_branch_cancels_its_task_group():
    @orchestration
    async def code() -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(work("a"))
                group.create_task(work("b"))
        except ExceptionGroup as errors:
            return type(errors.exceptions[0]).__name__
        return "no"

    run = Driver(code)
    run.start()
    outcome = run.turn(run.failed(2))

    assert run.result == "ActivityFailed"
    assert outcome.cancelled_activities == [3]


def test_a_call_given_to_a_task_that_never_begins_is_given_up():
    @orchestration
    async def code() -> str:
        task = asyncio.create_task(work("a"))
        task.cancel()
        await asyncio.sleep(0)
        return await work("b")

    run = Driver(code)
    outcome = run.start()

    assert [a.event.event_id for a in outcome.activities] == [3]
    assert "ActivityCancelRequested" in run.kinds()


def test_sleep_is_a_durable_timer():
    @orchestration
    async def code() -> str:
        await asyncio.sleep(3600)
        return "awake"

    run = Driver(code)
    outcome = run.start()

    assert [timer.fire_at_ms - timer.timestamp_ms for timer in outcome.timers] == [3_600_000]

    run.turn(run.fired())

    assert run.result == "awake"


def test_sleep_zero_only_yields():
    @orchestration
    async def code() -> list[str]:
        seen: list[str] = []

        async def branch(label: str) -> None:
            for number in range(3):
                seen.append(f"{label}{number}")
                await asyncio.sleep(0)

        await asyncio.gather(branch("a"), branch("b"))
        return seen

    run = Driver(code)
    run.start()

    assert run.result == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert run.kinds() == ["OrchestrationStarted", "OrchestrationCompleted"]


def test_a_timeout_that_passes_cancels_the_step():
    @orchestration
    async def code() -> str:
        try:
            async with asyncio.timeout(60):
                return await work("a")
        except TimeoutError:
            return "late"

    run = Driver(code)
    run.start()
    outcome = run.turn(run.fired())

    assert run.result == "late"
    assert outcome.cancelled_activities == [3]


def test_a_timeout_that_is_not_needed_is_taken_back():
    @orchestration
    async def code() -> str:
        async with asyncio.timeout(60):
            return await work("a")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.completed("work", "in time"))

    assert run.result == "in time"
    assert outcome.cancelled_timers == [2]


def test_timeout_at_uses_the_loops_time():
    @orchestration
    async def code() -> str:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + 30):
            await asyncio.sleep(0)
            return await work("a")

    run = Driver(code)
    outcome = run.start()

    assert [timer.fire_at_ms - timer.timestamp_ms for timer in outcome.timers] == [30_000]


def test_a_timeout_can_be_moved():
    @orchestration
    async def code() -> str:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10) as scope:
            await work("a")
            scope.reschedule(loop.time() + 100)
            return await work("b")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.completed("work", ""))

    assert outcome.cancelled_timers == [2]
    assert [timer.fire_at_ms - timer.timestamp_ms for timer in outcome.timers] == [100_000]


def test_wait_for_takes_a_call():
    @orchestration
    async def code() -> str:
        try:
            return await asyncio.wait_for(work("a"), 5)
        except TimeoutError:
            return "late"

    run = Driver(code)
    run.start()
    run.turn(run.fired())

    assert run.result == "late"


def test_wait_for_keeps_the_numbers_of_its_branch_on_every_python():
    async def two() -> str:
        return await work("a") + await work("b")

    @orchestration
    async def code() -> str:
        return await asyncio.wait_for(two(), 5) + await work("c")

    run = Driver(code)
    run.start()
    run.turn(run.completed("work", "A"))
    run.turn(run.completed("work", "B"))
    run.turn(run.completed("work", "C"))

    assert run.result == "ABC"
    assert [e.op for e in run.history if hasattr(e, "op")] == ["0/1", "0/2", "0/3", "0/4"]


def test_wait_returns_the_first_and_leaves_the_rest_open():
    @orchestration
    async def code() -> list[str]:
        steps = [work("a"), work("b"), work("c")]
        done, pending = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        first = [step.result() for step in done]
        done, pending = await asyncio.wait(pending)
        return first + [step.result() for step in done]

    run = Driver(code)
    run.start()
    run.turn(run.completed(3, "B"))
    run.turn(run.completed(4, "C"))
    run.turn(run.completed(2, "A"))

    assert run.result == ["B", "A", "C"]


def test_wait_has_a_durable_timeout():
    @orchestration
    async def code() -> int:
        done, pending = await asyncio.wait([work("a"), work("b")], timeout=5)
        return len(done) * 10 + len(pending)

    run = Driver(code)
    run.start()
    run.turn(run.completed(2, ""))
    outcome = run.turn(run.fired())

    assert run.result == 11
    assert outcome.cancelled_activities == [3]


def test_wait_over_gathers_is_ordered():
    @orchestration
    async def code() -> list[list[str]]:
        groups = [asyncio.gather(work(f"{n}a"), work(f"{n}b")) for n in range(5)]
        done, _ = await asyncio.wait(groups)
        return [list(group.result()) for group in done]

    run = Driver(code)
    run.start()
    run.turn(*(run.completed(number, f"r{number}") for number in range(2, 12)))

    assert run.result == [[f"r{n}", f"r{n + 1}"] for n in range(2, 12, 2)]


def test_the_loop_meets_the_future_of_gather_on_every_supported_python():
    seen: list[tuple[type, int]] = []

    @orchestration
    async def code() -> None:
        groups = (asyncio.gather(work("a")), asyncio.gather(wait_for_event("e")))
        seen.extend((type(group), hash(group)) for group in groups)
        await work("b")

    run = Driver(code, is_checked=False)
    run.start()
    run.replay(code).close()

    live, replayed = seen[:2], seen[2:]
    assert [kind for kind, _ in live] == [DurableGathering, ReadTrackingGathering]
    assert live == replayed


def test_as_completed_gives_results_in_the_order_of_history():
    @orchestration
    async def code() -> list[str]:
        return [await each for each in asyncio.as_completed([work("a"), work("b"), work("c")])]

    run = Driver(code)
    run.start()
    run.turn(run.completed(4, "C"), run.completed(2, "A"))
    run.turn(run.completed(3, "B"))

    assert run.result == ["C", "A", "B"]


def test_as_completed_starts_bare_coroutines_in_the_given_order():
    seen: list[str] = []

    async def branch(label: str) -> str:
        seen.append(label)
        return await work(label)

    @orchestration
    async def code() -> list[str]:
        branches = [branch(label) for label in "abcdefgh"]
        return [await each for each in asyncio.as_completed(branches)]

    run = Driver(code)
    run.start()
    run.turn(*(run.completed(number, f"{number}") for number in range(9, 1, -1)))

    assert run.result == [str(number) for number in range(9, 1, -1)]
    assert seen[:8] == list("abcdefgh")
    assert [e.op for e in run.history if hasattr(e, "op")] == [f"0.{n}/1" for n in range(1, 9)]


def test_as_completed_refuses_coroutines_without_an_order():
    async def branch() -> None:
        await work("a")

    @orchestration
    async def code() -> str:
        for each in asyncio.as_completed({branch()}):
            await each
        return "no"

    run = Driver(code)
    run.start()

    assert run.result.startswith("ForbiddenInOrchestration: as_completed() at")


def test_shield_keeps_the_step_when_the_waiter_goes():
    @orchestration
    async def code() -> str:
        step = work("a")
        try:
            await asyncio.wait_for(asyncio.shield(step), 5)
        except TimeoutError:
            return "late " + await step
        return "in time"

    run = Driver(code)
    run.start()
    outcome = run.turn(run.fired())

    assert not outcome.cancelled_activities

    run.turn(run.completed("work", "after all"))

    assert run.result == "late after all"


def test_queues_locks_events_semaphores_and_conditions_work():
    @orchestration
    async def code() -> list[str]:
        queue: asyncio.Queue[str] = asyncio.Queue(maxsize=1)
        lock, semaphore = asyncio.Lock(), asyncio.Semaphore(1)
        ready, condition = asyncio.Event(), asyncio.Condition()
        log: list[str] = []

        async def produce() -> None:
            for label in "ab":
                async with lock, semaphore:
                    await queue.put(await work(label))
            ready.set()
            async with condition:
                condition.notify_all()

        async def consume() -> None:
            log.extend([await queue.get(), await queue.get()])
            await ready.wait()
            log.append("ready")

        async def watch() -> None:
            async with condition:
                await condition.wait()
            log.append("notified")

        await asyncio.gather(produce(), consume(), watch())
        return log

    run = Driver(code)
    run.start()
    run.turn(run.completed("work", "A"))
    run.turn(run.completed("work", "B"))

    assert sorted(run.result) == ["A", "B", "notified", "ready"]


def test_a_cancelled_task_gives_up_its_step():
    @orchestration
    async def code() -> str:
        task = asyncio.create_task(branch())
        await asyncio.sleep(1)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "stopped"
        return "no"

    async def branch() -> None:
        await work("a")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.fired())

    assert run.result == "stopped"
    assert len(outcome.cancelled_activities) == 1


def test_steps_of_bare_callbacks_are_a_branch_of_their_own():
    @orchestration
    async def code() -> str:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        loop.call_soon(lambda: work("x").add_done_callback(answer.set_result))
        return (await answer).result()

    run = Driver(code)
    run.start()
    run.turn(run.completed("work", "X"))

    assert run.result == "X"
    assert run.history[1].op == "c/1"


def test_an_error_in_a_bare_callback_fails_the_orchestration():
    @orchestration
    async def code() -> str:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        return await work("a")

    run = Driver(code)
    run.start()

    assert run.result == "ZeroDivisionError: division by zero"


def test_a_cancelled_callback_is_not_called():
    called: list[str] = []

    @orchestration
    async def code() -> str:
        loop = asyncio.get_running_loop()
        loop.call_soon(called.append, "soon").cancel()
        loop.call_later(5, called.append, "later").cancel()
        await asyncio.sleep(0)
        return "done"

    run = Driver(code)
    run.start()

    assert (run.result, called) == ("done", [])


def test_tasks_can_be_listed_and_have_stable_names():
    @orchestration
    async def code() -> list[str]:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            group.create_task(asyncio.sleep(0), name="mine")
            return sorted(task.get_name() for task in asyncio.all_tasks())

    run = Driver(code)
    run.start()

    assert run.result == ["Task-0", "Task-0.1", "mine"]


def test_context_variables_follow_the_tasks():
    label: contextvars.ContextVar[str] = contextvars.ContextVar("label", default="none")

    @orchestration
    async def code() -> list[str]:
        async def branch(name: str) -> str:
            label.set(name)
            await work(name)
            return label.get()

        before = label.get()
        return [before, *await asyncio.gather(branch("a"), branch("b")), label.get()]

    token = label.set("host")
    run = Driver(code)
    run.start()
    run.turn(run.completed(3, ""), run.completed(2, ""))
    label.reset(token)

    assert run.result == ["none", "a", "b", "none"]


def test_async_generators_work_and_are_closed_at_the_end():
    @orchestration
    async def code() -> list[str]:
        async def numbers():
            for label in "abc":
                yield await work(label)

        return [each async for each in numbers()]

    run = Driver(code)
    run.start()
    for label in "ABC":
        run.turn(run.completed("work", label))

    assert run.result == ["A", "B", "C"]


def test_a_race_is_decided_by_history_not_by_time():
    @orchestration
    async def code() -> str:
        event = asyncio.ensure_future(wait_for_event("go", str))
        timer = asyncio.ensure_future(asyncio.sleep(5, "timer"))
        done, _ = await asyncio.wait({event, timer}, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    first = Driver(code)
    first.start()
    first.turn(first.raised("go", "event"), first.fired())
    second = Driver(code)
    second.start()
    second.turn(second.fired(), second.raised("go", "event"))

    assert [first.result, second.result] == ["event", "timer"]


def test_a_mailbox_in_a_loop_with_timeouts_drains_in_one_turn():
    @orchestration
    async def code() -> list[int]:
        numbers: list[int] = []
        while len(numbers) < 300:
            async with asyncio.timeout(60):
                numbers.append(await next_message("inbox", int))
        return numbers

    run = Driver(code)
    run.start(*(run.message("inbox", number) for number in range(300)))

    assert run.result == list(range(300))


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e15])
def test_an_impossible_delay_is_refused(seconds):
    @orchestration
    async def code() -> str:
        await asyncio.sleep(seconds)
        return "no"

    run = Driver(code)
    run.start()

    assert "Error" in run.result or "InvalidValue" in run.result
