"""Messages that kill every worker, and code that breaks the engine's expectations."""

import asyncio

import pytest

from integration.conditions import reached, until, waiting
from patience import HANG_SECONDS
from perdure import (
    Client,
    InMemoryProvider,
    OrchestrationFailed,
    Runtime,
    RuntimeOptions,
    Status,
    activity,
    orchestration,
    wait_for_event,
)
from perdure.engine.execution import Execution
from perdure.errors import InvalidValue, PerdureError
from perdure.model.failures import BlockReason
from perdure.providers.records import TagFilter, TagMode
from perdure.providers.sqlite.memory import MemoryStore


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def gate() -> str:
    return await wait_for_event("go", str)


@orchestration
async def plain(value: int) -> int:
    return await echo(value)


def _options(**settings):
    return RuntimeOptions(max_attempts=3, **settings)


async def _use_up_attempts(provider, instance_id):
    """Take the instance as often as a worker that dies over it would."""
    while True:
        fetched = await provider.fetch_orchestration_item(1000, 0)
        if fetched is None or fetched.item.instance_id != instance_id:
            return
        await provider.abandon_orchestration_item(fetched.lock_token)
        if fetched.attempt_count >= 5:
            return


async def test_an_instance_that_kills_its_workers_is_blocked_and_an_operator_frees_it():
    store = MemoryStore()
    async with Runtime(InMemoryProvider(store=store), [gate], options=_options()) as runtime:
        await runtime.start(gate, id="g")
        await waiting(runtime, "g")
    provider = InMemoryProvider(store=store)
    async with provider:
        async with Runtime(InMemoryProvider(store=store), [plain, echo]) as bystander:
            await bystander.raise_event("g", "go", "on")
            await _use_up_attempts(provider, "g")
        async with Runtime(InMemoryProvider(store=store), [gate], options=_options()) as runtime:
            await reached(runtime, "g", Status.BLOCKED)
            block = (await runtime.describe("g", waits=False)).block
            assert block is not None
            assert block.reason is BlockReason.POISON
            await runtime.resume("g")

            assert await runtime.get("g").result(HANG_SECONDS) == "on"


