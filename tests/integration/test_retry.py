"""A retry goes on from where an instance failed: finished steps stay finished, keys stay equal."""

import asyncio
from collections import defaultdict

import msgspec
import pytest

from integration.conditions import reached, until, waiting
from patience import HANG_SECONDS
from perdure import (
    Activity,
    Client,
    Orchestration,
    Retry,
    Runtime,
    RuntimeOptions,
    Status,
    activity,
    activity_info,
    next_message,
    orchestration,
    set_custom_status,
    start_detached,
    state,
    wait_for_event,
)
from perdure.client.rerun import rerun
from perdure.client.retry import retry
from perdure.errors import (
    InstanceFinished,
    InstanceStillRunning,
    InvalidValue,
    OrchestrationFailed,
)
from perdure.model import events, work
from perdure.model.wire import envelope

KEYS = defaultdict(list)
"""The idempotency keys of the attempts of each activity."""
BROKEN = set()
"""Names of activities and of code that fail while they are in here."""


@pytest.fixture(autouse=True)
def fresh():
    KEYS.clear()
    BROKEN.clear()


def open_runtime(store, **settings):
    handlers = [each for each in globals().values() if isinstance(each, (Activity, Orchestration))]
    return Runtime(store, handlers, options=RuntimeOptions(**settings))


@pytest.fixture(params=["memory:", "sqlite", "file"])
def runtime_of(request, replays, tmp_path):
    """A function that opens a runtime for the handlers of this module."""
    stores = {"sqlite": f"{tmp_path}/store.db", "file": f"file:{tmp_path}/store"}
    store = stores.get(request.param, request.param)
    return lambda: open_runtime(store, always_replay=replays)


def note(name):
    KEYS[name].append(activity_info().idempotency_key)
    if name in BROKEN:
        raise ValueError(f"{name} is broken")
    return name


@activity
async def charge() -> str:
    return note("charge")


@activity(retry=Retry(max_attempts=2, first_delay=0.001))
async def ship() -> str:
    return note("ship")


@activity
async def mail() -> str:
    return note("mail")


def bug(name):
    if name in BROKEN:
        raise TypeError(f"{name} has a bug")


@orchestration
async def buggy() -> str:
    state["paid"] = await charge()
    bug("buggy")
    state["sent"] = await ship()
    return f"{state['paid']} {state['sent']}"


async def failed(runtime, flow, instance_id="o-1"):
    handle = await runtime.start(flow, id=instance_id)
    with pytest.raises(OrchestrationFailed):
        await handle.result(HANG_SECONDS)
    BROKEN.clear()
    return handle


async def test_a_bug_in_the_code_repeats_no_finished_step(runtime_of):
    BROKEN.add("buggy")
    async with runtime_of() as runtime:
        handle = await failed(runtime, buggy)

        said = await retry(runtime.provider, "o-1", runtime.clock)

        assert await handle.result(HANG_SECONDS) == "charge ship"
        assert (said.execution_id, said.finished, said.again) == (1, 1, ())
        kinds = [type(event).__name__ for event in await handle.history()]
    assert len(KEYS["charge"]) == 1
    assert kinds.index("OrchestrationFailed") + 1 == kinds.index("OrchestrationRetried")


async def test_a_rerun_counts_the_finished_steps_of_an_undone_turn(tmp_path):
    BROKEN.add("buggy")
    async with open_runtime(f"{tmp_path}/store.db") as runtime:
        await failed(runtime, buggy)

    async with Client(f"{tmp_path}/store.db") as client:
        await retry(client.provider, "o-1", client.clock)
        copied = await rerun(client.provider, "o-1", "o-2")

    assert copied.steps_again == 1


async def test_a_failed_step_runs_again_with_its_key_and_its_retries(runtime_of):
    BROKEN.add("ship")
    async with runtime_of() as runtime:
        handle = await failed(runtime, buggy)
        BROKEN.add("ship")
        said = await retry(runtime.provider, "o-1", runtime.clock)
        with pytest.raises(OrchestrationFailed):
            await handle.result(HANG_SECONDS)
        BROKEN.clear()
        await retry(runtime.provider, "o-1", runtime.clock)

        assert await handle.result(HANG_SECONDS) == "charge ship"
    assert said.again == ("ship",)
    assert len(KEYS["charge"]) == 1
    assert len(KEYS["ship"]) == 5
    assert len(set(KEYS["ship"])) == 1


