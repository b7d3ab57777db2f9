"""The same history under edited code: every change that matters is reported, none is guessed."""

import asyncio
import contextlib

import msgspec
import pytest
from engine_driver import Driver

from perdure import (
    activity,
    continue_as_new,
    next_message,
    orchestration,
    set_custom_status,
    side_effect,
    start_detached,
    state,
    wait_for_event,
)
from perdure.errors import Nondeterminism
from perdure.model.failures import Block, BlockReason


@activity
def work(label: str) -> str:
    return label


@activity
def other(label: str) -> str:
    return label


@orchestration
async def child(label: str) -> str:
    return await work(label)


@orchestration
async def sibling(label: str) -> str:
    return await work(label)


def named(code):
    return orchestration(name="code")(code)


def history_of(code, *, complete=True) -> Driver:
    """A run of the code in which every activity is completed, up to the third turn."""
    run = Driver(named(code))
    run.start()
    for _ in range(2):
        open_ids = [
            e.event_id for e in run.history
            if type(e).__name__ == "ActivityScheduled" and e.event_id in run.open_ids()
        ]  # fmt: skip
        if complete and open_ids and not run.execution.is_finished:
            run.turn(*(run.completed(event_id, f"r{event_id}") for event_id in open_ids))
    return run


def mismatch(run: Driver, code) -> Nondeterminism:
    with pytest.raises(Nondeterminism) as caught:
        run.replay(named(code)).close()
    return caught.value


async def three_steps() -> str:
    await work("a")
    await work("b")
    return await work("c")


async def step_added() -> str:
    await work("a")
    await other("new")
    await work("b")
    return await work("c")


async def step_added_at_the_end_of_a_turn() -> str:
    await work("a")
    other("new")
    await work("b")
    return await work("c")


async def step_dropped() -> str:
    await work("a")
    return await work("c")


async def steps_swapped() -> str:
    await work("b")
    await work("a")
    return await work("c")


async def step_renamed() -> str:
    await work("a")
    await other("b")
    return await work("c")


async def input_changed() -> str:
    await work("a")
    await work("B")
    return await work("c")


async def kind_changed() -> str:
    await work("a")
    await asyncio.sleep(5)
    return await work("c")


async def tag_added() -> str:
    await work("a")
    await work.options(tag="gpu")("b")
    return await work("c")


async def session_added() -> str:
    await work("a")
    await work.options(session="s")("b")
    return await work("c")


async def finished_early() -> str:
    await work("a")
    return "early"


async def raises_early() -> str:
    await work("a")
    raise ValueError("early")


async def continues_early() -> None:
    await work("a")
    continue_as_new()


async def asked_earlier() -> str:
    await work("a")
    second = work("b")
    third = work("c")
    await second
    return await third


async def moved_into_a_branch() -> str:
    await work("a")
    await asyncio.gather(branch("b"))
    return await work("c")


async def branch(label: str) -> str:
    return await work(label)


@pytest.mark.parametrize(
    "edited",
    [
        step_added,
        step_added_at_the_end_of_a_turn,
        step_dropped,
        steps_swapped,
        step_renamed,
        input_changed,
        kind_changed,
        tag_added,
        session_added,
        finished_early,
        raises_early,
        continues_early,
        asked_earlier,
        moved_into_a_branch,
    ],
)
def test_a_changed_sequence_is_a_mismatch(edited):
    run = history_of(three_steps)

    error = mismatch(run, edited)

    assert "turn" in str(error)
    assert "What to do" in error.report


def test_a_removed_first_step_is_a_mismatch():
    async def shorter() -> str:
        return await work("b")

    run = history_of(three_steps)

    assert 'history says 0/1  activity work("a")' in str(mismatch(run, shorter))


def test_code_that_waits_where_history_went_on_is_a_mismatch():
    async def waits() -> str:
        await work("a")
        await wait_for_event("x")
        return await work("b")

    run = history_of(three_steps)

    mismatch(run, waits)


def test_code_that_goes_on_where_history_ended_is_a_mismatch():
    async def one() -> str:
        return await work("a")

    async def two() -> str:
        await work("a")
        return await work("b")

    run = history_of(one)

    assert run.execution.is_finished
    assert "history says end  return" in str(mismatch(run, two))


def test_another_result_than_recorded_is_a_mismatch():
    async def one() -> str:
        return await work("a")

    async def changed() -> str:
        return "<" + await work("a") + ">"

    mismatch(history_of(one), changed)


@pytest.mark.parametrize(
    "changed", [(("b",), None), (("a",), "2.0.0"), (("a", "b"), None), ((), None)], ids=str
)
def test_another_continuation_than_recorded_is_a_mismatch(changed):
    def continuing(args, version):
        async def code(one: str = "", two: str = "") -> None:
            await work("a")
            continue_as_new(*args, version=version)

        return code

    run = history_of(continuing(("a",), None))

    assert run.execution.is_finished
    run.replay(named(continuing(("a",), None))).close()
    mismatch(run, continuing(*changed))


