"""State, status, time, randomness, side effects and patches: the same on every replay."""

import asyncio
import datetime
import logging

import pytest
from engine_driver import START_MS, Driver

from perdure import (
    activity,
    continue_as_new,
    current,
    limits,
    now,
    orchestration,
    patched,
    random,
    set_custom_status,
    side_effect,
    state,
    uuid4,
)
from perdure.errors import InvalidValue, PayloadError, UsageError


@activity
def work(label: str) -> str:
    return label


def writes_of(outcome):
    return [(getattr(e, "key", None), getattr(e, "value", None)) for e in outcome.kv_writes]


def test_state_is_a_mapping_that_is_written_with_the_turn():
    @orchestration
    async def code() -> list[object]:
        state["a"] = {"n": 1}
        state.set("b", [2])
        before = [state["a"], state.get("b", list[int]), state.get("x", int, 7), len(state)]
        del state["a"]
        state.delete("missing")
        return [*before, "a" in state, list(state), state.items()]

    run = Driver(code)
    outcome = run.start()

    assert run.result == [{"n": 1}, [2], 7, 2, False, ["b"], [["b", [2]]]]
    assert writes_of(outcome) == [("a", '{"n":1}'), ("b", "[2]"), ("a", None)]


def test_a_default_in_the_place_of_the_type_is_refused():
    @orchestration
    async def code() -> list[object]:
        said = ""
        try:
            state.get("n", 0)
        except UsageError as error:
            said = str(error)
        return [state.get("n", default=0), said]

    run = Driver(code)
    run.start()

    assert run.result[0] == 0
    assert "write state.get('n', default=0)" in run.result[1]


def test_state_begins_with_what_earlier_executions_left():
    @orchestration
    async def code() -> int:
        count: int = state.get("count", int, 0)
        state["count"] = count + 1
        await work("a")
        return state["count"]

    run = Driver(code, kv={"count": "41"})
    run.start()
    run.restart()
    run.turn(run.completed("work", ""))

    assert run.result == 42


def test_clearing_the_state_is_one_write():
    @orchestration
    async def code() -> list[str]:
        state["b"] = 1
        state.clear()
        state["c"] = 1
        return state.keys()

    run = Driver(code, kv={"a": "1"})
    outcome = run.start()

    assert run.result == ["c"]
    assert writes_of(outcome)[1] == (None, None)


def test_a_missing_key_is_a_key_error():
    @orchestration
    async def code() -> str:
        seen = []
        for act in (lambda: state["x"], lambda: state.__delitem__("x")):
            try:
                act()
            except KeyError:
                seen.append("missing")
        return " ".join(seen)

    run = Driver(code)
    run.start()

    assert run.result == "missing missing"


def test_limits_of_the_state_are_errors_at_the_call_and_record_nothing():
    @orchestration
    async def code() -> list[str]:
        refused: list[str] = []
        state["fits"] = "x" * (limits.KV_VALUE_BYTES_MAX - 2)
        for key, value in (("big", "x" * limits.KV_VALUE_BYTES_MAX), ("", 1), ("bad", {1j})):
            try:
                state[key] = value
            except (InvalidValue, PayloadError) as error:
                refused.append(type(error).__name__)
        return refused

    run = Driver(code)
    outcome = run.start()

    assert run.result == ["InvalidValue", "InvalidValue", "PayloadError"]
    assert len(outcome.kv_writes) == 1


def test_the_number_of_keys_counts_all_turns_and_executions():
    @orchestration
    async def code() -> str:
        for number in range(limits.KV_KEYS_MAX - 2):
            state[f"k{number}"] = number
        await work("a")
        state["k0"] = "again"
        state["last"] = 1
        try:
            state["one too many"] = 1
        except InvalidValue as error:
            return str(error)
        return "no"

    run = Driver(code, kv={"old": "1"})
    run.start()
    run.turn(run.completed("work", ""))

    assert "at most 100 are allowed" in run.result


def test_the_last_status_of_a_turn_is_written():
    @orchestration
    async def code() -> object:
        before = current().status
        set_custom_status({"step": 1})
        set_custom_status("two")
        after = current().status
        await work("a")
        set_custom_status(None)
        return [before, after, current().status]

    run = Driver(code, initial_custom_status='"from before"')
    outcome = run.start()

    assert outcome.custom_status.status == '"two"'

    outcome = run.turn(run.completed("work", ""))

    assert outcome.custom_status.status is None
    assert run.result == ["from before", "two", None]


def test_a_status_over_the_limit_is_refused_at_the_call():
    @orchestration
    async def code() -> str:
        try:
            set_custom_status("x" * limits.CUSTOM_STATUS_BYTES_MAX)
        except InvalidValue:
            return "refused"
        return "no"

    run = Driver(code)
    outcome = run.start()

    assert run.result == "refused"
    assert outcome.custom_status is None


