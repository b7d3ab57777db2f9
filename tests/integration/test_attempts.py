"""Information that an attempt gets: heartbeats, its number, and the key of the call."""

import asyncio
import threading
import time

import msgspec
import pytest

from integration.conditions import reached, until
from patience import HANG_SECONDS
from perdure import (
    InMemoryProvider,
    Retry,
    Runtime,
    RuntimeOptions,
    SqliteProvider,
    Status,
    activity,
    activity_info,
    heartbeat,
    is_cancelled,
    last_heartbeat,
    orchestration,
)
from perdure.errors import StoreUnavailable

LOCK_SECONDS = 0.3


def calling(handler):
    @orchestration
    async def flow() -> object:
        return await handler()

    return flow


@pytest.mark.parametrize("ending", ["fails", "goes quiet", "times out", "fails in a thread"])
async def test_a_retry_knows_the_last_heartbeat(make_runtime, ending):
    seen = []
    options = {
        "fails": {},
        "goes quiet": {"heartbeat_timeout": 0.05},
        "times out": {"timeout": 0.05},
        "fails in a thread": {},
    }[ending]
    retry = Retry(max_attempts=4, first_delay=0)

    async def steps() -> str:
        seen.append((activity_info().attempt, last_heartbeat(int)))
        if activity_info().attempt == 3:
            raise OSError("told nothing this time")
        if activity_info().attempt == 4:
            return "done"
        heartbeat(10 * activity_info().attempt)
        heartbeat(10 * activity_info().attempt + 1)
        if ending == "fails":
            raise OSError("down")
        await asyncio.Event().wait()
        return "never"

    def threaded() -> str:
        seen.append((activity_info().attempt, last_heartbeat(int)))
        if activity_info().attempt == 4:
            return "done"
        if activity_info().attempt < 3:
            heartbeat(10 * activity_info().attempt + 1)
        raise OSError("down")

    handler = activity(name="steps", retry=retry, **options)(
        threaded if ending == "fails in a thread" else steps
    )
    flow = calling(handler)
    async with make_runtime([flow, handler]) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == "done"

    assert seen == [(1, None), (2, 11), (3, 21), (4, 21)]


@pytest.mark.parametrize("is_drained", [True, False])
async def test_an_attempt_after_another_was_cut_off_is_not_the_first(tmp_path, is_drained):
    seen, began = [], asyncio.Event()

    @activity(retry=Retry(max_attempts=2, first_delay=0))
    async def charge() -> str:
        seen.append((activity_info().attempt, last_heartbeat(str)))
        began.set()
        if len(seen) == 1:
            heartbeat("half")
            await asyncio.Event().wait()
        if len(seen) == 2:
            raise OSError("down")  # an attempt that was cut off uses up no retry
        return activity_info().idempotency_key

    flow = calling(charge)

    def make():
        return Runtime(
            SqliteProvider(tmp_path / "s.db"),
            [flow, charge],
            options=RuntimeOptions(
                drain_timeout=0,
                orchestration_lock_timeout=LOCK_SECONDS,
                activity_lock_timeout=LOCK_SECONDS,
            ),
        )

    first = make()
    async with first:
        await first.start(flow, id="i")
        await began.wait()

        async def is_told():
            queued = await first.provider.admin.list_work("i", limit=5)
            return queued[0].heartbeat is not None

        await until(is_told)
        if not is_drained:
            first.abort()
    async with make() as second:
        key = await second.get("i").result(HANG_SECONDS)

    assert seen == [(1, None), (2, "half"), (3, "half")]
    assert key.startswith("i/1/2/")


@pytest.mark.parametrize("way", ["replaced", "deleted"])
async def test_an_id_that_is_used_again_has_other_idempotency_keys(make_runtime, way):
    keys = []

    @activity
    async def charge() -> None:
        keys.append(activity_info().idempotency_key)

    flow = calling(charge)
    async with make_runtime([flow, charge]) as runtime:
        await (await runtime.start(flow, id="x")).result(HANG_SECONDS)
        if way == "deleted":
            await runtime.admin.delete("x")
        await runtime.start(flow, id="x", if_exists="replace" if way == "replaced" else "get")

        async def ran_again():
            return len(keys) == 2

        await until(ran_again)
        await reached(runtime, "x", Status.COMPLETED)

    assert len(set(keys)) == 2


