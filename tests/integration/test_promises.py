"""Promises: answered early, in time, late, twice, by many processes and wrongly."""

import asyncio
import os
import time

import pytest

from campaigns.runtime_kill import _fork as fork
from integration.conditions import until
from perdure import (
    Client,
    OrchestrationFailed,
    PromiseRejected,
    Runtime,
    RuntimeOptions,
    SqliteProvider,
    Status,
    orchestration,
    promise,
    wait_for_event,
)
from perdure.errors import AlreadyResolved, InvalidValue, NotInOrchestration
from perdure.testing import assert_crash_safe


@orchestration
async def pays(key: str) -> int:
    return await promise(key, int)


@orchestration
async def tries(key: str) -> str:
    try:
        async with asyncio.timeout(3600):
            return str(await promise(key, int))
    except PromiseRejected as error:
        return f"rejected: {error}"
    except TimeoutError:
        return "late"


@orchestration
async def keeps(key: str) -> list[int]:
    """Await one promise twice, and hand it around before it is awaited."""
    kept = promise(key, int)
    return [await kept, await kept]


@orchestration
async def waits() -> None:
    await wait_for_event("never")


HANDLERS = [pays, tries, keeps, waits]


async def test_an_answer_reaches_every_instance_that_awaits_it(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        first = await runtime.start(pays, "card:1")
        second = await runtime.start(keeps, "card:1")
        await until(lambda: _is_awaited(runtime, "card:1", 2))
        await runtime.resolve("card:1", 7)
        assert await first.result() == 7
        assert await second.result() == [7, 7]
        assert [each async for each in runtime.promises()] == []


async def _is_awaited(client, key, times=1):
    found = {each.key: each async for each in client.promises()}
    return key in found and len(found[key].awaited_by) >= times


async def test_an_early_answer_waits(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        await runtime.resolve("card:1", 7)
        assert await (await runtime.start(pays, "card:1")).result() == 7
        assert await (await runtime.start(pays, "card:1")).result() == 7


async def test_an_early_answer_needs_no_worker(make_provider, tmp_path):
    async with Client(tmp_path / "store.db") as client:
        await client.resolve("card:1", 7)
        await client.resolve("card:1", 7)
    async with Runtime(tmp_path / "store.db", HANDLERS) as runtime:
        assert await (await runtime.start(pays, "card:1")).result() == 7


async def test_the_same_answer_again_is_harmless_and_another_one_is_refused(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(pays, "card:1")
        await runtime.resolve("card:1", 7)
        assert await handle.result() == 7
        await runtime.resolve("card:1", 7)
        with pytest.raises(AlreadyResolved, match="resolved before with other data"):
            await runtime.resolve("card:1", 8)
        with pytest.raises(AlreadyResolved, match="resolved before"):
            await runtime.reject("card:1", "no")


async def test_a_rejection_raises_in_the_code(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(tries, "card:1")
        await runtime.reject("card:1", "no money")
        assert await handle.result() == "rejected: no money"
        await runtime.reject("card:1", "no money")
        with pytest.raises(AlreadyResolved, match="rejected before"):
            await runtime.resolve("card:1", 7)


async def test_a_wait_ends_in_time(make_environment):
    async with make_environment(HANDLERS) as env:
        assert await env.run(tries, "card:1") == "late"
        await env.runtime.resolve("card:1", 1)
        assert await env.run(tries, "card:1") == "1"


async def test_a_value_of_another_type_raises_where_it_is_awaited(make_environment):
    async with make_environment(HANDLERS) as env:
        for number, wrong in enumerate(("seven", None, 1.5)):
            await env.runtime.resolve(f"card:{number}", wrong)
            with pytest.raises(OrchestrationFailed, match=f"promise 'card:{number}': Expected"):
                await env.run(pays, f"card:{number}")


async def test_bad_keys_and_ids_of_something_else_are_refused(make_environment):
    async with make_environment(HANDLERS) as env:
        with pytest.raises(InvalidValue):
            await env.runtime.resolve("", 1)
        with pytest.raises(InvalidValue, match="at most"):
            await env.runtime.resolve("k" * 250, 1)
        await env.start(waits, id="promise:taken")
        with pytest.raises(InvalidValue, match="not a promise"):
            await env.runtime.resolve("taken", 1)
    with pytest.raises(NotInOrchestration):
        promise("card:1")


async def test_a_promise_that_an_operator_ended_cannot_be_answered(make_environment):
    async with make_environment(HANDLERS) as env:
        await env.start(pays, "card:1")
        await env.settle()
        await env.runtime.get("promise:card:1").terminate("no")
        with pytest.raises(AlreadyResolved, match="terminated by an operator"):
            await env.runtime.resolve("card:1", 1)


async def test_crashes_at_every_commit_change_nothing():
    assert await assert_crash_safe(tries, "nothing", handlers=HANDLERS) > 4


def test_promises_resolved_by_processes_before_during_and_after_the_wait(tmp_path):
    """Each of 400 promises is resolved by two of four processes; every wait gets its value."""
    path, count = tmp_path / "store.db", 400

    async def resolve(number):
        async with Client(SqliteProvider(path)) as client:
            for place in range(count):
                if number in {place % 4, (place + 1) % 4}:
                    await client.resolve(f"k-{place}", place)

    async def work():
        options = RuntimeOptions(poll_interval=1)
        async with Runtime(SqliteProvider(path), HANDLERS, options=options) as runtime:
            await runtime.start_many(
                pays, [(f"w-{place}", (f"k-{place}",)) for place in range(count)]
            )
            results = [await runtime.get(f"w-{place}", pays).result() for place in range(count)]
            assert results == list(range(count))
            async for view in runtime.admin.instances():
                assert view.status is Status.COMPLETED, view

    children = [fork(resolve, number) for number in range(4)]
    time.sleep(0.2)
    children.append(fork(work))
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
