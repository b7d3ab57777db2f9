"""Sub-orchestrations and detached starts: ids, results, failures, parent-close policy."""

import asyncio
from typing import Any

import msgspec
import pytest
from engine_driver import Driver

from perdure import activity, continue_as_new, current, limits, orchestration, start_detached
from perdure.errors import (
    InvalidValue,
    OrchestrationCancelled,
    OrchestrationFailed,
    OrchestrationTerminated,
    PayloadError,
)
from perdure.model import events
from perdure.model.failures import Category


@activity
def work(label: str) -> str:
    return label


@orchestration
async def child(label: str) -> str:
    return await work(label)


def test_calling_an_orchestration_starts_a_child_and_gives_its_result():
    @orchestration
    async def code() -> str:
        return await child("a")

    run = Driver(code)
    outcome = run.start()

    assert [c.child_instance_id for c in outcome.children] == ["i::1.2"]

    run.turn(run.child_completed("child", "A"))

    assert run.result == "A"


@pytest.mark.parametrize("begin", [child, lambda label: start_detached(child, label)])
def test_arguments_that_do_not_fit_are_an_error_of_the_call(begin):
    @orchestration
    async def code() -> str:
        try:
            begin(5)
        except PayloadError as error:
            return await work(str(error))
        return "began"

    run = Driver(code)  # which replays every turn as well
    outcome = run.start()
    assert not outcome.children
    assert not outcome.detached
    run.turn(run.completed("work", "told"))

    assert run.result == "told"


@pytest.mark.parametrize("called", [child, work])
def test_a_recorded_call_is_not_checked_against_the_annotation_of_today(called):
    async def body() -> str:
        return await called("a")

    async def fn(label: list[Any]) -> str:
        return str(label)

    changed = (orchestration if called is child else activity)(name=called.name)(fn)

    async def body_now() -> str:
        return await changed("a")  # type: ignore[arg-type]

    run = Driver(orchestration(name="code")(body))
    run.start()
    execution = run.replay(orchestration(name="code")(body_now))

    assert not execution.is_finished
    execution.close()


def test_an_explicit_id_and_version_are_used_as_they_are():
    @orchestration
    async def code() -> str:
        return await child.options(id="other", version="2.0.0")("a")

    run = Driver(code)
    outcome = run.start()

    assert outcome.children[0].child_instance_id == "other"
    assert outcome.children[0].version == "2.0.0"


def test_an_automatic_id_stays_within_the_limit():
    @orchestration
    async def code() -> str:
        return await child("a")

    run = Driver(code, instance_id="p" * limits.ID_CHARACTERS_MAX)
    outcome = run.start()
    child_id = outcome.children[0].child_instance_id

    assert len(child_id) == limits.ID_CHARACTERS_MAX
    assert child_id.endswith("::1.2")


@pytest.mark.parametrize(
    ("category", "error"),
    [
        (Category.APPLICATION, OrchestrationFailed),
        (Category.POISON, OrchestrationFailed),
        (Category.CANCELLED, OrchestrationCancelled),
        (Category.TERMINATED, OrchestrationTerminated),
    ],
)
def test_a_child_that_did_not_complete_raises_by_what_happened(category, error):
    @orchestration
    async def code() -> str:
        try:
            return await child("a")
        except error as failure:
            return f"{failure.type_name}: {failure.message}"

    run = Driver(code)
    run.start()
    run.turn(run.child_failed("child", category, "gone"))

    assert run.result == "ValueError: gone"


def test_a_child_that_is_given_up_is_cancelled():
    @orchestration
    async def code() -> str:
        try:
            return await asyncio.wait_for(child("a"), 5)
        except TimeoutError:
            return await work("b")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.fired())

    assert outcome.cancelled_children == ["i::1.2"]
    assert "SubOrchestrationCancelRequested" in run.kinds()


