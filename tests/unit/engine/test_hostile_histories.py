"""Damaged, foreign or impossible histories and messages: refused by name, or without effect."""

import msgspec
import pytest
from engine_driver import START_MS, Driver, plain, raw, started

from perdure import activity, orchestration, wait_for_event
from perdure.codec import JSON
from perdure.engine.execution import Execution, run_turn
from perdure.errors import CorruptData, InternalError, Nondeterminism, PayloadError
from perdure.model import events, work
from perdure.model.failures import Category, Failure


@activity
def step(label: str) -> str:
    return label


@orchestration
async def code() -> str:
    import asyncio

    _, result = await asyncio.gather(asyncio.sleep(5), step("a"))
    return result + await wait_for_event("x", str)


@orchestration
async def child(label: str) -> str:
    return label


ENVELOPE = {"instance_id": "i", "execution_id": 1, "timestamp_ms": START_MS}


def base() -> list[events.Event]:
    run = Driver(code)
    run.start()
    run.close()
    return run.history


def replay(history, handler=code) -> Execution:
    return Execution.replay(handler, history, kv={}, codec=JSON)


def test_an_empty_history_is_corrupt():
    with pytest.raises(CorruptData, match="empty"):
        replay([])


def test_a_history_must_begin_with_its_start():
    with pytest.raises(CorruptData, match="begins with ActivityScheduled"):
        replay(base()[1:])


def test_a_hole_in_the_history_is_corrupt():
    history = base()

    with pytest.raises(CorruptData, match="event 3 stands at position 2"):
        replay([history[0], history[2]])


def test_events_out_of_order_are_corrupt():
    history = base()

    with pytest.raises(CorruptData):
        replay([history[0], history[2], history[1]])


def test_an_event_of_another_execution_is_corrupt():
    history = base()
    foreign = msgspec.structs.replace(history[1], execution_id=2)

    with pytest.raises(CorruptData, match="another execution"):
        replay([history[0], foreign, *history[2:]])


def test_turns_must_follow_each_other():
    history = base()
    late = msgspec.structs.replace(history[2], turn=5)

    with pytest.raises(CorruptData, match="turn 5"):
        replay([*history[:2], late])


def completion(kind, source, event_id=4, turn=2, **fields):
    return kind(**ENVELOPE, event_id=event_id, turn=turn, source_event_id=source, **fields)


FAILURE = Failure(message="x")
WRONG = [
    (events.ActivityCompleted, {"result": raw("x")}, "timer"),
    (events.ActivityFailed, {"failure": FAILURE}, "timer"),
    (events.TimerFired, {"fire_at_ms": 1}, "activity"),
    (events.SubOrchestrationCompleted, {"result": raw("x")}, "activity"),
    (events.SubOrchestrationFailed, {"failure": FAILURE}, "timer"),
]


def id_of(history, kind: str) -> int:
    wanted = {"timer": events.TimerCreated, "activity": events.ActivityScheduled}[kind]
    return next(e.event_id for e in history if isinstance(e, wanted))


@pytest.mark.parametrize(("kind", "fields", "family"), WRONG)
def test_a_completion_of_the_wrong_family_is_nondeterminism(kind, fields, family):
    history = base()
    wrong = completion(kind, id_of(history, family), **fields)

    with pytest.raises(Nondeterminism, match="completes event"):
        replay([*history, wrong])


@pytest.mark.parametrize("source", [0, -1, 1, 99])
def test_a_completion_without_its_schedule_is_nondeterminism(source):
    with pytest.raises(Nondeterminism, match="no step"):
        replay([*base(), completion(events.ActivityCompleted, source, result=raw("x"))])


def test_a_completion_before_its_schedule_is_nondeterminism():
    history = base()
    early = completion(events.ActivityCompleted, 3, event_id=2, turn=1, result=raw("x"))
    moved = [msgspec.structs.replace(event, event_id=event.event_id + 1) for event in history[1:]]

    with pytest.raises(Nondeterminism):
        replay([history[0], early, *moved])


def test_a_second_completion_in_history_is_nondeterminism():
    history = base()
    source = id_of(history, "activity")
    first = completion(events.ActivityCompleted, source, result=raw("x"))
    second = completion(events.ActivityFailed, source, event_id=5, turn=3, failure=FAILURE)

    with pytest.raises(Nondeterminism, match="a second time"):
        replay([*history, first, second])


def test_a_schedule_that_stands_twice_is_nondeterminism():
    history = base()
    twice = msgspec.structs.replace(history[1], event_id=4)

    with pytest.raises(Nondeterminism, match="two decisions"):
        replay([*history, twice])


def test_a_finished_history_takes_no_more_messages():
    @orchestration
    async def short() -> str:
        return "x"

    run = Driver(short)
    run.start()
    outcome = run_turn(
        short, run.history, [run.raised("x"), run.cancel()], kv={}, now_ms=1, codec=JSON
    )

    assert outcome.end is None
    assert outcome.delta == []
    assert len(outcome.ignored) == 2


def end(kind, event_id, **fields):
    return kind(**ENVELOPE, event_id=event_id, turn=2, **fields)


