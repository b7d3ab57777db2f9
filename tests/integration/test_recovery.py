"""Going on in a new process: every kind of wait, before and after it was due."""

import asyncio

import apsw
import pytest

from integration.conditions import until, waiting
from patience import HANG_SECONDS
from perdure import (
    Client,
    FileSystemProvider,
    InMemoryProvider,
    Runtime,
    RuntimeOptions,
    SqliteProvider,
    activity,
    next_message,
    orchestration,
    state,
    wait_for_event,
)
from perdure.clock import ManualClock
from perdure.errors import StoreBusy, StoreClosed
from perdure.testing.crashes import intercept


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def by_event() -> str:
    return await wait_for_event("go", str)


@orchestration
async def by_timer() -> str:
    await asyncio.sleep(1)
    return "woke"


@orchestration
async def by_message() -> int:
    return await next_message("box", int)


@orchestration
async def child() -> str:
    return await wait_for_event("go", str)


@orchestration
async def by_child() -> str:
    return await child.options(id="the-child")()


@orchestration
async def far() -> list[int]:
    seen = [await echo(number) for number in range(20)]
    state["seen"] = len(seen)
    await wait_for_event("go", str)
    return [*seen, state.get("seen", int, 0)]


HANDLERS = [by_event, by_timer, by_message, by_child, child, far, echo]


@pytest.fixture(params=[False, True], ids=["cached", "always replayed"])
def open_runtime(request, tmp_path):
    def make():
        options = RuntimeOptions(always_replay=request.param, orchestration_lock_timeout=0.5)
        return Runtime(SqliteProvider(tmp_path / "s.db"), HANDLERS, options=options)

    return make


async def test_waits_survive_a_restart(open_runtime, tmp_path):
    async with open_runtime() as first:
        for flow in (by_event, by_timer, by_message, by_child, far):
            await first.start(flow, id=flow.name)
            await waiting(first, flow.name)
        await waiting(first, "the-child")
        await until(lambda: first.state("far", "seen"))
    async with Client(SqliteProvider(tmp_path / "s.db")) as client:
        await client.raise_event("by_event", "go", "on")
        await client.raise_event("the-child", "go", "grown up")
        await client.raise_event("far", "go", "on")
        await client.send_message("by_message", "box", 5)
    async with open_runtime() as second:
        assert await second.get("by_event").result(HANG_SECONDS) == "on"
        assert await second.get("by_timer").result(HANG_SECONDS) == "woke"
        assert await second.get("by_message").result(HANG_SECONDS) == 5
        assert await second.get("by_child").result(HANG_SECONDS) == "grown up"
        assert await second.get("far").result(HANG_SECONDS) == [*range(20), 20]


async def test_a_timer_keeps_its_due_time_over_a_restart(open_runtime):
    async with open_runtime() as first:
        handle = await first.start(by_timer, id="t")
        await waiting(first, "t")
        due_at = (await handle.describe()).waiting_for[0].due_at
        due_ms = round(due_at.timestamp() * 1000)
    async with open_runtime() as second:
        assert await second.get("t").result(HANG_SECONDS) == "woke"
        fired = [e for e in await second.history("t") if type(e).__name__ == "TimerFired"]
        assert fired[0].fire_at_ms == due_ms
        assert fired[0].timestamp_ms >= due_ms


async def test_a_start_without_a_worker_is_pending_until_one_comes(open_runtime, tmp_path):
    async with Client(SqliteProvider(tmp_path / "s.db")) as client:
        handle = await client.start(by_timer, id="p")
        assert (await handle.describe()).status == "Pending"
    async with open_runtime() as runtime:
        assert await runtime.get("p").result(HANG_SECONDS) == "woke"


async def test_a_client_in_another_process_sees_the_end_at_once(open_runtime, tmp_path):
    async with open_runtime() as runtime, Client(SqliteProvider(tmp_path / "s.db")) as client:
        await runtime.start(by_event, id="e")
        result = asyncio.ensure_future(client.get("e").result(HANG_SECONDS))
        await waiting(client, "e")
        await client.raise_event("e", "go", "seen")

        assert await result == "seen"


class Shut(InMemoryProvider):
    """Refuses first turns at once, as a store does that is not open."""

    def start_orchestration_item(self, start, commit, lock_token, owner):
        raise StoreClosed("start_orchestration_item", "shut")