def test_a_child_that_was_never_sent_is_not_recalled():
    @orchestration
    async def code() -> str:
        child("a").cancel()
        work("b")
        child("c")
        return "done"

    run = Driver(code)
    outcome = run.start()

    assert run.result == "done"
    assert [*outcome.children, *outcome.activities, *outcome.cancelled_children] == []
    assert run.kinds().count("SubOrchestrationScheduled") == 2


def test_open_children_are_cancelled_when_the_parent_ends():
    @orchestration
    async def code() -> str:
        child("a")
        child.options(on_parent_close="abandon")("b")
        return await work("c")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.completed("work", "C"))

    assert outcome.cancelled_children == ["i::1.2"]


def test_an_abandoned_child_of_the_last_turn_is_still_started():
    @orchestration
    async def code() -> str:
        child.options(on_parent_close="abandon", id="stays")("b")
        child("a")
        return "done"

    run = Driver(code)
    outcome = run.start()

    assert [c.child_instance_id for c in outcome.children] == ["stays"]


def test_nesting_is_bounded():
    @orchestration
    async def code() -> str:
        return await child("a")

    run = Driver(code, depth=limits.CHILD_DEPTH_MAX)
    run.start()

    assert "at most 100 are allowed" in run.result


def test_the_parent_is_known_to_the_child():
    @orchestration
    async def code() -> str:
        parent = current().parent
        assert parent is not None
        return f"{parent.instance_id}/{parent.execution_id}/{parent.event_id}"

    run = Driver(code, parent_instance_id="p", parent_execution_id=3, parent_event_id=7)
    run.start()

    assert run.result == "p/3/7"


def test_a_detached_start_has_an_id_and_no_way_back():
    @orchestration
    async def code() -> list[str]:
        return [
            start_detached(child, "a"),
            start_detached(child, label="b", id="named", version="1.2.3", delay=2.5),
        ]

    run = Driver(code)
    outcome = run.start()

    assert run.result == ["i::1.2", "named"]
    assert [(d.target_instance_id, d.version, d.delay_ms) for d in outcome.detached] == [
        ("i::1.2", None, 0),
        ("named", "1.2.3", 2500),
    ]


def test_a_detached_start_takes_an_orchestration():
    @orchestration
    async def code() -> str:
        try:
            return start_detached(work, "a")
        except InvalidValue as error:
            return str(error)

    run = Driver(code)
    run.start()

    assert run.result.startswith("start_detached() takes an orchestration, not <activity 'work'")


def test_a_detached_start_is_sent_when_the_turn_continues_as_new():
    @orchestration
    async def code() -> None:
        start_detached(child, "a", id="d")
        continue_as_new()

    run = Driver(code)
    outcome = run.start()

    assert isinstance(outcome.end, events.OrchestrationContinuedAsNew)
    assert [d.target_instance_id for d in outcome.detached] == ["d"]


def test_a_detached_start_is_sent_when_the_turn_is_cancelled():
    @orchestration
    async def code() -> None:
        try:
            await work("a")
        finally:
            start_detached(child, "a", id="d")

    run = Driver(code)
    run.start()
    outcome = run.turn(run.cancel())

    assert [d.target_instance_id for d in outcome.detached] == ["d"]


def test_the_result_of_a_given_up_child_is_kept_in_history_and_not_seen_by_the_code():
    @orchestration
    async def code() -> str:
        step = child("a")
        await asyncio.sleep(1)
        step.cancel()
        return await work("b")

    run = Driver(code)
    run.start()
    run.turn(run.fired())
    outcome = run.turn(run.child_completed(2, "too late"))

    assert [type(e).__name__ for e in outcome.delta] == ["SubOrchestrationCompleted"]

    run.turn(run.completed("work", "B"))

    assert run.result == "B"


def test_the_answer_of_another_instance_does_not_complete_a_child():
    @orchestration
    async def code() -> str:
        return await child("a")

    run = Driver(code)
    run.start()
    genuine = run.child_completed("child", "A")

    outcome = run.turn(msgspec.structs.replace(genuine, child_instance_id="forger"))

    assert "the child is 'i::1.2'" in outcome.ignored[0]
    run.turn(genuine)
    assert run.result == "A"