def test_now_is_the_time_of_the_turn_and_never_runs_backwards():
    @orchestration
    async def code() -> list[str]:
        first = now()
        await work("a")
        second = now()
        await work("b")
        return [first.isoformat(), second.isoformat(), now().isoformat()]

    run = Driver(code)
    run.start()
    run.turn(run.completed("work", ""), after_ms=1500)
    run.restart()
    run.turn(run.completed("work", ""), after_ms=-5000)

    begun = datetime.datetime.fromtimestamp(START_MS / 1000, datetime.UTC)
    later = (begun + datetime.timedelta(milliseconds=1500)).isoformat()
    assert run.result == [begun.isoformat(), later, later]


def test_random_values_follow_from_the_seed_and_the_branch():
    async def branch() -> list[object]:
        return [str(uuid4()), random(), random.randint(1, 1000), random.choice("abcdef")]

    @orchestration
    async def code() -> list[list[object]]:
        first = await asyncio.gather(branch(), branch())
        await work("a")
        return [*first, await branch()]

    runs = [Driver(code), Driver(code), Driver(code, seed="other")]
    for run in runs:
        run.start()
        run.turn(run.completed("work", ""))

    assert runs[0].result == runs[1].result
    assert runs[0].result != runs[2].result
    assert len({values[0] for values in runs[0].result}) == 3


def test_an_extra_draw_in_one_branch_does_not_disturb_its_sibling():
    def make(extra: bool):
        @orchestration
        async def code() -> list[float]:
            async def first() -> float:
                if extra:
                    random()
                return random()

            async def second() -> float:
                await asyncio.sleep(0)
                return random()

            return list(await asyncio.gather(first(), second()))

        return code

    results = []
    for extra in (False, True):
        run = Driver(make(extra))
        run.start()
        results.append(run.result)

    assert results[0][0] != results[1][0]
    assert results[0][1] == results[1][1]


def test_a_side_effect_is_called_once():
    calls: list[int] = []

    def read() -> int:
        calls.append(1)
        return len(calls)

    @orchestration
    async def code() -> int:
        value = side_effect(read)
        await work("a")
        return value

    run = Driver(code, is_checked=False)
    run.start()
    run.restart()
    run.turn(run.completed("work", ""))

    assert run.result == 1
    assert calls == [1]


def test_a_side_effect_may_read_a_file(tmp_path):
    path = tmp_path / "setting"
    path.write_text("on")

    @orchestration
    async def code() -> str:
        return side_effect(path.read_text, str)

    run = Driver(code)
    run.start()

    assert run.result == "on"


def test_an_exception_in_a_side_effect_ends_the_orchestration():
    def read() -> int:
        raise OSError("gone")

    @orchestration
    async def code() -> str:
        try:
            side_effect(read)
        except BaseException:
            await work("never")
        return "no"

    run = Driver(code)
    run.start()

    assert run.result == "OSError: gone"


def test_a_side_effect_that_failed_beside_open_steps_fails_again_on_replay():
    def read() -> int:
        raise OSError("gone")

    @orchestration
    async def code() -> int:
        step = work("a")
        await work("b")
        first = side_effect(lambda: 1)
        try:
            return first + side_effect(read)
        finally:
            step.cancel()

    run = Driver(code)
    run.start()
    run.turn(run.completed(3, "b"))

    assert run.result == "OSError: gone"
    assert run.kinds()[-2:] == ["ActivityCancelRequested", "OrchestrationFailed"]


def test_a_side_effect_cannot_schedule_steps():
    @orchestration
    async def code() -> str:
        return side_effect(lambda: work("plain"), str)

    run = Driver(code)
    outcome = run.start()

    assert run.result == "plain"
    assert not outcome.activities


def test_current_tells_who_is_running():
    @orchestration(version="1.2.3")
    async def code() -> list[object]:
        me = current()
        return [me.instance_id, me.execution_id, me.name, me.version, me.turn, me.is_replaying]

    run = Driver(code, execution_id=4, is_checked=False)
    run.start()

    assert run.result == ["i", 4, "code", "1.2.3", 1, False]


def test_the_logger_is_silent_while_replaying(caplog):
    @orchestration
    async def code() -> None:
        current().logger.info("before %s", "step", extra={"order": 1})
        await work("a")
        current().logger.warning("after")

    caplog.set_level(logging.INFO)
    run = Driver(code, is_checked=False)
    run.start()
    run.restart()
    run.turn(run.completed("work", ""))

    assert [record.getMessage() for record in caplog.records] == ["before step", "after"]
    record = caplog.records[0]
    assert (record.name, record.instance_id, record.order) == ("perdure.orchestration.code", "i", 1)
    assert record.funcName == "code"