def test_a_longer_delay_is_harmless():
    async def short() -> str:
        await asyncio.sleep(5)
        return "x"

    async def long() -> str:
        await asyncio.sleep(50)
        return "x"

    run = history_of(short)

    run.replay(named(long)).close()


def test_other_retry_and_timeout_options_are_harmless():
    async def plain() -> str:
        return await work("a")

    async def bounded() -> str:
        return await work.options(timeout=5)("a")

    run = history_of(plain, complete=False)

    run.replay(named(bounded)).close()


def test_another_spelling_of_the_same_arguments_is_harmless():
    async def positional() -> str:
        return await work("a")

    async def keyword() -> str:
        return await work(label="a")

    run = history_of(positional, complete=False)

    run.replay(named(keyword)).close()


async def _status(value):
    set_custom_status(value)
    await work("a")


async def _state(key, value):
    state[key] = value
    await work("a")


async def _state_kept():
    await work("a")


async def _state_deleted(key):
    state["k"] = 1
    state["l"] = 1
    del state[key]
    await work("a")


async def _state_cleared():
    state["k"] = 1
    state["l"] = 1
    state.clear()
    await work("a")


async def _waits(name):
    await asyncio.gather(wait_for_event(name), work("a"))


async def _dequeues(name):
    await asyncio.gather(next_message(name), work("a"))


async def _child(definition, label):
    await asyncio.gather(definition(label), work("a"))


async def _detached(definition, label, target):
    start_detached(definition, label, id=target)
    await work("a")


async def _effect():
    side_effect(lambda: 1)
    await work("a")


def call(function, *args):
    async def code():
        await function(*args)

    return code


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (call(_status, "one"), call(_status, "two")),
        (call(_status, "one"), call(_status, None)),
        (call(_status, "one"), call(_state_kept)),
        (call(_state_kept), call(_status, "one")),
        (call(_state, "k", 1), call(_state, "k", 2)),
        (call(_state, "k", 1), call(_state, "k", True)),
        (call(_state, "k", 1), call(_state, "l", 1)),
        (call(_state, "k", 1), call(_state_kept)),
        (call(_state_kept), call(_state, "k", 1)),
        (call(_state_deleted, "k"), call(_state_deleted, "l")),
        (call(_state_deleted, "k"), call(_state_cleared)),
        (call(_waits, "x"), call(_waits, "y")),
        (call(_waits, "x"), call(_dequeues, "x")),
        (call(_dequeues, "x"), call(_dequeues, "y")),
        (call(_child, child, "a"), call(_child, child, "b")),
        (call(_child, child, "a"), call(_child, sibling, "a")),
        (call(_child, child.options(id="c"), "a"), call(_child, child.options(id="d"), "a")),
        (call(_child, child, "a"), call(_child, work, "a")),
        (call(_detached, child, "a", "t"), call(_detached, child, "b", "t")),
        (call(_detached, child, "a", "t"), call(_detached, sibling, "a", "t")),
        (call(_detached, child, "a", "t"), call(_detached, child, "a", "u")),
        (call(_detached, child, "a", "t"), call(_state_kept)),
        (call(_effect), call(_state_kept)),
        (call(_state_kept), call(_effect)),
    ],
)
def test_every_kind_of_decision_is_compared(then, now):
    run = history_of(then, complete=False)

    run.replay(named(then)).close()
    mismatch(run, now)


def test_a_step_inserted_in_one_branch_leaves_its_sibling_intact():
    def make(extra: bool):
        async def first() -> str:
            await work("f1")
            if extra:
                await other("inserted")
            return await work("f2")

        async def second() -> str:
            await work("s1")
            return await work("s2")

        async def code() -> list[str]:
            return list(await asyncio.gather(first(), second()))

        return named(code)

    run = Driver(make(extra=False))
    run.start()
    run.turn(run.completed(3, "S1"))  # only the second branch has moved on

    run.handler = make(extra=True)
    run.restart()
    run.turn(run.completed(2, "F1"))
    run.turn(run.completed("other", "O"), run.completed(5, "S2"))
    run.turn(run.completed("work", "F2"))

    assert run.result == ["F2", "S2"]


def test_a_step_that_is_no_longer_given_up_is_a_mismatch():
    async def gives_up() -> str:
        step = work("a")
        await asyncio.sleep(0)
        step.cancel()
        return await other("b")

    async def keeps() -> str:
        work("a")
        await asyncio.sleep(0)
        return await other("b")

    mismatch(history_of(gives_up, complete=False), keeps)