@orchestration
async def states() -> str:
    state["a"] = "old"
    set_custom_status("old")
    await charge()
    state["a"] = "new"
    state["b"] = "new"
    set_custom_status("new")
    bug("states")
    return f"{await wait_for_event('go', str)} {await mail()}"


async def test_state_status_and_open_steps_are_those_of_the_kept_turns(tmp_path):
    store = f"{tmp_path}/store.db"
    BROKEN.add("states")
    async with open_runtime(store) as runtime:
        await failed(runtime, states)
    async with Client(store) as client:
        before = await client.state("o-1", "a"), await client.state("o-1", "b")

        await retry(client.provider, "o-1", client.clock)

        info = await client.describe("o-1")
        after = await client.state("o-1", "a"), await client.state("o-1", "b")
    async with open_runtime(store) as runtime:
        await runtime.raise_event("o-1", "go", "on")
        assert await runtime.get("o-1").result(HANG_SECONDS) == "on mail"
        assert await runtime.state("o-1", "b") == "new"
    assert (before, after) == (("new", "new"), ("old", None))
    assert (info.status, info.custom_status) == (Status.RUNNING, "old")
    assert [str(step) for step in info.waiting_for] == ["activity charge"]


@orchestration
async def branches() -> list[str]:
    async with asyncio.timeout(3600):
        return list(await asyncio.gather(charge(), wait_for_event("go", str), ship()))


async def test_steps_that_the_failure_gave_up_are_open_again(runtime_of):
    BROKEN.add("ship")
    async with runtime_of() as runtime:
        handle = await failed(runtime, branches)

        said = await retry(runtime.provider, "o-1", runtime.clock)
        await waiting(runtime, "o-1")
        await runtime.raise_event("o-1", "go", "on")

        assert await handle.result(HANG_SECONDS) == ["charge", "on", "ship"]
    assert said.again[-1:] == ("ship",)
    assert len(set(KEYS["charge"])) == 1


@orchestration
async def parent() -> str:
    return f"{await charge()} {await child()}"


@orchestration
async def child() -> str:
    paid = await mail()
    bug("child")
    return paid


async def test_a_failed_child_is_retried_with_its_parent(runtime_of):
    BROKEN.add("child")
    async with runtime_of() as runtime:
        handle = await failed(runtime, parent)

        said = await retry(runtime.provider, "o-1", runtime.clock)

        assert await handle.result(HANG_SECONDS) == "charge mail"
    assert said.again == ("child",)
    assert len(KEYS["charge"]) == len(KEYS["mail"]) == 1


async def test_two_operators_retry_an_instance_once(runtime_of, monkeypatch):
    BROKEN.add("child")
    async with runtime_of() as runtime:
        handle = await failed(runtime, parent)
        admin = runtime.provider.admin
        before = await admin.get_instance_info("o-1")
        await retry(runtime.provider, "o-1", runtime.clock)
        assert await handle.result(HANG_SECONDS) == "charge mail"
        history = await handle.history()

        async def an_earlier_look(_instance_id):
            return before

        monkeypatch.setattr(admin, "get_instance_info", an_earlier_look)
        with pytest.raises(InstanceFinished, match="has completed meanwhile"):
            await retry(runtime.provider, "o-1", runtime.clock)

        assert await handle.history() == history


async def test_an_instance_that_runs_again_is_not_retried_once_more(runtime_of, monkeypatch):
    BROKEN.add("waiter")
    async with runtime_of() as runtime:
        handle = await failed(runtime, waiter)
        admin = runtime.provider.admin
        before = await admin.get_instance_info("o-1")
        await retry(runtime.provider, "o-1", runtime.clock)
        await waiting(runtime, "o-1")

        async def an_earlier_look(_instance_id):
            return before

        with monkeypatch.context() as patched:
            patched.setattr(admin, "get_instance_info", an_earlier_look)
            with pytest.raises(InstanceStillRunning, match="running again"):
                await retry(runtime.provider, "o-1", runtime.clock)

        await handle.raise_event("go")
        assert await handle.result(HANG_SECONDS) == "charge"


