"""The life of a runtime: long turns, draining, lost locks, several runtimes, sync callers."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from integration.conditions import reached, until, waiting
from patience import HANG_SECONDS
from perdure import (
    BlockingClient,
    Client,
    FileSystemProvider,
    InMemoryProvider,
    Runtime,
    RuntimeOptions,
    SqliteProvider,
    Status,
    activity,
    orchestration,
    wait_for_event,
)
from perdure.clock import ManualClock
from perdure.errors import StoreClosed, UsageError
from perdure.model.failures import BlockReason
from perdure.providers.sqlite.memory import MemoryStore


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def plain(value: int) -> int:
    return await echo(value)


@orchestration
async def gate() -> str:
    return await wait_for_event("go", str)


async def test_a_turn_that_never_ends_is_interrupted_and_blocked_and_others_go_on():
    @orchestration
    async def endless() -> None:
        number = 0
        while True:
            number += 1

    options = RuntimeOptions(turn_warn_after=0.1, turn_abort_after=0.3)
    async with Runtime("memory:", [endless, plain, echo], options=options) as runtime:
        await runtime.start(endless, id="e")
        await reached(runtime, "e", Status.BLOCKED)
        block = (await runtime.describe("e", waits=False)).block

        assert block is not None
        assert block.reason is BlockReason.LIMIT
        assert "test_runtime.py" in block.message
        assert await (await runtime.start(plain, 5)).result(HANG_SECONDS) == 5


@pytest.mark.parametrize("is_first_turn", [True, False])
@pytest.mark.parametrize("store", ["memory:", "file:./store", "store.db"])
async def test_a_turn_that_outlives_its_lock_is_run_once(
    tmp_path, monkeypatch, store, is_first_turn
):
    monkeypatch.chdir(tmp_path)
    turns = 0

    @orchestration
    async def spinning() -> None:
        nonlocal turns
        if not is_first_turn:
            await wait_for_event("go")
        turns += 1
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    options = RuntimeOptions(
        turn_warn_after=0.1,
        turn_abort_after=0.6,
        orchestration_lock_timeout=0.3,
        always_replay=False,
    )
    async with Runtime(store, [spinning], options=options) as runtime:
        await runtime.start(spinning, id="s")
        if not is_first_turn:
            await runtime.raise_event("s", "go")
        await reached(runtime, "s", Status.BLOCKED)
        block = (await runtime.describe("s", waits=False)).block

        assert block.reason is BlockReason.LIMIT
        assert "no line of its own" in block.message or "test_runtime.py" in block.message
        assert turns == 1


async def test_a_replay_that_never_ends_is_interrupted_too(tmp_path):
    is_endless = False

    @orchestration
    async def changed() -> str:
        while is_endless:
            pass
        return await wait_for_event("go", str)

    options = RuntimeOptions(turn_warn_after=0.1, turn_abort_after=0.3)
    async with Runtime(tmp_path / "s.db", [changed]) as runtime:
        await runtime.start(changed, id="c")
        await waiting(runtime, "c")
    is_endless = True
    handlers = [changed, plain, echo]
    async with Runtime(tmp_path / "s.db", handlers, options=options) as runtime:
        await runtime.raise_event("c", "go", "on")
        await reached(runtime, "c", Status.BLOCKED)
        block = (await runtime.describe("c", waits=False)).block

        assert block.reason is BlockReason.LIMIT
        assert "test_runtime.py" in block.message
        assert await (await runtime.start(plain, 5)).result(HANG_SECONDS) == 5
        is_endless = False
        await runtime.resume("c")
        assert await runtime.get("c").result(HANG_SECONDS) == "on"


async def test_stopping_waits_for_running_activities(make_provider):
    release = asyncio.Event()
    started = asyncio.Event()

    @activity
    async def slow() -> str:
        started.set()
        await release.wait()
        return "finished"

    @orchestration
    async def flow() -> str:
        return await slow()

    provider = make_provider()
    if not provider.capabilities.durable:
        pytest.skip("needs a durable store: capability durable")
    async with Runtime(provider, [flow, slow]) as runtime:
        handle = await runtime.start(flow, id="s")
        await started.wait()
        asyncio.get_running_loop().call_later(0.05, release.set)
    async with Client(make_provider()) as client:
        work = await client.provider.admin.list_work("s")
        assert work == []
        messages = await client.provider.admin.list_messages("s")
        view = await handle._client.__class__.describe(client, "s")
        assert view.status is Status.COMPLETED or messages


async def test_two_runtimes_share_a_store_and_every_result_comes_once():
    store = MemoryStore()
    options = RuntimeOptions(cached_instances=10)
    async with (
        Runtime(InMemoryProvider(store=store), [plain, echo], options=options) as one,
        Runtime(InMemoryProvider(store=store), [plain, echo], options=options) as two,
    ):
        handles = [await (one, two)[n % 2].start(plain, n, id=f"n-{n}") for n in range(60)]

        assert [await handle.result(HANG_SECONDS) for handle in handles] == list(range(60))


async def test_a_result_waits_for_the_end_and_not_for_a_store_with_much_to_do(monkeypatch):
    @orchestration
    async def gated() -> int:
        return await echo(len(await wait_for_event("go", str)))

    store = MemoryStore()
    async with Runtime(InMemoryProvider(store=store), [gated, echo]) as first:
        await first.start(gated, id="g")
        await waiting(first, "g")
    provider = InMemoryProvider(store=store)
    async with Runtime(provider, [gated, echo]) as second:
        asked = asyncio.Event()

        async def never_answer(instance_id):
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(provider.admin, "get_instance_info", never_answer)
        result = asyncio.ensure_future(second.get("g", gated).result())
        await asked.wait()
        await second.raise_event("g", "go", "four")

        assert await asyncio.wait_for(result, HANG_SECONDS) == 4


async def test_an_instance_evicted_from_the_cache_comes_back_by_replay(make_provider):
    options = RuntimeOptions(idle_timeout=0.05)
    async with Runtime(make_provider(), [gate], options=options) as runtime:
        handle = await runtime.start(gate, id="g")

        async def is_evicted():
            return runtime._running.orchestrations.live_count == 0

        await until(is_evicted)
        await handle.raise_event("go", "on")
        assert await handle.result(HANG_SECONDS) == "on"


async def test_the_cache_is_bounded(make_provider):
    options = RuntimeOptions(cached_instances=5)
    async with Runtime(make_provider(), [gate], options=options) as runtime:
        handles = [await runtime.start(gate, id=f"g-{n}") for n in range(20)]
        for handle in handles:
            await waiting(runtime, handle.id)
        assert runtime._running.orchestrations.live_count <= 5
        for handle in handles:
            await handle.raise_event("go", handle.id)

        assert [await handle.result(HANG_SECONDS) for handle in handles] == [h.id for h in handles]


async def test_eviction_under_load_loses_nothing(make_provider, caplog):
    @orchestration
    async def steps(value: int) -> int:
        for _ in range(4):
            value = await echo(value + 1)
        return value

    options = RuntimeOptions(cached_instances=3, idle_timeout=0.004)
    async with Runtime(make_provider(), [steps, echo], options=options) as runtime:
        handles = await asyncio.gather(*[runtime.start(steps, n, id=f"s-{n}") for n in range(120)])

        assert [await handle.result(HANG_SECONDS) for handle in handles] == [
            n + 4 for n in range(120)
        ]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_stolen_lock_loses_nothing(make_provider):
    provider = make_provider()
    async with Runtime(provider, [gate]) as runtime:
        handle = await runtime.start(gate, id="g")
        await waiting(runtime, "g")
        stolen = await provider.admin.lock_instance("g", 10_000)
        await provider.abandon_orchestration_item(stolen.lock_token)
        await handle.raise_event("go", "still here")

        assert await handle.result(HANG_SECONDS) == "still here"


def test_sync_code_uses_the_bridge():
    with BlockingClient(Runtime("memory:", [plain, echo])) as portal:
        handle = portal.call(portal.client.start, plain, 7)

        assert portal.call(handle.result, 10) == 7
    with pytest.raises(UsageError, match="with-block"):
        portal.call(handle.result, 10)


async def test_the_bridge_may_be_used_beside_a_running_loop():
    with BlockingClient(Runtime("memory:", [plain, echo])) as portal:
        assert portal.call(portal.call(portal.client.start, plain, 7).result, 10) == 7


def test_the_bridge_takes_a_client_and_says_so():
    with pytest.raises(UsageError, match=r"BlockingClient\(Client\('shop.db'\)\); not 'other.db'"):
        BlockingClient("other.db")


def test_the_bridge_may_be_used_from_several_threads():
    results = []
    with BlockingClient(Runtime("memory:", [plain, echo])) as portal:

        def work(number):
            results.append(portal.call(portal.call(portal.client.start, plain, number).result, 10))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == list(range(8))


async def test_a_web_framework_runs_it_in_its_lifespan():
    runtime = Runtime("memory:", [plain, echo])
    async with runtime.lifespan(object()):
        assert await (await runtime.start(plain, 3)).result(HANG_SECONDS) == 3


SERVER = """
import asyncio, sys
from perdure import Runtime, activity, orchestration
@activity
async def slow() -> str:
    print("started", flush=True)
    await asyncio.sleep(0.3)
    return "done"