def test_a_step_that_is_given_up_only_now_is_a_mismatch():
    async def keeps() -> str:
        work("a")
        return await other("b")

    async def gives_up() -> str:
        work("a").cancel()
        return await other("b")

    error = mismatch(history_of(keeps, complete=False), gives_up)

    assert "the code did cancel 2  give up step 2" in str(error)


def test_a_step_that_is_given_up_as_before_is_no_part_of_the_report():
    def make(label):
        async def code() -> str:
            await work("a")
            step = work("b")
            await asyncio.sleep(0)
            step.cancel()
            return await other(label)

        return code

    error = mismatch(history_of(make("c"), complete=True), make("d"))

    assert "give up" not in str(error).partition("\n")[0]
    assert not [line for line in error.mismatch.diff if line[0] in "+-" and "give up" in line]


def test_the_report_shows_both_places_a_diff_and_the_cure():
    run = history_of(three_steps)

    report = mismatch(run, step_renamed).report

    assert 'history says  0/2  activity work("b")  at test_code_edits.py:' in report
    assert 'the code did  0/2  activity other("b")  at test_code_edits.py:' in report
    assert "--- history, turn 2" in report
    assert '-0/2  activity work("b")' in report
    assert '+0/2  activity other("b")' in report
    assert "patched(" in report
    assert "version=" in report


def test_an_instance_goes_on_when_the_change_is_reverted():
    run = history_of(three_steps)
    mismatch(run, step_added)

    run.restart()
    run.turn(run.completed("work", "C"))

    assert run.result == "C"


def test_a_mismatch_is_reported_even_if_the_code_swallows_everything():
    async def swallows() -> str:
        with contextlib.suppress(BaseException):
            await other("x")
        return await work("a")

    async def plain() -> str:
        return await work("a")

    mismatch(history_of(plain), swallows)


def test_the_difference_is_shown_even_late_in_a_turn_of_thousands():
    def make(changed: int):
        async def code() -> None:
            steps = [work("B" if n == changed else "b") for n in range(3000)]
            await asyncio.gather(*steps)

        return named(code)

    run = Driver(make(-1), is_checked=False)
    run.start()

    with pytest.raises(Nondeterminism) as caught:
        run.replay(make(2500))

    assert '+0/2501  activity work("B")' in caught.value.report
    assert ' 0/2499  activity work("b")' in caught.value.report
    assert caught.value.report.count("\n") < 40


def test_a_mismatch_is_a_record_with_both_sides_and_their_place():
    found = mismatch(history_of(three_steps), step_renamed).mismatch

    assert found.recorded.startswith('0/2  activity work("b")  at test_code_edits.py:')
    assert found.performed.startswith('0/2  activity other("b")  at test_code_edits.py:')
    assert found.performed.endswith(found.site)
    assert (found.event_id, found.turn, found.orchestration) == (4, 2, "code")
    assert any(line.startswith("+0/2  activity other") for line in found.diff)


def test_a_step_beyond_the_recorded_ones_names_no_recorded_event():
    async def one() -> str:
        return await other("b")

    async def one_and_more() -> str:
        waiting = other("b")
        work("new")
        return await waiting

    found = mismatch(history_of(one, complete=False), one_and_more).mismatch

    assert found.event_id is None
    assert found.recorded == "nothing more in this turn"
    assert found.performed.startswith('0/2  activity work("new")')


def test_a_new_start_without_an_id_is_reported_as_one_whose_id_is_automatic():
    async def one() -> str:
        return await work("a")

    async def starts() -> str:
        start_detached(child, "a")
        return await child("a")

    report = mismatch(history_of(one, complete=False), starts).report

    assert report.count("as '(automatic)'") >= 2


def test_steps_of_callbacks_and_of_the_engine_are_reported_after_those_of_branches():
    def make(first, second):
        async def code() -> None:
            asyncio.get_running_loop().call_soon(other, first)
            try:
                await work("a")
            finally:
                await work(second)

        return code

    run = Driver(named(make("b", "c")))
    run.start()
    run.turn(run.cancel())

    found = mismatch(run, make("B", "c")).mismatch
    assert (found.turn, found.recorded[:22]) == (1, 'c/1  activity other("b')
    found = mismatch(run, make("b", "C")).mismatch
    assert found.recorded.startswith('0/2  activity work("c")')
    assert found.diff[-1] == " cancel/1  timer"


def test_a_block_keeps_a_mismatch_and_reads_the_text_of_older_stores():
    error = mismatch(history_of(three_steps), step_renamed)
    block = Block(
        reason=BlockReason.NONDETERMINISM, message=str(error), detail=error.mismatch, code="c"
    )
    older = b'{"reason":"nondeterminism","message":"m","detail":"The code does not repeat"}'

    again = msgspec.json.decode(msgspec.json.encode(block), type=Block)

    assert again == block
    assert str(again.detail) == error.report
    assert msgspec.json.decode(older, type=Block).detail == "The code does not repeat"