def test_an_exception_in_a_logging_filter_does_not_reach_the_code(capsys):
    class Broken(logging.Filter):
        def filter(self, record):
            raise RuntimeError("broken filter")

    @orchestration(name="broken_logging")
    async def code() -> str:
        current().logger.error("x")
        return "fine"

    logger = logging.getLogger("perdure.orchestration.broken_logging")
    broken = Broken()
    logger.addFilter(broken)
    try:
        run = Driver(code)
        run.start()
    finally:
        logger.removeFilter(broken)

    assert run.result == "fine"
    assert "broken filter" in capsys.readouterr().err


def test_is_replaying_turns_false_only_after_the_last_recorded_step_was_passed():
    seen: list[tuple[str, bool]] = []

    @orchestration
    async def code() -> None:
        seen.append(("start", current().is_replaying))
        await work("a")
        seen.append(("after a", current().is_replaying))
        await work("b")
        seen.append(("after b", current().is_replaying))

    run = Driver(code, is_checked=False)
    run.start()
    run.turn(run.completed("work", ""))
    seen.clear()
    run.restart()
    run.turn(run.completed("work", ""))

    assert seen == [("start", True), ("after a", True), ("after b", False)]


def test_a_patch_is_taken_by_new_executions_and_remembered():
    @orchestration
    async def code() -> list[bool]:
        first = patched("p")
        await work("a")
        return [first, patched("p"), patched("q")]

    run = Driver(code)
    run.start()
    run.restart()
    run.turn(run.completed("work", ""))

    assert run.result == [True, True, True]
    assert run.kinds().count("PatchMarked") == 2


def test_a_patch_is_refused_to_an_execution_that_passed_before_it():
    @orchestration(name="code")
    async def old() -> str:
        await work("old")
        return await work("b")

    @orchestration(name="code")
    async def new() -> str:
        await work("new" if patched("p") else "old")
        answers = await work("b")
        return f"{answers} {patched('p')}"

    run = Driver(old)
    run.start()
    run.turn(run.completed("work", ""))
    run.execution.close()
    run.handler = new
    run.execution = run.replay()
    run.turn(run.completed("work", "B"))

    assert run.result == "B False"


def test_a_patch_may_be_cleaned_up_when_all_have_taken_it():
    @orchestration(name="code")
    async def guarded() -> str:
        await work("new" if patched("p") else "old")
        return await work("b")

    @orchestration(name="code")
    async def cleaned() -> str:
        await work("new")
        return await work("b")

    run = Driver(guarded)
    run.start()

    run.replay(cleaned).close()


def test_state_survives_a_continue_as_new_turn():
    @orchestration
    async def code(number: int) -> None:
        state["n"] = number
        set_custom_status(f"at {number}")
        continue_as_new(number + 1)

    run = Driver(code, 3)
    outcome = run.start()

    assert writes_of(outcome) == [("n", "3")]
    assert outcome.custom_status.status == '"at 3"'
    assert bytes(outcome.end.input) == b"[4]"


@pytest.mark.parametrize("name", ["", "x" * 300, "a\x00b"])
def test_bad_names_are_refused_at_the_call(name):
    @orchestration
    async def code() -> str:
        try:
            patched(name)
        except InvalidValue:
            return "refused"
        return "no"

    run = Driver(code)
    run.start()

    assert run.result == "refused"


def test_a_mutable_default_argument_is_new_in_every_replay():
    @orchestration
    async def code(count: int, got: list[int] = []) -> list[int]:  # noqa: B006
        for number in range(count):
            await asyncio.sleep(1)
            got.append(number)
        return got

    run = Driver(code, 3)
    run.start()
    while run.open_ids():
        run.restart()
        run.turn(run.fired())

    assert run.result == [0, 1, 2]


# --- a copy that is changed and not written


def appended() -> None:
    state["items"].append(1)


def changed_in_a_variable() -> None:
    items = state["items"]
    items.append(1)


def changed_inside() -> None:
    state["cart"]["items"].append(1)


def typed() -> None:
    state.get("items", list[int]).append(1)


@pytest.mark.parametrize("change", [appended, changed_in_a_variable, changed_inside, typed])
def test_a_value_of_state_that_is_changed_and_not_written_is_told(change):
    @orchestration
    async def code() -> None:
        state["items"], state["cart"] = [], {"items": []}
        change()
        await asyncio.sleep(1)

    run = Driver(code)
    (line,) = run.start().mistakes
    assert line.startswith("state['")
    assert "was read at test_state_and_values.py:" in line
    assert run.turn(run.fired()).mistakes == ()


def test_a_value_of_state_that_is_written_back_or_only_read_is_not_told():
    @orchestration
    async def code() -> int:
        state["items"] = []
        items = state["items"]
        items.append(1)
        await asyncio.sleep(1)
        state["items"] = items
        copy = list(state["items"])
        copy.append(2)
        for key, value in state.items():
            assert (key, value) == ("items", [1])
        return len(state["items"])

    run = Driver(code)
    run.start()
    run.turn(run.fired())
    assert run.result == 1
    assert [outcome.mistakes for outcome in run.outcomes] == [(), ()]