async def test_a_child_that_was_retried_before_its_parent_gives_its_result(runtime_of):
    BROKEN.add("child")
    async with runtime_of() as runtime:
        handle = await failed(runtime, parent)
        (child_id,) = await runtime.provider.admin.list_children("o-1")
        await retry(runtime.provider, child_id, runtime.clock)
        assert await runtime.get(child_id).result(HANG_SECONDS) == "mail"

        await retry(runtime.provider, "o-1", runtime.clock)

        assert await handle.result(HANG_SECONDS) == "charge mail"
    assert len(KEYS["mail"]) == 1


@orchestration
async def waiter() -> str:
    done = await charge()
    bug("waiter")
    await wait_for_event("go")
    return done


@orchestration
async def first_turn() -> str:
    bug("first_turn")
    return await charge()


async def test_a_failure_of_the_first_turn_begins_the_next_execution(runtime_of):
    BROKEN.add("first_turn")
    async with runtime_of() as runtime:
        handle = await failed(runtime, first_turn)

        said = await retry(runtime.provider, "o-1", runtime.clock)

        assert await handle.result(HANG_SECONDS) == "charge"
    assert said.execution_id == 2


@orchestration
async def impatient() -> str:
    paid = await charge()
    async with asyncio.timeout(0.2):
        return f"{paid} {await wait_for_event('go', str)}"


async def test_a_timeout_gets_its_whole_time_again(tmp_path):
    store = f"{tmp_path}/store.db"
    async with open_runtime(store) as runtime:
        await failed(runtime, impatient)
    async with Client(store) as client:
        now_ms = client.clock.now_ms()

        await retry(client.provider, "o-1", client.clock)

        queued = await client.provider.admin.list_messages("o-1")
        await client.raise_event("o-1", "go", "on")
    (timer,) = [each for each in queued if each.message.timer is not None]
    assert timer.visible_at_ms >= now_ms + 200
    async with open_runtime(store) as runtime:
        await until(lambda: has_ended(runtime, "o-1"))
    assert len(KEYS["charge"]) == 1


@orchestration
async def starter() -> str:
    await charge()
    other = start_detached(mail_flow)
    bug("starter")
    return other


@orchestration
async def mail_flow() -> str:
    return await mail()


async def test_a_detached_start_of_an_undone_turn_is_not_repeated(runtime_of):
    BROKEN.add("starter")
    async with runtime_of() as runtime:
        handle = await failed(runtime, starter)

        await retry(runtime.provider, "o-1", runtime.clock)

        assert await runtime.get(await handle.result(HANG_SECONDS)).result(HANG_SECONDS) == "mail"
        assert await runtime.admin.count() == 2
    assert len(KEYS["mail"]) == 1


@orchestration
async def cleaner() -> str:
    try:
        paid = await charge()
        await wait_for_event("never", str)
        return paid
    finally:
        if "cleaner" in BROKEN:
            await mail()


async def test_a_cancelled_or_terminated_instance_goes_on(runtime_of):
    async with runtime_of() as runtime:
        for number, end in enumerate([runtime.cancel, runtime.terminate]):
            instance_id = f"o-{number}"
            await runtime.start(cleaner, id=instance_id)
            await until(lambda id_=instance_id: waits_for(runtime, id_, "event"))
            await end(instance_id)
            await until(lambda id_=instance_id: has_ended(runtime, id_))

            said = await retry(runtime.provider, instance_id, runtime.clock)
            await runtime.raise_event(instance_id, "never", "now")

            assert await runtime.get(instance_id).result(HANG_SECONDS) == "charge"
            assert said.finished == 1
    assert len(KEYS["charge"]) == 2


async def test_an_instance_whose_clean_up_took_steps_is_refused(runtime_of):
    BROKEN.add("cleaner")
    async with runtime_of() as runtime:
        await runtime.start(cleaner, id="o-1")
        await until(lambda: waits_for(runtime, "o-1", "event"))
        await runtime.cancel("o-1")
        await reached(runtime, "o-1", Status.CANCELLED)

        with pytest.raises(InvalidValue, match="perdure rerun starts it over"):
            await retry(runtime.provider, "o-1", runtime.clock)


async def test_a_history_without_room_for_a_retry_is_refused(runtime_of, monkeypatch):
    BROKEN.add("buggy")
    async with runtime_of() as runtime:
        handle = await failed(runtime, buggy)
        length = len(await handle.history())

        monkeypatch.setattr("perdure.client.retry.HISTORY_EVENTS_MAX", length + 1)
        with pytest.raises(InvalidValue, match=f"its history has {length} events"):
            await retry(runtime.provider, "o-1", runtime.clock)
        assert len(await handle.history()) == length

        monkeypatch.setattr("perdure.client.retry.HISTORY_EVENTS_MAX", length + 2)
        await retry(runtime.provider, "o-1", runtime.clock)
        await handle.result(HANG_SECONDS)


