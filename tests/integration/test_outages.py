"""A runtime whose store is out: callers get an answer, and stopping comes to an end."""

import asyncio
import contextlib

import apsw
import pytest

from integration.conditions import reached, until
from patience import HANG_SECONDS
from perdure import (
    Client,
    InMemoryProvider,
    Runtime,
    RuntimeOptions,
    Status,
    activity,
    orchestration,
    wait_for_event,
)
from perdure.clock import ManualClock
from perdure.errors import AlreadyExists, StoreFull, StoreUnavailable
from perdure.providers.sqlite.memory import MemoryStore
from perdure.runtime import worker
from perdure.runtime.turns import START_DEADLINE_SECONDS


@orchestration
async def flow() -> str:
    return "done"


class Out(InMemoryProvider):
    """Takes no new instance while ``error`` is set."""

    error = None
    tries = 0

    async def start_orchestration_item(self, start, commit, lock_token, owner):
        self.tries += 1
        if self.error is not None:
            raise self.error
        return await super().start_orchestration_item(start, commit, lock_token, owner)


async def test_a_start_on_a_full_store_is_told_at_once():
    provider = Out()
    provider.error = StoreFull("start", "no space left")
    async with Runtime(provider, [flow]) as runtime, asyncio.timeout(HANG_SECONDS):
        with pytest.raises(StoreFull, match="no space left"):
            await runtime.start(flow, id="one")
        with pytest.raises(StoreFull, match="no space left"):
            await runtime.start_many(flow, [("two", ()), ("three", ())])

        provider.error = None
        assert await (await runtime.start(flow, id="one")).result(HANG_SECONDS) == "done"


class Unheard(InMemoryProvider):
    """Creates instances, and the first answer about it is lost."""

    has_lost = False

    async def start_orchestration_item(self, start, commit, lock_token, owner):
        taken = await super().start_orchestration_item(start, commit, lock_token, owner)
        if not self.has_lost:
            self.has_lost = True
            raise StoreUnavailable("start", "the connection is gone")
        return taken


async def test_a_start_that_must_be_new_is_not_refused_because_its_answer_was_lost():
    provider = Unheard()
    async with Runtime(provider, [flow]) as runtime, asyncio.timeout(HANG_SECONDS):
        handle = await runtime.start(flow, id="one", if_exists="fail")

        assert provider.has_lost
        assert await handle.result(HANG_SECONDS) == "done"
        with pytest.raises(AlreadyExists):
            await runtime.start(flow, id="one", if_exists="fail")


async def test_a_start_whose_answer_was_lost_does_not_claim_the_instance_of_another():
    store = MemoryStore()
    async with Client(InMemoryProvider(store=store)) as other:
        await other.start(flow, id="one")
    async with Runtime(Unheard(store=store), [flow]) as runtime, asyncio.timeout(HANG_SECONDS):
        with pytest.raises(AlreadyExists):
            await runtime.start(flow, id="one", if_exists="fail")


async def test_a_start_waits_a_while_for_a_store_that_is_out_and_is_told_then():
    clock = ManualClock()
    provider = Out(clock=clock)
    provider.error = StoreUnavailable("start", "no route")
    async with Runtime(provider, [flow], clock=clock) as runtime, asyncio.timeout(HANG_SECONDS):
        # More than begin at once: those behind the others do not wait as long once more.
        starts = [asyncio.ensure_future(runtime.start(flow, id=f"s-{n}")) for n in range(500)]
        begun_ms = clock.now_ms()
        while not all(start.done() for start in starts):
            clock.advance(100)
            for _ in range(20):
                await asyncio.sleep(0)
        waited_ms = clock.now_ms() - begun_ms

        assert all(isinstance(start.exception(), StoreUnavailable) for start in starts)
        assert START_DEADLINE_SECONDS * 1000 <= waited_ms < START_DEADLINE_SECONDS * 2000
        assert not runtime.is_busy


async def test_a_start_succeeds_when_the_store_is_back_in_time():
    clock = ManualClock()
    provider = Out(clock=clock)
    provider.error = StoreUnavailable("start", "no route")
    async with Runtime(provider, [flow], clock=clock) as runtime, asyncio.timeout(HANG_SECONDS):
        start = asyncio.ensure_future(runtime.start(flow))

        async def was_repeated():
            clock.advance(100)
            return provider.tries >= 3

        await until(was_repeated)
        provider.error = None
        while not start.done():
            clock.advance(100)
            await asyncio.sleep(0)

        assert await start.result().result(HANG_SECONDS) == "done"


@activity
async def step(number: int) -> int:
    return number


@orchestration
async def patient() -> int:
    return await step(await wait_for_event("go", int))


class Faulty(InMemoryProvider):
    """Fails some fetches with an unexpected error."""

    def __init__(self, **options):
        super().__init__(**options)
        self.turns = self.work = 0

    async def fetch_orchestration_item(self, *args, **options):
        self.turns += 1
        if self.turns % 3 == 1:
            raise ZeroDivisionError("a defect")
        return await super().fetch_orchestration_item(*args, **options)

    async def fetch_work_items(self, *args, **options):
        self.work += 1
        if self.work % 3 == 1:
            raise ZeroDivisionError("a defect")
        return await super().fetch_work_items(*args, **options)


async def test_a_defect_in_a_fetch_delays_no_instance_for_long(monkeypatch, caplog):
    monkeypatch.setattr(worker, "_LONGEST_SECONDS", 0.01)
    store = MemoryStore()
    options = RuntimeOptions(run_activities=False, orchestration_lock_timeout=600)
    async with Client(InMemoryProvider(store=store)) as client:
        for number in range(40):
            await client.start(patient, id=f"p-{number}")
            await client.raise_event(f"p-{number}", "go", number)
        async with (
            Runtime(Faulty(store=store), [patient], options=options),
            Runtime(Faulty(store=store), [step]),
        ):
            results = [await client.get(f"p-{n}", patient).result(HANG_SECONDS) for n in range(40)]
    assert results == list(range(40))
    assert "cannot fetch orchestrations" in caplog.text
    assert "cannot fetch activities" in caplog.text


@pytest.mark.parametrize("table", ["orchestrator_queue", "worker_queue"])
async def test_a_damaged_message_stops_its_own_instance_only(tmp_path, table):
    path = tmp_path / "store.db"
    is_work = table == "worker_queue"
    async with Client(path) as client:
        await client.start(patient, id="bad")
        if is_work:
            await client.raise_event("bad", "go", 1)
            lone = RuntimeOptions(run_activities=False)
            async with Runtime(path, [patient, step], options=lone) as runtime:
                await until(lambda: _has_work(runtime))
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        connection.execute(f"UPDATE {table} SET body = CAST(x'7b22ff22' AS TEXT)")
    async with Runtime(path, [patient, step]) as runtime:
        for number in range(3):
            await runtime.start(patient, id=f"p-{number}")
            await runtime.raise_event(f"p-{number}", "go", number)
            assert await runtime.get(f"p-{number}").result(HANG_SECONDS) == number
        await reached(runtime, "bad", Status.FAILED if is_work else Status.BLOCKED)


async def _has_work(client):
    return bool(await client.provider.admin.list_work("bad"))
