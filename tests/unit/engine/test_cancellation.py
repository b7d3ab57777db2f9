"""Cancelling an instance: one CancelledError, durable clean-up, and a bounded end."""

import asyncio
import contextlib

import msgspec
from engine_driver import Driver

from perdure import activity, continue_as_new, limits, orchestration, saga, wait_for_event
from perdure.model import events


@activity
def work(label: str) -> str:
    return label


@activity
def undo(label: str) -> None: ...


@orchestration
async def child(label: str) -> str:
    return await work(label)


def test_code_that_does_not_catch_it_ends_at_once():
    @orchestration
    async def code() -> str:
        return await work("a")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.cancel("customer left"))

    assert run.result == "cancelled: customer left"
    assert outcome.cancelled_activities == [2]
    assert run.kinds()[-3:] == [
        "OrchestrationCancelRequested",
        "ActivityCancelRequested",
        "OrchestrationCancelled",
    ]


def test_clean_up_may_await_durable_steps():
    @orchestration
    async def code() -> None:
        try:
            await work("a")
        finally:
            await undo("a")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.cancel())

    assert outcome.end is None
    assert [a.event.name for a in outcome.activities] == ["undo"]
    assert [t.op for t in outcome.timers] == ["cancel/1"]
    seconds = (outcome.timers[0].fire_at_ms - outcome.timers[0].timestamp_ms) / 1000
    assert seconds == limits.CLEANUP_SECONDS

    outcome = run.turn(run.completed("undo"))

    assert run.result == "cancelled: enough"
    assert outcome.cancelled_timers == [6]


def test_clean_up_that_takes_too_long_is_ended_and_told(caplog):
    @orchestration
    async def code() -> None:
        while True:
            try:
                await work("again")
            except asyncio.CancelledError:
                continue

    run = Driver(code)
    run.start()
    run.turn(run.cancel())
    timer = next(e for e in run.history if getattr(e, "op", "") == "cancel/1")
    outcome = run.turn(run.fired(timer.event_id))

    assert run.result == "cancelled: enough; its clean-up was cut off after 30 s"
    assert len(outcome.cancelled_activities) == 1
    assert "'i' was cancelled without a whole clean-up" in caplog.messages[0]


def test_it_is_cancelled_even_if_the_code_returns_a_value_after_the_request():
    @orchestration
    async def code() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await work("a")
        return "finished all the same"

    run = Driver(code)
    run.start()
    run.turn(run.cancel())

    assert run.result == "cancelled: enough"


def test_an_error_in_the_clean_up_is_told_with_the_reason_and_logged_once(caplog):
    @orchestration
    async def code() -> str:
        undone: dict[str, str] = {}
        try:
            return await work("a")
        except asyncio.CancelledError:
            await undo(undone["flight"])
            raise

    run = Driver(code, is_checked=False)
    run.start()
    run.turn(run.cancel())

    assert run.result == "cancelled: enough; its clean-up raised KeyError: 'flight'"
    run.replay().close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert 'undone["flight"]' in caplog.text


def test_a_failed_step_of_the_clean_up_is_told_and_long_texts_are_shortened():
    @orchestration
    async def code() -> None:
        try:
            await work("a")
        finally:
            await undo("a")

    run = Driver(code)
    run.start()
    run.turn(run.cancel())
    run.turn(run.failed("undo", "x" * 10_000))

    head = "cancelled: enough; its clean-up raised ActivityFailed: activity 'undo': ValueError: xxx"
    assert run.result.startswith(head)
    assert run.result.endswith("xxx...")
    assert len(run.result) < 600


def test_a_history_whose_end_says_nothing_of_the_clean_up_still_replays():
    @orchestration
    async def code() -> str:
        try:
            return await work("a")
        finally:
            raise ValueError("clean-up failed")

    run = Driver(code)
    run.start()
    run.turn(run.cancel())
    run.history[-1] = msgspec.structs.replace(run.history[-1], reason="enough")

    assert run.replay().is_finished


def test_code_that_has_returned_ends_as_it_would_have():
    @orchestration
    async def code() -> str:
        return await work("a")

    run = Driver(code)
    run.start()
    run.turn(run.completed("work", "done"), run.cancel())

    assert run.result == "done"


def test_a_cancel_before_the_completion_of_the_same_turn_reaches_the_code():
    @orchestration
    async def code() -> str:
        return await work("a")

    run = Driver(code)
    run.start()
    run.turn(run.cancel(), run.completed("work", "done"))

    assert run.result == "cancelled: enough"


@orchestration
async def actor() -> None:
    try:
        await work("a")
    except asyncio.CancelledError:
        await undo("a")
        raise
    continue_as_new()


def test_a_cancel_after_continue_as_new_is_for_the_next_execution():
    run = Driver(actor)
    run.start()
    outcome = run.turn(run.completed("work", "done"), run.cancel("late"))

    assert isinstance(outcome.end, events.OrchestrationContinuedAsNew)
    assert outcome.cancel_reason == "late"