async def test_a_running_instance_is_refused(runtime_of):
    async with runtime_of() as runtime:
        await runtime.start(cleaner, id="o-1")
        await waiting(runtime, "o-1")
        with pytest.raises(InstanceStillRunning):
            await retry(runtime.provider, "o-1", runtime.clock)


async def waits_for(runtime, instance_id, kind):
    return [each.kind for each in (await runtime.describe(instance_id)).waiting_for] == [kind]


@orchestration
async def totalling(early: bool) -> int:
    await charge()
    total = await next_message("numbers", int)
    if early:
        await wait_for_event("go", str)
    return total + await next_message("numbers", int)


async def send_unchecked(runtime, *numbers):
    """Send messages as another process does, which does not know their type."""
    for number in numbers:
        item = work.QueueMessage(
            instance_id="o-1", name="numbers", data=msgspec.Raw(msgspec.json.encode(number))
        )
        await runtime.provider.enqueue_for_orchestrator(envelope(item))


@pytest.mark.parametrize("early", [True, False], ids=["before the failed turn", "in it"])
async def test_a_message_that_does_not_fit_can_be_left_out(runtime_of, early):
    async with runtime_of() as runtime:
        handle = await runtime.start(totalling, early, id="o-1")
        await until(lambda: waits_for(runtime, "o-1", "message"))
        if early:
            await send_unchecked(runtime, 1, "x")
            await until(lambda: waits_for(runtime, "o-1", "event"))
            await handle.raise_event("go", "on")
        else:
            await send_unchecked(runtime, 1, "x")
        with pytest.raises(OrchestrationFailed, match="got `str`"):
            await handle.result(HANG_SECONDS)

        again = await runtime.admin.retry("o-1")
        with pytest.raises(OrchestrationFailed, match="got `str`"):
            await handle.result(HANG_SECONDS)
        with pytest.raises(InvalidValue, match="received no event or message 'letters'"):
            await runtime.admin.retry("o-1", leave_out="letters")
        said = await runtime.admin.retry("o-1", leave_out="numbers")
        await handle.send_message("numbers", 2)

        assert await handle.result(HANG_SECONDS) == 3
        assert "numbers" in again.received
        assert not early or said.received == ("go",)
    assert len(KEYS["charge"]) == 1


@orchestration
async def one_number() -> int:
    return await next_message("numbers", int)


async def test_a_message_of_the_first_turn_can_be_left_out(tmp_path):
    async with Client(f"{tmp_path}/store.db") as client:
        await client.start("one_number", id="o-1")
        await client.send_message("o-1", "numbers", "x")
    async with open_runtime(f"{tmp_path}/store.db") as runtime:
        handle = runtime.get("o-1")
        with pytest.raises(OrchestrationFailed, match="got `str`"):
            await handle.result(HANG_SECONDS)

        said = await runtime.admin.retry("o-1", leave_out="numbers")
        await handle.send_message("numbers", 2)

        assert await handle.result(HANG_SECONDS) == 2
    assert (said.execution_id, said.received) == (2, ())


async def has_ended(runtime, instance_id):
    return (await runtime.describe(instance_id)).status.is_final


def test_undone_turns_are_left_out():
    def event(kind, event_id, turn, **fields):
        return kind(
            event_id=event_id,
            instance_id="i",
            execution_id=1,
            timestamp_ms=0,
            turn=turn,
            **fields,
        )

    kept = event(events.ExternalEvent, 1, 1, name="a")
    undone = event(events.ExternalEvent, 2, 2, name="b")
    first = event(events.OrchestrationRetried, 3, 3, kept_turn=1)
    later = event(events.ExternalEvent, 4, 4, name="c")
    second = event(events.OrchestrationRetried, 5, 5, kept_turn=3)

    assert events.without_undone([kept, undone, first, later]) == [kept, first, later]
    assert events.without_undone([kept, undone, first, later, second]) == [kept, first, second]
    left_out = event(events.OrchestrationRetried, 3, 3, kept_turn=1, left_out=(1,))
    assert events.without_undone([kept, undone, left_out, later]) == [left_out, later]