@orchestration
async def flow() -> str:
    return await slow()
async def main():
    runtime = Runtime(sys.argv[1], [flow, slow])
    async def begin():
        await asyncio.sleep(0)
        while runtime._running is None:
            await asyncio.sleep(0.01)
        await runtime.start(flow, id="x")
    task = asyncio.create_task(begin())
    await runtime.serve()
    print("stopped", flush=True)
asyncio.run(main())
"""


def test_sigterm_drains_and_exits_cleanly(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "s.db")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)

        assert process.wait(HANG_SECONDS) == 0
        assert process.stdout.read() == "stopped\n"


async def test_a_runtime_runs_only_once():
    runtime = Runtime("memory:", [plain, echo])
    async with runtime:
        with pytest.raises(UsageError, match="runs already"):
            await runtime.__aenter__()


@pytest.mark.parametrize("store", ["sqlite:///{}/s.db", "file:{}/s", "memory:"])
async def test_an_activity_that_blocks_the_event_loop_keeps_its_lock(tmp_path, store):
    runs = []

    @activity
    async def rude() -> str:
        runs.append(1)
        time.sleep(1.2)  # noqa: ASYNC251 - longer than every lock below
        return "done"

    @orchestration
    async def flow() -> str:
        return await rude()

    options = RuntimeOptions(orchestration_lock_timeout=0.5, activity_lock_timeout=0.5)
    async with Runtime(store.format(tmp_path), [flow, rude], options=options) as runtime:
        assert runtime.provider.capabilities.other_loops
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == "done"
        assert runs == [1]


async def test_clients_and_runtimes_may_share_a_provider(make_provider):
    @orchestration
    async def flow() -> str:
        return "done"

    provider = make_provider()
    async with Runtime(provider, [flow]) as runtime:
        async with Runtime(provider, [flow]) as other:
            assert await (await other.start(flow)).result(HANG_SECONDS) == "done"
        async with Client(provider) as client:
            assert await (await client.start(flow)).result(HANG_SECONDS) == "done"
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == "done"

    with pytest.raises(StoreClosed):
        await provider.read("x")


@orchestration
async def sleeping(seconds: int) -> str:
    await asyncio.sleep(seconds)
    return "awake"


@pytest.mark.parametrize("kind", [InMemoryProvider, SqliteProvider, FileSystemProvider])
async def test_a_runtime_has_the_clock_of_its_provider(kind, tmp_path):
    clock = ManualClock()
    path = () if kind is InMemoryProvider else (tmp_path / "store",)
    async with Runtime(kind(*path, clock=clock), [sleeping]) as runtime:
        handle = await runtime.start(sleeping, 5)
        await waiting(runtime, handle.id)  # the sleep has begun
        clock.advance(4_999)
        assert (await handle.describe()).status is Status.RUNNING
        clock.advance(1)
        assert await handle.result() == "awake"

    assert runtime.clock is clock
