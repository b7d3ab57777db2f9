"""The end of an execution: results, errors, limits, and steps that are closed with it."""

import asyncio
import contextlib
import sys

import pytest
from engine_driver import Driver, raw

from perdure import (
    activity,
    continue_as_new,
    limits,
    next_message,
    orchestration,
    patched,
    set_custom_status,
    side_effect,
    state,
    wait_for_event,
)
from perdure.errors import ActivityFailed, LimitReached, PayloadError
from perdure.model import events, work
from perdure.model.failures import Category


@activity
def step(label: str) -> str:
    return label


def run_to_end(code, *args) -> Driver:
    run = Driver(orchestration(code), *args)
    run.start()
    return run


def test_an_exception_is_recorded_with_type_lineage_and_place():
    class OutOfStock(ValueError):
        pass

    async def code() -> None:
        raise OutOfStock("no screws")

    failure = run_to_end(code).outcomes[-1].end.failure

    assert failure.category is Category.APPLICATION
    assert (failure.type_name, failure.message) == ("OutOfStock", "no screws")
    assert failure.lineage[:3] == ("OutOfStock", "ValueError", "Exception")
    assert "raise OutOfStock" in failure.traceback


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, BaseException])
def test_exceptions_beyond_exception_fail_the_orchestration_too(kind):
    async def code() -> None:
        raise kind("stop")

    run = run_to_end(code)

    assert run.result == f"{kind.__name__}: stop"


def test_system_exit_in_a_branch_fails_the_orchestration():
    async def branch() -> None:
        sys.exit(3)

    async def code() -> None:
        asyncio.create_task(branch())  # noqa: RUF006
        await step("a")

    assert run_to_end(code).result == "SystemExit: 3"


def test_an_error_that_the_code_never_retrieved_is_logged(caplog):
    async def code() -> str:
        async def branch() -> None:
            raise ValueError("lost")

        asyncio.create_task(branch())  # noqa: RUF006
        await asyncio.sleep(0)
        return await step("a")

    run = Driver(orchestration(code), is_checked=False)
    run.start()
    run.restart()
    run.turn(run.completed("step", ""))
    run.close()

    assert [r.getMessage() for r in caplog.records] == [
        "Task exception was never retrieved in instance 'i'"
    ]


def test_deep_recursion_is_an_ordinary_failure():
    def dive() -> None:
        dive()

    async def code() -> None:
        dive()

    assert run_to_end(code).result.startswith("RecursionError")


@pytest.mark.parametrize("is_caught", [False, True])
@pytest.mark.parametrize(
    "ask",
    [
        lambda: step("deep"),
        lambda: set_custom_status("deep"),
        lambda: wait_for_event("deep"),
        lambda: asyncio.get_running_loop().call_later(1, int),
        lambda: step("deep").cancel(),
    ],
    ids=["activity", "status", "event", "timer", "cancel"],
)
def test_steps_at_the_limit_of_recursion_leave_no_hole_in_history(ask, is_caught):
    def room() -> int:
        try:
            return 1 + room()
        except RecursionError:
            return 0

    def dive(depth: int) -> object:
        return ask() if depth == 0 else dive(depth - 1)

    async def code(left: int) -> None:
        depth = room() - left
        if is_caught:
            with contextlib.suppress(RecursionError):
                dive(depth)
        else:
            dive(depth)

    for left in range(-1, 16):
        # What still succeeds depends on the depth of the engine below, which replay does not share.
        run = Driver(orchestration(code), left, is_checked=False)
        run.start()

        assert [event.event_id for event in run.history] == list(range(1, len(run.history) + 1))


def test_the_errors_of_a_group_are_named():
    async def branch(label: str) -> None:
        raise ValueError(label)

    async def code() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(branch("one"))
            group.create_task(branch("two"))

    result = run_to_end(code).result

    assert result.endswith("(2 sub-exceptions): ValueError: one; ValueError: two")


def test_an_error_with_an_unreadable_message_is_recorded():
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    async def code() -> None:
        raise Odd

    assert run_to_end(code).result.startswith("Odd: (its message cannot be read")


def test_long_and_broken_texts_are_cleaned():
    async def code() -> None:
        raise ValueError("\ud800" + "x" * 100_000)

    failure = run_to_end(code).outcomes[-1].end.failure

    assert len(failure.message) <= limits.ERROR_TEXT_CHARACTERS_MAX
    assert failure.message.startswith("\\ud800")


def test_a_result_that_is_no_json_fails_with_its_place():
    async def code() -> object:
        return {"deep": [1, object()]}

    result = run_to_end(code).result

    assert result.startswith("PayloadError: result of orchestration 'code'['deep'][1]")


def test_a_failed_activity_raises_with_the_remote_error():
    async def code() -> list[object]:
        try:
            await step("a")
        except ActivityFailed as error:
            return [error.type_name, error.message, list(error.lineage), error.traceback]
        return []

    run = run_to_end(code)
    run.turn(run.failed("step", "bad card"))

    lineage = ["ValueError", "Exception", "BaseException"]
    assert run.result == ["ValueError", "bad card", lineage, "Traceback ..."]