async def test_a_work_item_without_the_newer_fields_still_runs():
    seen = []

    class Older(InMemoryProvider):
        """Holds work items as they were written before."""

        async def fetch_work_items(self, *args):
            found = await super().fetch_work_items(*args)
            return [
                msgspec.structs.replace(
                    each,
                    body=msgspec.json.encode(
                        {
                            name: value
                            for name, value in msgspec.json.decode(each.body).items()
                            if name not in {"seed", "last_heartbeat", "redelivered"}
                        }
                    ).decode(),
                )
                for each in found
            ]

    @activity(session="s")
    async def charge() -> None:
        info = activity_info()
        seen.append((info.idempotency_key, info.attempt, last_heartbeat()))

    flow = calling(charge)
    async with Runtime(Older(), [flow, charge]) as runtime:
        await (await runtime.start(flow, id="i")).result(HANG_SECONDS)

    assert seen == [("i/1/2", 1, None)]


async def _converts():
    try:
        await asyncio.sleep(60)
    except BaseException as error:
        raise RuntimeError("interrupted") from error


async def _cleans_up_badly():
    try:
        await asyncio.sleep(60)
    finally:
        raise OSError("cannot clean up")


async def _groups():
    async with asyncio.TaskGroup() as group:
        group.create_task(_converts())


@pytest.mark.parametrize("heartbeat_timeout", [None, 60.0])
@pytest.mark.parametrize("code", [_converts, _cleans_up_badly, _groups])
async def test_what_an_activity_raises_when_its_worker_stops_is_no_outcome(
    tmp_path, code, heartbeat_timeout
):
    runs = []

    @activity(heartbeat_timeout=heartbeat_timeout)
    async def download() -> int:
        runs.append(activity_info().attempt)
        if len(runs) == 1:
            await code()
        return len(runs)

    async def is_running():
        return len(runs) == 1

    flow = calling(download)
    options = RuntimeOptions(drain_timeout=0)
    async with Runtime(tmp_path / "s.db", [flow, download], options=options) as runtime:
        await runtime.start(flow, id="x")
        await until(is_running)
    async with Runtime(tmp_path / "s.db", [flow, download]) as runtime:
        assert await runtime.get("x").result(HANG_SECONDS) == 2
    assert runs == [1, 2]


async def test_heartbeats_that_come_faster_than_the_store_writes_are_one(make_runtime):
    written, may_write = [], asyncio.Event()

    class Slow(InMemoryProvider):
        async def renew_work_item_lock(self, lock_token, extend_for_ms, details=None):
            written.append(details)
            await may_write.wait()
            await super().renew_work_item_lock(lock_token, extend_for_ms, details)

    @activity
    async def count() -> None:
        for number in range(1000):
            heartbeat(number)
            await asyncio.sleep(0)
        may_write.set()

        async def is_written():
            return written[-1] == "999"

        await until(is_written)

    flow = calling(count)
    async with make_runtime([flow, count], provider=Slow()) as runtime:
        await (await runtime.start(flow)).result(HANG_SECONDS)

    assert len(written) == 2
    assert written[-1] == "999"


async def test_a_heartbeat_is_stored_although_the_one_before_was_not(make_runtime):
    written = []

    class Failing(InMemoryProvider):
        async def renew_work_item_lock(self, lock_token, extend_for_ms, details=None):
            written.append(details)
            if len(written) == 1:
                heartbeat("second")
                raise StoreUnavailable("renew_work_item_lock", "out")
            await super().renew_work_item_lock(lock_token, extend_for_ms, details)

    @activity
    async def tell() -> None:
        heartbeat("first")

        async def is_written():
            return '"second"' in written

        await until(is_written)

    flow = calling(tell)
    async with make_runtime([flow, tell], provider=Failing()) as runtime:
        await (await runtime.start(flow)).result(HANG_SECONDS)


async def test_a_sync_activity_is_told_that_its_worker_stops(make_runtime):
    begun, told = threading.Event(), []

    @activity
    def long() -> None:
        begun.set()
        while not is_cancelled():
            time.sleep(0.001)
        heartbeat("too late")
        told.append(True)

    async def has_begun():
        return begun.is_set()

    flow = calling(long)
    async with make_runtime([flow, long], drain_timeout=0) as runtime:
        await runtime.start(flow)
        await until(has_begun)

    assert told == [True]


async def test_an_activity_that_holds_the_loop_for_too_long_runs_once():
    runs = []

    @activity
    async def compute() -> int:
        runs.append(1)
        if len(runs) == 1:
            await asyncio.sleep(0)
            time.sleep(2 * LOCK_SECONDS)  # noqa: ASYNC251 - what is to be told
        return len(runs)

    flow = calling(compute)
    options = RuntimeOptions(activity_lock_timeout=LOCK_SECONDS)
    async with Runtime("memory:", [flow, compute], options=options) as runtime:
        # A thread renews its lock meanwhile.
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == 1
