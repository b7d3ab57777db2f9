"""External events and mailboxes: never lost when early, first come first served, typed."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from engine_driver import Driver, raw

from perdure import activity, continue_as_new, next_message, orchestration, state, wait_for_event
from perdure.errors import ActivityFailed, PayloadError
from perdure.limits import UNREAD_BYTES_MAX, UNREAD_MESSAGES_MAX
from perdure.model import work as items


def test_an_event_that_comes_before_the_wait_is_kept_for_it():
    @orchestration
    async def code() -> str:
        await asyncio.sleep(1)
        return await wait_for_event("approval", str)

    run = Driver(code)
    run.start(run.raised("approval", "early"))
    run.turn(run.fired())

    assert run.result == "early"


def test_waits_and_events_of_one_name_pair_up_in_order():
    @orchestration
    async def code() -> list[int]:
        return list(await asyncio.gather(*(wait_for_event("n", int) for _ in range(3))))

    run = Driver(code)
    run.start(run.raised("n", 1))
    run.turn(run.raised("n", 2), run.raised("n", 3))

    assert run.result == [1, 2, 3]


def test_a_cancelled_wait_gives_its_place_to_the_next():
    @orchestration
    async def code() -> str:
        first = wait_for_event("go", str)
        second = wait_for_event("go", str)
        first.cancel()
        return await second

    run = Driver(code)
    run.start()
    run.turn(run.raised("go", "mine"))

    assert run.result == "mine"
    assert "ExternalSubscribedCancelled" in run.kinds()


def test_a_wait_that_timed_out_leaves_the_event_for_the_next_wait():
    @orchestration
    async def code() -> str:
        try:
            return await asyncio.wait_for(next_message("inbox", str), 5)
        except TimeoutError:
            return "second " + await next_message("inbox", str)

    run = Driver(code)
    run.start()
    run.turn(run.fired())
    run.turn(run.message("inbox", "late"))

    assert run.result == "second late"
    assert "QueueSubscriptionCancelled" in run.kinds()


def test_events_and_mailboxes_of_one_name_are_apart():
    @orchestration
    async def code() -> list[str]:
        return [await wait_for_event("x", str), await next_message("x", str)]

    run = Driver(code)
    run.start(run.message("x", "message"), run.raised("x", "event"))

    assert run.result == ["event", "message"]


def test_mailboxes_of_different_names_are_apart():
    @orchestration
    async def code() -> list[int]:
        return [await next_message("b", int), await next_message("a", int)]

    run = Driver(code)
    run.start(run.message("a", 1), run.message("b", 2))

    assert run.result == [2, 1]


def test_equal_messages_are_separate_arrivals():
    @orchestration
    async def code() -> int:
        return await next_message("n", int) + await next_message("n", int)

    run = Driver(code)
    run.start(run.message("n", 4), run.message("n", 4))

    assert run.result == 8


def test_a_mailbox_with_many_messages_drains_in_one_turn():
    @orchestration
    async def code() -> int:
        return sum([await next_message("n", int) for _ in range(1000)])

    run = Driver(code)
    run.start(*(run.message("n", number) for number in range(1000)))

    assert run.result == sum(range(1000))
    assert len(run.outcomes) == 1


def test_data_of_the_wrong_type_is_an_error_that_the_code_can_catch():
    @orchestration
    async def code() -> str:
        try:
            await wait_for_event("n", int)
        except PayloadError as error:
            return str(error)
        return "no"

    run = Driver(code)
    run.start()
    run.turn(run.raised("n", "seven"))

    assert "event 'n'" in run.result
    assert "Expected `int`, got `str`" in run.result


def test_a_message_after_a_wrong_one_is_not_lost():
    @orchestration
    async def code() -> int:
        while True:
            try:
                return await next_message("n", int)
            except PayloadError:
                pass

    run = Driver(code)
    run.start(run.message("n", "x"), run.message("n", None), run.message("n", 3))

    assert run.result == 3


def test_waits_keep_their_place_over_a_restart():
    @orchestration
    async def code() -> list[str]:
        async def branch(delay: float) -> str:
            await asyncio.sleep(delay)
            return await next_message("n", str)

        return list(await asyncio.gather(branch(2), branch(1)))

    run = Driver(code)
    run.start()
    run.turn(run.fired(3))
    run.turn(run.fired(2))
    run.restart()
    run.turn(run.message("n", "first"), run.message("n", "second"))

    assert run.result == ["second", "first"]


def test_waits_are_served_in_the_order_of_history_in_every_interleaving():
    @orchestration
    async def code() -> list[str]:
        async def branch() -> str:
            return await next_message("n", str)

        return list(await asyncio.gather(branch(), branch()))

    run = Driver(code, is_checked=False)
    run.start()
    first, second = run.history[1:]
    # As if another interpreter had run the second branch first.
    run.history[1:] = [
        msgspec.structs.replace(second, event_id=2),
        msgspec.structs.replace(first, event_id=3),
    ]
    run.restart()
    run.turn(run.message("n", "one"), run.message("n", "two"))

    assert run.result == ["two", "one"]


def test_a_wait_without_a_type_takes_any_json():
    @orchestration
    async def code() -> dict[str, list[int]]:
        return await wait_for_event("x")

    run = Driver(code)
    run.start(run.raised("x", {"a": [1]}))

    assert run.result == {"a": [1]}


# --- unread arrivals are carried along by continue_as_new()


@activity
def work(label: str) -> None: ...


def carried_by(run: Driver) -> list[tuple[str, str]]:
    return [(m.name, bytes(m.data).decode()) for m in run.outcomes[-1].carried]


async def listening() -> None:
    while True:
        state["got"] = await next_message("ctl", str)


async def look(step: Any) -> None:
    step.done()


async def ask(step: Any) -> None:
    step.result()


async def wait_shortly(step: Any) -> None:
    await asyncio.wait([step], timeout=0)


async def shield_shortly(step: Any) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(step), 0)


async def await_it(step: Any) -> None:
    await step


async def listen(step: Any) -> None:
    step.add_done_callback(lambda _: None)


async def call_back(step: Any) -> None:
    step.add_done_callback(lambda done: done.result())
    await asyncio.sleep(0)


async def gather_it(step: Any) -> None:
    assert await asyncio.gather(step, asyncio.sleep(0)) == ["stop", None]


async def shield_it(step: Any) -> None:
    assert await asyncio.shield(step) == "stop"


async def see_it_done(step: Any) -> None:
    assert await asyncio.wait([step]) == ({step}, set())


async def gather_in_gather(step: Any) -> None:
    await asyncio.gather(asyncio.gather(step), asyncio.sleep(0))


async def gather_and_never_await(step: Any) -> None:
    asyncio.gather(step)
    await asyncio.sleep(0)


async def gather_with_the_never(step: Any) -> None:
    """It collects what is there, and is broken off."""
    gathering = asyncio.gather(step, next_message("never"), return_exceptions=True)
    await asyncio.sleep(0)
    gathering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gathering


async def await_beside_a_task(step: Any) -> None:
    task = asyncio.ensure_future(step)
    if task is step and not isinstance(step, asyncio.Task):
        task = asyncio.create_task(step)
    assert await step == "stop"
    assert await task == "stop"


async def await_in_two_tasks(step: Any) -> None:
    await asyncio.gather(await_it(step), await_it(step))


async def gather_too_late(step: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        await asyncio.gather(failing(), step)


async def ask_for_an_error(step: Any) -> None:
    assert step.exception() is None


async def failing() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("wait", [next_message, wait_for_event])
@pytest.mark.parametrize("wrap", [lambda step: step, asyncio.create_task])
@pytest.mark.parametrize(
    ("use", "is_taken"),
    [
        (look, False),
        (listen, False),
        (see_it_done, False),
        (gather_too_late, False),
        (gather_and_never_await, False),
        (gather_with_the_never, False),
        (ask_for_an_error, False),
        (ask, True),
        (await_it, True),
        (call_back, True),
        (gather_it, True),
        (gather_in_gather, True),
        (await_beside_a_task, True),
        (await_in_two_tasks, True),
        (shield_it, True),
        (asyncio.wait_for, True),
    ],
)
def test_what_came_to_a_wait_is_carried_unless_the_code_took_it(
    wait, wrap, use, is_taken, is_early
):
    @orchestration
    async def code() -> None:
        await work("before")
        signal = wrap(wait("ctl", str))
        await work("a")
        await (use(signal, 1) if use is asyncio.wait_for else use(signal))
        continue_as_new()

    run = Driver(code)
    run.start()
    signal = (run.message if wait is next_message else run.raised)("ctl", "stop")
    for inbox in [signal, None] if is_early else [None, signal]:
        run.turn(inbox or run.completed("work"))
    run.turn(run.completed("work"))

    assert carried_by(run) == ([] if is_taken else [("ctl", '"stop"')])


@pytest.mark.parametrize("use", [wait_shortly, shield_shortly])
def test_a_wait_that_was_listened_to_before_something_came_has_not_taken_it(use):
    @orchestration
    async def code() -> None:
        signal = next_message("ctl", str)
        await use(signal)
        await work("a")
        continue_as_new()

    run = Driver(code)
    run.start()
    while "ActivityScheduled" not in run.kinds():
        run.turn(run.fired())
    run.turn(run.message("ctl", "stop"))
    run.turn(run.completed("work"))

    assert carried_by(run) == [("ctl", '"stop"')]


def test_what_comes_in_the_turn_that_continues_is_carried_even_if_a_branch_waits_for_it():
    @orchestration
    async def code() -> None:
        listener = asyncio.create_task(listening())
        await work("a")
        assert not listener.done()
        continue_as_new()

    run = Driver(code)
    run.start()
    run.turn(run.message("ctl", "read"))
    run.turn(run.completed("work"), run.message("ctl", "late"))

    assert carried_by(run) == [("ctl", '"late"')]


@pytest.mark.parametrize("wait", [next_message, wait_for_event])
@pytest.mark.parametrize("is_waited_for", [False, True])
def test_what_came_for_a_task_that_was_cancelled_before_it_began_goes_to_the_next(
    wait, is_waited_for
):
    @orchestration
    async def code() -> list[str]:
        await work("a")
        first = asyncio.create_task(wait("ctl", str))
        others = [asyncio.create_task(wait("ctl", str)) for _ in range(2 if is_waited_for else 0)]
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        others = others or [wait("ctl", str), wait("ctl", str)]
        return await asyncio.gather(*others)

    run = Driver(code)
    run.start()
    send = run.message if wait is next_message else run.raised
    run.turn(send("ctl", "one"), send("ctl", "two"))
    run.turn(run.completed("work"))

    assert run.result == (["two", "one"] if is_waited_for else ["one", "two"])


def test_what_came_to_a_wait_that_a_failed_gather_left_behind_is_carried():
    @orchestration
    async def code() -> None:
        with contextlib.suppress(ActivityFailed):
            await asyncio.gather(next_message("ctl", str), work("a"))
        await work("b")
        continue_as_new()

    run = Driver(code)
    run.start()
    run.turn(run.failed("work"))
    run.turn(run.message("ctl", "late"))
    run.turn(run.completed("work"))

    assert carried_by(run) == [("ctl", '"late"')]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_gather_that_failed_raises_its_error_beside_a_wait_that_was_given_up(is_first):
    @orchestration
    async def code() -> str:
        wrong, given_up = wait_for_event("number", int), next_message("ctl", str)
        both = asyncio.gather(*((wrong, given_up) if is_first else (given_up, wrong)))
        with contextlib.suppress(PayloadError):
            await wrong
        given_up.cancel()
        await asyncio.sleep(0)
        try:
            await both
        except PayloadError:
            return "refused"
        return "taken"

    run = Driver(code)
    run.start()
    run.turn(run.raised("number", "no number"))

    assert run.result == "refused"


def test_untaken_and_waiting_arrivals_are_carried_in_the_order_of_arrival():
    @orchestration
    async def code() -> None:
        waits = [next_message("a", int), wait_for_event("e", int), next_message("a", str)]
        await work("a")
        assert len(waits) == 3
        await next_message("b", int)
        continue_as_new()

    run = Driver(code)
    run.start(run.message("b", 0), run.message("other", 1))
    run.turn(run.message("a", 2), run.raised("e", 3))
    run.restart()
    run.turn(run.message("a", 4), run.message("a", 5), run.raised("e", 6))
    run.turn(run.completed("work"))

    assert carried_by(run) == [
        ("other", "1"), ("a", "2"), ("e", "3"), ("a", "4"), ("a", "5"), ("e", "6"),
    ]  # fmt: skip


def test_many_messages_that_were_taken_leave_nothing_behind():
    @orchestration
    async def code() -> None:
        await work("a")
        for _ in range(100):
            await next_message("m", int)
        continue_as_new()

    run = Driver(code)
    run.start(*(run.message("m", n) for n in range(101)))
    assert len(run.outcomes[-1].postponed) == 101 - UNREAD_MESSAGES_MAX
    run.turn(run.completed("work"))

    assert carried_by(run) == []
    assert [bytes(item.data) for item in run.outcomes[-1].postponed] == [b"100"]


def test_code_that_waits_for_something_else_is_given_a_bounded_part_of_a_flood():
    @orchestration
    async def code() -> list[int]:
        await work("a")
        return [await next_message("m", int) for _ in range(300)]

    run = Driver(code)
    run.start(*(run.message("m", n) for n in range(200)))
    assert len(run.outcomes[-1].postponed) == 200 - UNREAD_MESSAGES_MAX
    run.turn(*(run.message("m", n) for n in range(200, 300)))
    assert (run.outcomes[-1].delta, len(run.outcomes[-1].postponed)) == ([], 236)
    run.turn(run.completed("work"))

    assert run.result == list(range(300))


def test_unread_mail_is_bounded_in_bytes():
    @orchestration
    async def code() -> None:
        await work("a")

    run = Driver(code)
    large = "x" * (UNREAD_BYTES_MAX // 4)
    run.start(*(run.message("m", large) for _ in range(6)))

    assert len(run.outcomes[-1].postponed) == 2


def test_code_that_waits_for_mail_is_given_all_of_it():
    @orchestration
    async def code() -> str:
        return await wait_for_event("go", str)

    run = Driver(code)
    run.start(*(run.message("noise", n) for n in range(500)), run.raised("go", "now"))

    assert run.result == "now"


def test_what_comes_after_continue_as_new_is_left_to_the_next_execution():
    @orchestration
    async def code() -> None:
        for _ in range(40):
            await next_message("m", int)
        continue_as_new()

    run = Driver(code)
    run.start()
    run.turn(*(run.message("m", n) for n in range(100)), run.cancel("enough"))
    outcome = run.outcomes[-1]

    assert carried_by(run) == []
    assert [bytes(item.data) for item in outcome.postponed[:-1]] == [
        str(n).encode() for n in range(40, 100)
    ]
    assert outcome.postponed[-1] == run.cancel("enough")
    assert outcome.cancel_reason is None
    assert sum(type(event).__name__ == "QueueEventDelivered" for event in outcome.delta) == 40


def test_what_is_carried_counts_among_the_unread_mail():
    @orchestration
    async def code() -> None:
        for _ in range(40):
            await next_message("m", int)
        continue_as_new()

    carried = tuple(items.CarriedMessage(name="m", data=raw(n)) for n in range(24))
    run = Driver(code, carried=carried, execution_id=2)
    run.start(*(run.message("m", n) for n in range(24, 24 + UNREAD_MESSAGES_MAX)))

    assert carried_by(run) == []
    assert len(run.outcomes[-1].postponed) == 24 + UNREAD_MESSAGES_MAX - 40


def test_a_cancellation_of_the_first_batch_is_seen_before_a_flood():
    lines: list[str] = []

    @orchestration
    async def code() -> None:
        lines.append("ran")
        await next_message("m", int)

    run = Driver(code, is_checked=False)
    run.start(*(run.message("m", n) for n in range(100)), run.cancel("enough"))

    assert (run.result, lines) == ("cancelled: enough", [])


def test_a_type_that_nothing_can_be_read_as_is_told_at_the_await():
    @orchestration
    async def code() -> str:
        try:
            return await wait_for_event("x", bytes | str)
        except PayloadError as error:
            return str(error)

    run = Driver(code)
    run.start(run.raised("x", "a"))

    assert run.result.startswith("event 'x': values cannot be read back as bytes | str: ")


def test_an_arrival_that_goes_back_counts_among_the_unread_mail():
    @orchestration
    async def code() -> list[int]:
        first = next_message("m", int)
        abandoned = asyncio.create_task(first)
        first.add_done_callback(lambda _: abandoned.cancel())
        await work("a")
        return [await next_message("m", int) for _ in range(100)]

    run = Driver(code)
    run.start()
    run.turn(*(run.message("m", n) for n in range(100)))
    assert len(run.outcomes[-1].postponed) == 100 - UNREAD_MESSAGES_MAX

    run.turn(run.completed("work"))
    assert run.result == list(range(100))


@pytest.mark.parametrize("kind", ["event", "message"])
def test_data_is_checked_against_the_wait_of_its_own_kind(kind):
    @orchestration
    async def code() -> None:
        wait = wait_for_event if kind == "event" else next_message
        await wait("go", int)

    run = Driver(code)
    run.start()
    same, other = (run.raised, run.message) if kind == "event" else (run.message, run.raised)

    assert run.execution.check_arrival(same("go", 1))
    assert not run.execution.check_arrival(other("go", "text"))
    assert not run.execution.check_arrival(same("stop", "text"))
    with pytest.raises(PayloadError, match="'go' is not sent to 'i', which waits for it"):
        run.execution.check_arrival(same("go", "text"))