async def test_a_start_that_the_store_refuses_at_once_is_told(caplog):
    @orchestration
    async def flow() -> None: ...

    async with Runtime(Shut(), [flow]) as runtime:
        with pytest.raises(StoreClosed, match="shut"):
            async with asyncio.timeout(HANG_SECONDS):
                await runtime.start(flow)
        assert not runtime.is_busy


@orchestration
async def approval() -> str:
    try:
        async with asyncio.timeout(60):
            return await wait_for_event("answer", str)
    except TimeoutError:
        return "timed out"


@orchestration
async def alarms() -> list[int]:
    rung: list[int] = []

    async def ring(seconds: int) -> None:
        await asyncio.sleep(seconds)
        rung.append(seconds)

    await asyncio.gather(ring(50), ring(30), ring(40))
    return rung


@pytest.mark.parametrize("kind", [SqliteProvider, FileSystemProvider])
@pytest.mark.parametrize(("answered_at", "outcome"), [(10, "yes"), (70, "timed out")])
async def test_what_happened_while_nothing_ran_is_heard_in_its_order(
    tmp_path, kind, answered_at, outcome
):
    clock = ManualClock()

    def provider():
        return kind(tmp_path / "store", clock=clock)

    async with Runtime(provider(), [approval, alarms], clock=clock) as runtime:
        await runtime.start(approval, id="approval")
        await runtime.start(alarms, id="alarms")
        await waiting(runtime, "approval")
        await waiting(runtime, "alarms")
    async with Client(provider(), clock=clock) as client:
        clock.advance(answered_at * 1000)
        await client.raise_event("approval", "answer", "yes")
    clock.advance(3_600_000)

    async with Runtime(provider(), [approval, alarms], clock=clock) as runtime:
        assert await runtime.get("approval").result(HANG_SECONDS) == outcome
        assert await runtime.get("alarms").result(HANG_SECONDS) == [30, 40, 50]


@orchestration
async def two_words() -> list[str]:
    first = await wait_for_event("first", str)
    return [first, await wait_for_event("second", str)]


async def test_an_instance_that_is_ahead_of_the_store_goes_on_from_what_is_stored(tmp_path):
    """After a failover, or a restored backup, the store can lack the last turns of an instance."""
    path = tmp_path / "store.db"
    async with Runtime(SqliteProvider(path), [two_words]) as runtime:
        handle = await runtime.start(two_words, id="x")
        await handle.raise_event("first", "lost")
        await until(lambda: has(path, "history", at_least=4))
        execute(path, "DELETE FROM history WHERE event_id > 2")

        await handle.raise_event("second", "b")
        await until(lambda: has(path, "orchestrator_queue", at_most=0))
        await handle.raise_event("first", "a")

        assert await handle.result(HANG_SECONDS) == ["a", "b"]
    ids = [row[0] for row in execute(path, "SELECT event_id FROM history ORDER BY event_id")]
    assert ids == list(range(1, len(ids) + 1))


async def has(path, table, at_least=0, at_most=99):
    rows = execute(path, f"SELECT count(*) FROM {table}")[0][0]
    return at_least <= rows <= at_most


def execute(path, statement):
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(60_000)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


@orchestration
async def one_step() -> int:
    return await echo(7)


@pytest.mark.parametrize("verb", ["start_orchestration_item", "ack_orchestration_item"])
async def test_work_of_a_commit_whose_answer_is_lost_runs_when_its_lock_ends(
    verb, make_every_store
):
    """The fetch that waits began before the work was claimed, and ends long after its lock."""
    lost = []

    async def lose_one(called, call):
        answer = await call()
        if called == verb and not lost:
            lost.append(called)
            raise StoreBusy(called, "the answer is lost")
        return answer

    options = RuntimeOptions(
        poll_interval=3600, activity_lock_timeout=0.5, orchestration_lock_timeout=0.5
    )
    provider = intercept(make_every_store(), lose_one)
    async with Runtime(provider, [one_step, echo], options=options) as runtime:
        delay = 0.1 if verb.startswith("ack") else None  # a delayed start is fetched
        handle = await runtime.start(one_step, delay=delay)
        assert await handle.result(HANG_SECONDS) == 7
    assert lost