@pytest.mark.parametrize(
    "tail",
    [
        [end(events.OrchestrationTerminated, 4)],
        [end(events.OrchestrationFailed, 4, failure=Failure(category=Category.POISON))],
        [end(events.OrchestrationTerminated, 4), end(events.OrchestrationTerminated, 5)],
        [end(events.OrchestrationCompleted, 4), end(events.OrchestrationCompleted, 5)],
        [
            end(events.OrchestrationCompleted, 4),
            end(events.OrchestrationCancelRequested, 5),
        ],
        [end(events.OrchestrationCompleted, 4), end(events.ExternalEvent, 5, name="x")],
    ],
)
def test_an_execution_that_was_ended_from_outside_does_nothing(tail):
    execution = replay([*base(), *tail])

    assert execution.is_finished
    assert execution.event_count == 3 + len(tail)


def test_odd_names_and_payloads_replay():
    odd = "\x00\u2028 " + "é" * 10_000

    @orchestration
    async def strange() -> str:
        return await step(odd)

    run = Driver(strange)
    run.start()
    run.turn(run.completed("step", odd))

    assert run.result == odd


# --- messages


def test_a_message_for_another_execution_is_ignored():
    run = Driver(code, execution_id=2)
    run.start()
    messages = [
        work.ActivityCompleted(instance_id="i", execution_id=n, activity_id=3) for n in (1, 3)
    ]
    outcome = run.turn(*messages)

    assert outcome.delta == []
    assert outcome.turn == 1
    assert len(outcome.ignored) == 2


def test_a_second_completion_of_any_outcome_is_ignored():
    run = Driver(code)
    run.start()
    source = id_of(run.history, "activity")
    outcome = run.turn(run.completed(source, "x"), run.failed(source))

    assert len(outcome.delta) == 1
    assert len(outcome.ignored) == 1

    outcome = run.turn(run.failed(source))

    assert outcome.delta == []
    assert outcome.ignored == [
        f"ActivityFailed for event {source}: it was completed or given up before"
    ]


def test_a_timer_that_was_taken_back_does_not_fire():
    @orchestration
    async def timed() -> str:
        import asyncio

        async with asyncio.timeout(5):
            await step("a")
        return await step("b")

    run = Driver(timed)
    run.start()
    fired = run.fired()
    run.turn(run.completed("step", ""))
    outcome = run.turn(fired, fired)

    assert outcome.delta == []
    assert len(outcome.ignored) == 2


def test_a_result_that_comes_after_its_step_was_given_up_is_only_kept():
    @orchestration
    async def impatient() -> str:
        import asyncio

        try:
            return await asyncio.wait_for(step("a"), 5)
        except TimeoutError:
            return await step("b")

    run = Driver(impatient)
    run.start()
    run.turn(run.fired())
    outcome = run.turn(run.completed(2, "late"), run.failed(2))

    assert [type(event).__name__ for event in outcome.delta] == ["ActivityCompleted"]
    assert len(outcome.ignored) == 1

    run.turn(run.completed("step", "B"))

    assert run.result == "B"


def test_a_message_without_a_source_is_nondeterminism():
    run = Driver(code)
    run.start()

    with pytest.raises(Nondeterminism, match="no step"):
        run.turn(run.completed(77, "x"))


@pytest.mark.parametrize(("kind", "fields", "family"), WRONG)
def test_a_message_of_the_wrong_family_is_nondeterminism(kind, fields, family):
    run = Driver(code)
    run.start()
    source = id_of(run.history, family)
    own = {"instance_id": "i", "execution_id": 1}
    item = {
        events.ActivityCompleted: work.ActivityCompleted(**own, activity_id=source),
        events.ActivityFailed: work.ActivityFailed(**own, activity_id=source, failure=FAILURE),
        events.TimerFired: work.TimerFired(**own, timer_id=source, fire_at_ms=1),
        events.SubOrchestrationCompleted: work.SubOrchCompleted(
            **own, event_id=source, child_instance_id="c"
        ),
        events.SubOrchestrationFailed: work.SubOrchFailed(
            **own, event_id=source, child_instance_id="c", failure=FAILURE
        ),
    }[kind]

    with pytest.raises(Nondeterminism):
        run.turn(item)


def test_after_an_error_the_execution_is_dead():
    run = Driver(code)
    run.start()
    with pytest.raises(Nondeterminism):
        run.turn(run.completed(77, "x"))

    with pytest.raises(InternalError):
        run.turn(run.completed(3, "x"))


def test_a_duplicate_start_is_ignored():
    run = Driver(code)
    first = run.start(work.StartOrchestration(instance_id="i", name="code"))

    assert not first.ignored

    outcome = run.turn(work.StartOrchestration(instance_id="i", name="code"))

    assert outcome.delta == []
    assert len(outcome.ignored) == 1


def test_arguments_that_do_not_fit_are_told_before_anything_runs():
    @orchestration
    async def typed(count: int) -> int:
        return count

    execution = Execution.begin(typed, started(typed, "many"), codec=JSON)

    with pytest.raises(PayloadError, match="arguments \\(count\\) of orchestration 'typed'"):
        execution.run_turn([], START_MS)
    execution.close()


def test_a_result_that_does_not_fit_is_told_and_the_instance_stays_intact():
    run = Driver(code)
    run.start()
    source = id_of(run.history, "activity")

    with pytest.raises(PayloadError, match="result of activity 'step'"):
        run.turn(run.completed(source, 5))

    run.restart()
    run.turn(run.completed(source, "fine"))


def test_the_outcome_of_a_turn_depends_on_nothing_but_its_input():
    history = base()
    inbox = [work.ExternalRaised(instance_id="i", name="x", data=raw("y"))]
    outcomes = [
        plain(run_turn(code, history, inbox, kv={}, now_ms=START_MS + 5, codec=JSON))
        for _ in range(3)
    ]

    assert outcomes[0] == outcomes[1] == outcomes[2]