async def test_a_block_for_poison_says_what_went_wrong_the_last_time(make_runtime, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("the engine is broken")

    async with make_runtime([gate], max_attempts=1) as runtime:
        handle = await runtime.start(gate, id="g")
        await waiting(runtime, "g")
        monkeypatch.setattr(Execution, "run_turn", broken)
        await handle.raise_event("go", "on")
        await reached(runtime, "g", Status.BLOCKED)

        block = (await handle.describe(waits=False)).block
        assert block.reason is BlockReason.POISON
        assert "the last time here: ZeroDivisionError: the engine is broken" in block.message
        monkeypatch.undo()
        await handle.resume()
        assert await handle.result(HANG_SECONDS) == "on"


async def test_an_activity_delivered_too_often_fails_without_running_again():
    runs = []

    @activity
    async def deadly() -> None:
        runs.append(1)

    @orchestration
    async def victim() -> str:
        await deadly()
        return "alive"

    store = MemoryStore()
    handlers = [victim, deadly]
    lone = RuntimeOptions(run_activities=False)
    async with Runtime(InMemoryProvider(store=store), handlers, options=lone) as orchestrator:
        await orchestrator.start(victim, id="v")
        await waiting(orchestrator, "v")
        provider = InMemoryProvider(store=store)
        async with provider:
            for _ in range(4):
                fetched = await provider.fetch_work_item(1000, 0)
                await provider.abandon_work_item(fetched.lock_token)
        worker = Runtime(
            InMemoryProvider(store=store),
            handlers,
            options=_options(run_orchestrations=False),
        )
        async with worker:
            with pytest.raises(OrchestrationFailed, match="delivered 5 times"):
                await orchestrator.get("v").result(HANG_SECONDS)
        assert runs == []


async def test_one_blocked_instance_among_many_disturbs_no_other(make_runtime):
    async with make_runtime([plain, echo, gate], max_attempts=3) as runtime:
        await Client(runtime.provider).start("gate", "gate takes no argument", id="bad")
        handles = [await runtime.start(plain, number) for number in range(30)]

        assert [await handle.result(HANG_SECONDS) for handle in handles] == list(range(30))
        await reached(runtime, "bad", Status.BLOCKED)


async def test_a_cancelled_blocked_instance_can_be_terminated_and_deleted(make_runtime):
    async with make_runtime([gate]) as runtime:
        await Client(runtime.provider).start("gate", 1, id="bad")
        await reached(runtime, "bad", Status.BLOCKED)
        result = await runtime.admin.delete("bad", force=True)

        assert result.instances <= 1
        await runtime.start(gate, id="bad")
        await waiting(runtime, "bad")


async def test_a_recursion_without_end_fails_its_own_instance_only(make_runtime):
    def forever(depth):
        return forever(depth + 1)

    @orchestration
    async def deep() -> int:
        return forever(0)

    async with make_runtime([deep, plain, echo]) as runtime:
        with pytest.raises(OrchestrationFailed, match="RecursionError"):
            await (await runtime.start(deep)).result(HANG_SECONDS)
        assert await (await runtime.start(plain, 1)).result(HANG_SECONDS) == 1


async def test_scheduling_without_end_fails_its_own_instance_only(make_runtime):
    @orchestration
    async def greedy() -> None:
        steps = []
        while True:
            steps.append(echo(len(steps)))

    async with make_runtime([greedy, plain, echo]) as runtime:
        with pytest.raises(OrchestrationFailed, match="endless loop"):
            await (await runtime.start(greedy)).result(HANG_SECONDS)
        assert await (await runtime.start(plain, 1)).result(HANG_SECONDS) == 1


async def test_an_early_event_of_the_wrong_type_can_be_caught(make_runtime):
    @orchestration
    async def careful() -> str:
        await wait_for_event("go", None)
        try:
            await wait_for_event("number", int)
        except TypeError as error:
            return type(error).__name__
        return "missed"

    async with make_runtime([careful]) as runtime:
        handle = await runtime.start(careful, id="c")
        await handle.raise_event("number", "seven")  # its type is not known yet
        await handle.raise_event("go")

        assert await handle.result(HANG_SECONDS) == "PayloadError"


async def test_real_work_inside_an_orchestration_is_refused_with_the_line(make_runtime):
    @orchestration
    async def impatient() -> None:
        await asyncio.to_thread(print, "no")

    async with make_runtime([impatient]) as runtime:
        with pytest.raises(OrchestrationFailed, match=r"test_poison\.py"):
            await (await runtime.start(impatient)).result(HANG_SECONDS)


@activity(name="echo")
async def wrong_echo(value: int) -> str:
    return f"about {value}"


async def test_tries_of_an_instance_that_is_blocked_do_not_make_it_poison(caplog):
    store = MemoryStore()
    provider = InMemoryProvider(store=store)
    async with Runtime(provider, [plain], options=_options(run_activities=False)) as runtime:
        await runtime.start(plain, 1, id="p")
        await waiting(runtime, "p")
        async with Runtime(InMemoryProvider(store=store), [wrong_echo]):
            await reached(runtime, "p", Status.BLOCKED)

        block = (await runtime.describe("p", waits=False)).block
        assert block.reason is BlockReason.UNDECODABLE
        messages = await provider.admin.list_messages("p")
        assert [message.attempt_count for message in messages] == [0]
    assert "'p' is blocked: undecodable" in caplog.text


async def test_what_another_worker_must_have_is_told_once(caplog):
    @orchestration
    async def parent() -> list[int]:
        steps = [echo(1), echo(2), plain(3)]
        return await asyncio.gather(*steps)

    store = MemoryStore()
    with caplog.at_level("WARNING", "perdure"):
        async with Runtime(InMemoryProvider(store=store), [parent]) as runtime:
            handle = await runtime.start(parent)
            await waiting(runtime, handle.id)
            await runtime.start(gate, id="g")
            async with Runtime(InMemoryProvider(store=store), [plain, echo]):
                assert await handle.result(HANG_SECONDS) == [1, 2, 3]
    for name in ("activity 'echo'", "orchestration 'plain'", "orchestration 'gate'"):
        told = [r for r in caplog.messages if r.startswith(f"{name} is not registered")]
        assert len(told) == 1, caplog.messages
        assert told[0].endswith("it waits for a worker that has it")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"drain_timeout": -1}, "drain_timeout must be at least 0 seconds, not -1"),
        ({"activity_slots": "5"}, "activity_slots must be an integer, not '5'"),
        ({"orchestration_lock_timeout": 0.01}, "must be at least 0.1 seconds, not 0.01"),
        ({"cached_instances": 0}, "cached_instances must be at least 1, not 0"),
        (
            {"poll_interval": float("nan")},
            "poll_interval must be a number of seconds or a timedelta, not nan",
        ),
        ({"threads": True}, "threads must be an integer, not True"),
        ({"tags": "gpu"}, "tags must be a TagFilter, as .*only.*, not 'gpu'"),
        ({"worker_id": 5}, "worker_id"),
        ({"worker_id": "a\nb"}, "worker_id"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(setting, said):
    with pytest.raises(PerdureError, match=said):
        RuntimeOptions(**setting)


@pytest.mark.parametrize("wrong", [("gpu",), ("any",), (TagMode.ANY, {"gpu"})])
def test_a_tag_filter_that_would_take_something_else_is_refused(wrong):
    with pytest.raises(InvalidValue, match=r"made by TagFilter\.only\('gpu'\)"):
        TagFilter(*wrong)


def test_tags_without_a_mode_are_refused():
    with pytest.raises(InvalidValue, match=r"made by TagFilter\.only\('gpu'\)"):
        TagFilter(tags=frozenset({"gpu"}))


async def test_what_was_in_flight_at_many_deaths_runs_one_by_one():
    begun, may_end = [], asyncio.Event()

    @activity
    async def work(number: int) -> int:
        begun.append(number)
        await may_end.wait()
        return number

    @orchestration
    async def flow(number: int) -> int:
        return await work(number)

    store = MemoryStore()
    provider = InMemoryProvider(store=store)
    flows_only = RuntimeOptions(run_activities=False)
    async with Runtime(provider, [flow, work], options=flows_only) as flows:
        handles = [await flows.start(flow, number) for number in range(6)]
        for _ in range(4):
            held = await provider.fetch_work_items(10, 60_000, 5_000)
            assert len(held) == 6
            for fetched in held:
                await provider.abandon_work_item(fetched.lock_token)
        async with Runtime(InMemoryProvider(store=store), [flow, work]):

            async def are_held_back():
                return (await flows.admin.queue_depths()).worker.delayed == 5

            await until(are_held_back)
            assert len(begun) == 1
            may_end.set()

            assert [await handle.result(HANG_SECONDS) for handle in handles] == list(range(6))