def test_a_cancel_in_the_first_turn_of_a_later_execution_reaches_its_first_await():
    run = Driver(actor, execution_id=2)
    outcome = run.start(run.raised("other", 1), run.cancel("late"))

    assert outcome.end is None
    assert [each.event.name for each in outcome.activities] == ["undo"]

    run.turn(run.completed("undo"))

    assert run.result == "cancelled: late"


def test_a_second_cancel_is_ignored():
    @orchestration
    async def code() -> None:
        try:
            await work("a")
        finally:
            await undo("a")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.cancel("one"), run.cancel("two"))

    assert len(outcome.ignored) == 1

    outcome = run.turn(run.cancel("three"))

    assert outcome.delta == []
    assert len(outcome.ignored) == 1
    assert run.kinds().count("OrchestrationCancelRequested") == 1


def test_cancelled_before_the_first_turn_no_line_of_the_code_runs():
    ran: list[str] = []

    @orchestration
    async def code() -> str:
        ran.append("yes")
        return await work("a")

    run = Driver(code)
    run.start(run.raised("other", 1), run.cancel("too soon"))

    assert run.result == "cancelled: too soon"
    assert ran == []
    assert run.kinds() == [
        "OrchestrationStarted",
        "ExternalEvent",
        "OrchestrationCancelRequested",
        "OrchestrationCancelled",
    ]


def test_open_children_are_cancelled_with_their_parent():
    @orchestration
    async def code() -> None:
        await asyncio.gather(child("a"), child.options(id="mine")("b"))

    run = Driver(code)
    run.start()
    outcome = run.turn(run.cancel())

    assert outcome.cancelled_children == ["i::1.2", "mine"]


def test_a_child_with_the_abandon_policy_outlives_a_cancelled_parent():
    @orchestration
    async def code() -> None:
        await child.options(on_parent_close="abandon")("a")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.cancel())

    assert not outcome.cancelled_children
    assert run.result == "cancelled: enough"


def test_a_task_group_is_cancelled_from_outside_with_all_its_branches():
    log: list[str] = []

    @orchestration
    async def code() -> None:
        async def branch(label: str) -> None:
            try:
                await work(label)
            except asyncio.CancelledError:
                log.append(label)
                raise

        async with asyncio.TaskGroup() as group:
            group.create_task(branch("a"))
            group.create_task(branch("b"))

    run = Driver(code, is_checked=False)
    run.start()
    outcome = run.turn(run.cancel())

    assert log == ["a", "b"]
    assert outcome.cancelled_activities == [2, 3]
    assert run.result == "cancelled: enough"


def test_clean_up_goes_on_after_a_restart():
    @orchestration
    async def code() -> None:
        try:
            await work("a")
        finally:
            await undo("1")
            await undo("2")

    run = Driver(code)
    run.start()
    run.turn(run.cancel())
    run.restart()
    run.turn(run.completed("undo"))
    run.restart()
    run.turn(run.completed("undo"))

    assert run.result == "cancelled: enough"


def test_a_timeout_inside_the_clean_up_still_works():
    @orchestration
    async def code() -> str:
        try:
            await work("a")
        except asyncio.CancelledError:
            try:
                async with asyncio.timeout(5):
                    await undo("a")
            except TimeoutError:
                await undo("b")
        return "x"

    run = Driver(code)
    run.start()
    run.turn(run.cancel())
    timer = next(
        e.event_id for e in run.history if isinstance(e, events.TimerCreated) and e.op == "0/2"
    )
    outcome = run.turn(run.fired(timer))

    assert [a.event.name for a in outcome.activities] == ["undo"]


def test_the_time_of_a_clean_up_counts_from_the_end_of_a_saga():
    @orchestration
    async def code() -> None:
        try:
            async with saga() as later:
                later(asyncio.sleep, limits.CLEANUP_SECONDS + 20)
                await work("a")
        finally:
            await asyncio.sleep(limits.CLEANUP_SECONDS - 5)

    run = Driver(code)
    run.start()
    run.turn(run.cancel())
    while not run.execution.is_finished:
        due = {run.history[each - 1].fire_at_ms: each for each in run.open_ids(events.TimerCreated)}
        run.turn(run.fired(due[min(due)]), after_ms=0)

    assert run.result == "cancelled: enough"
    assert len(run.outcomes) == 4


def test_every_step_of_a_compensation_is_marked_also_in_its_tasks():
    async def undone(label: str) -> None:
        await undo(label)

    async def all_undone() -> None:
        await asyncio.gather(undone("b"), undone("c"), undo("d"))

    @orchestration
    async def code() -> None:
        async with saga() as later:
            later(all_undone)
            await work("a")

    run = Driver(code)
    run.start()
    run.turn(run.failed("work"))

    scheduled = [e for e in run.history if isinstance(e, events.ActivityScheduled)]
    assert [(e.name, e.compensation) for e in scheduled] == [("work", False), *[("undo", True)] * 3]


def test_code_that_cancels_itself_fails():
    @orchestration
    async def code() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await wait_for_event("never")

    run = Driver(code)
    run.start()

    assert run.result.startswith("CancelledError: the code cancelled itself")