@pytest.mark.parametrize("category", list(Category))
def test_failures_of_every_category_reach_the_code(category):
    async def code() -> str:
        try:
            return await step("a")
        except ActivityFailed as error:
            return error.message

    run = run_to_end(code)
    run.turn(run.failed("step", "x", category=category))

    assert run.result == "x"


def test_everything_open_is_closed_before_the_terminal_event():
    async def code() -> str:
        async def background() -> None:
            await asyncio.sleep(100)

        asyncio.create_task(background())  # noqa: RUF006
        step("a")
        wait_for_event("e")
        next_message("q")
        return await step("b")

    run = run_to_end(code)
    outcome = run.turn(run.completed(5, "B"))

    assert [type(event).__name__ for event in outcome.delta] == [
        "ActivityCompleted",
        "TimerCancelled",
        "ActivityCancelRequested",
        "ExternalSubscribedCancelled",
        "QueueSubscriptionCancelled",
        "OrchestrationCompleted",
    ]
    assert outcome.cancelled_activities == [2]
    assert outcome.cancelled_timers == [6]


@pytest.mark.parametrize("end", ["return", "raise", "continue"])
def test_there_is_exactly_one_terminal_event_and_it_is_last(end):
    async def code() -> None:
        step("left open")
        await asyncio.sleep(0)
        if end == "raise":
            raise ValueError
        if end == "continue":
            continue_as_new()

    run = run_to_end(code)

    terminal = [event for event in run.history if isinstance(event, events.Terminal)]
    assert terminal == [run.history[-1]]


def test_steps_of_the_last_turn_are_recorded_but_not_sent():
    async def code() -> str:
        step("a")
        asyncio.get_running_loop().call_later(5, print)
        return "done"

    run = run_to_end(code)
    outcome = run.outcomes[-1]

    assert [*outcome.activities, *outcome.timers, *outcome.cancelled_activities] == []
    assert "ActivityScheduled" in run.kinds()


def test_a_step_given_up_in_its_own_turn_is_recorded_and_not_sent():
    async def code() -> str:
        step("a").cancel()
        return await step("b")

    run = run_to_end(code)
    outcome = run.outcomes[-1]

    assert [entry.event.event_id for entry in outcome.activities] == [4]
    assert run.kinds() == [
        "OrchestrationStarted",
        "ActivityScheduled",
        "ActivityCancelRequested",
        "ActivityScheduled",
    ]
    assert not outcome.cancelled_activities


# --- continue as new


def test_continue_as_new_never_returns_and_counts_in_a_branch():
    async def code(number: int) -> None:
        async def branch() -> None:
            continue_as_new(number + 1)

        asyncio.create_task(branch())  # noqa: RUF006
        await step("a")

    result = run_to_end(code, 1).outcomes[-1].end

    assert isinstance(result, events.OrchestrationContinuedAsNew)
    assert bytes(result.input) == b"[2]"


@pytest.mark.parametrize("is_grouped", [False, True])
def test_continue_as_new_in_a_branch_is_no_lost_error(caplog, is_grouped):
    async def branch() -> None:
        await step("a")
        continue_as_new()

    @orchestration
    async def code() -> None:
        if is_grouped:
            async with asyncio.TaskGroup() as group:
                group.create_task(branch())
                await asyncio.sleep(60)
        else:
            task = asyncio.create_task(branch())
            await asyncio.sleep(60)
            await task

    run = Driver(code)
    run.start()
    run.turn(run.completed("step", "a"))
    run.close()

    assert isinstance(run.outcomes[-1].end, events.OrchestrationContinuedAsNew)
    assert caplog.messages == []


def test_continue_as_new_cannot_be_swallowed():
    async def code(number: int) -> str:
        try:
            continue_as_new(number + 1)
        except BaseException:
            return "swallowed"

    assert isinstance(run_to_end(code, 1).outcomes[-1].end, events.OrchestrationContinuedAsNew)


def test_continue_as_new_takes_names_and_a_version():
    async def named(number: int, label: str = "x") -> None:
        continue_as_new(label="y", number=2)

    async def versioned(number: int) -> None:
        continue_as_new(1, 2, 3, version="2.0.0")

    first = run_to_end(named, 1).outcomes[-1].end
    second = run_to_end(versioned, 1).outcomes[-1].end

    assert bytes(first.input) == b'[2,"y"]'
    assert (bytes(second.input), second.version) == (b"[1,2,3]", "2.0.0")


def test_continue_as_new_with_a_version_takes_no_names():
    async def code(number: int) -> str:
        try:
            continue_as_new(number=number, version="2.0.0")
        except TypeError as error:
            return str(error)

    assert "by position only" in run_to_end(code, 1).result


def test_wrong_arguments_to_continue_as_new_are_an_error_at_the_call():
    async def code(number: int) -> str:
        try:
            continue_as_new(1, 2)
        except TypeError as error:
            return str(error)

    text = "orchestration 'code': too many positional arguments; its parameters are (number)"
    assert run_to_end(code, 1).result == text


def test_arguments_of_a_wrong_type_to_continue_as_new_are_an_error_at_the_call():
    async def code(number: int) -> str:
        try:
            continue_as_new("abc")
        except PayloadError as error:
            return str(error)

    text = run_to_end(code, 1).result

    assert text.startswith("arguments (number) of orchestration 'code': Expected `int`, got `str`")


def test_a_result_that_does_not_fit_the_annotation_fails_the_orchestration():
    async def code() -> int:
        return None

    expected = "PayloadError: result of orchestration 'code': Expected `int`, got `null`; got null"
    assert run_to_end(code).result == expected


def test_unread_events_and_messages_are_carried_in_order():
    async def code() -> None:
        await next_message("a")
        continue_as_new()

    run = Driver(orchestration(code))
    run.start(
        run.message("b", 1),
        run.raised("e", 2),
        run.message("a", 3),
        run.message("a", 4),
        run.raised("e", 5),
    )
    carried = run.outcomes[-1].carried

    assert [(m.name, bytes(m.data), m.mailbox) for m in carried] == [
        ("b", b"1", True),
        ("e", b"2", False),
        ("a", b"4", True),
        ("e", b"5", False),
    ]


def test_carried_messages_come_first_in_the_next_execution():
    async def code() -> list[int]:
        return [await next_message("a", int), await next_message("a", int)]

    message = work.CarriedMessage(name="a", data=raw(1))
    run = Driver(orchestration(code), carried=(message,), execution_id=2)
    run.start(run.message("a", 2))

    assert run.result == [1, 2]


def test_too_much_to_carry_blocks_and_loses_nothing():
    async def code() -> None:
        await wait_for_event("go", str)
        continue_as_new()

    run = Driver(orchestration(code), is_checked=False)
    run.start(*(run.message("a", "x" * 1000) for _ in range(2200)))

    with pytest.raises(LimitReached, match="2200 unread events and messages"):
        run.turn(run.raised("go", "now"))


# --- limits


def test_an_endless_loop_of_steps_fails():
    async def code() -> None:
        while True:
            with contextlib.suppress(Exception):
                step("again")

    run = Driver(orchestration(code), is_checked=False)
    run.start()

    assert "is there an endless loop?" in run.result
    assert run.kinds().count("ActivityScheduled") == limits.COMMANDS_PER_TURN_MAX


def test_an_endless_loop_of_statuses_fails():
    async def code() -> None:
        while True:
            set_custom_status("again")

    run = Driver(orchestration(code), is_checked=False)
    run.start()

    assert "is there an endless loop?" in run.result


def test_a_wait_that_nothing_can_end_fails_with_its_line():
    async def code() -> None:
        await asyncio.Event().wait()

    result = run_to_end(code).result

    assert result.startswith("ForbiddenInOrchestration: the orchestration waits at")
    assert "test_failures_and_limits.py:" in result


def test_an_orchestration_without_steps_completes_in_its_first_turn():
    async def code(a: int, b: int = 2, *, c: int = 3) -> int:
        return a + b + c

    run = run_to_end(code, 1)

    assert isinstance(run.outcomes[-1].end, events.OrchestrationCompleted)
    assert run.result == 6


def test_an_activity_that_an_operator_retries_and_that_has_ended_is_not_sent_again():
    @orchestration
    async def code() -> None:
        await asyncio.gather(step("a"), step("b"), asyncio.sleep(1))

    run = Driver(code)
    first, second = [each.event.event_id for each in run.start().activities]
    timer = run.open_ids(events.TimerCreated)[0]
    run.turn(run.completed(first, "a"))
    wanted = work.RetrySteps(
        instance_id="i", execution_id=1, activity_ids=(first, second, timer, 99)
    )
    outcome = run.turn(wanted)

    assert outcome.delta == []
    assert [each.event.event_id for each in outcome.activities] == [second]


def test_code_whose_end_is_decided_writes_no_more_history():
    def fails() -> int:
        raise ValueError("no")

    @orchestration
    async def code() -> None:
        try:
            side_effect(fails)
        except BaseException:
            step("a")
            state["key"] = 1

    run = Driver(code)
    outcome = run.start()

    assert run.kinds() == ["OrchestrationStarted", "OrchestrationFailed"]
    assert (outcome.activities, outcome.kv_writes) == ([], ())


def test_code_that_is_closed_changes_no_outcome_that_was_returned():
    @orchestration
    async def code() -> None:
        try:
            await step("a")
        finally:
            patched("p")
            state["key"] = 1
            set_custom_status("over")
            step("b")

    run = Driver(code)
    outcome = run.start()
    before = list(outcome.delta)
    run.close()

    assert outcome.delta == before
    assert (outcome.kv_writes, outcome.custom_status) == ((), None)


def test_an_attribute_error_that_has_nothing_to_do_with_steps_keeps_its_words():
    async def code() -> None:
        "text".nonsense  # noqa: B018

    assert run_to_end(code).result == "AttributeError: 'str' object has no attribute 'nonsense'"
