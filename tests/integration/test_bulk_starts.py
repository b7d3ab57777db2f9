"""Starting many instances with one call, on a runtime that runs them itself."""

import asyncio

import pytest

from integration.conditions import reached
from patience import HANG_SECONDS
from perdure import Client, Status, activity, orchestration, wait_for_event
from perdure.errors import AlreadyExists, PayloadError


@activity
async def double(n: int) -> int:
    return 2 * n


@orchestration
async def quick(n: int) -> int:
    return await double(n)


@orchestration
async def patient(n: int) -> int:
    return n + await wait_for_event("more", int)


HANDLERS = [double, quick, patient]


async def test_more_than_fit_into_memory_are_all_started_and_finished(make_runtime):
    async with make_runtime(HANDLERS, cached_instances=40) as runtime:
        handles = await runtime.start_many(quick, [(f"q-{n}", (n,)) for n in range(450)])

        assert [await handle.result(HANG_SECONDS) for handle in handles] == [
            2 * n for n in range(450)
        ]
        assert await runtime.admin.count() == 450


async def test_a_bulk_start_puts_no_waiting_instance_out_of_memory(make_runtime):
    async with make_runtime(HANDLERS, cached_instances=10, always_replay=False) as runtime:
        waiting = await runtime.start_many(patient, [(f"p-{n}", (n,)) for n in range(8)])
        held = {one.id for one in waiting if runtime._running.orchestrations.ended(one.id)}

        await runtime.start_many(patient, [(f"more-{n}", (n,)) for n in range(30)], delay=3600)
        quick_ones = await runtime.start_many(quick, [(f"q-{n}", (n,)) for n in range(2)])

        assert held == {f"p-{n}" for n in range(8)}
        assert all(runtime._running.orchestrations.ended(one) for one in held)
        assert [await one.result(HANG_SECONDS) for one in quick_ones] == [0, 2]


async def test_a_cancelled_bulk_start_leaves_whole_instances(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        starting = asyncio.ensure_future(
            runtime.start_many(quick, [(f"q-{n}", (n,)) for n in range(500)])
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

        again = await runtime.start_many(quick, [(f"q-{n}", (n,)) for n in range(500)])
        assert [await one.result(HANG_SECONDS) for one in again] == [2 * n for n in range(500)]


async def test_a_bulk_start_with_arguments_that_do_not_fit_is_parked(make_runtime):
    @orchestration(name="quick")
    async def quick_of_older_code(n: str) -> int: ...

    async with make_runtime(HANDLERS) as runtime:
        await runtime.start_many(quick, [("fits", (1,))])
        await runtime.start_many(quick_of_older_code, [("not", ("one",))])

        assert await runtime.get("fits", quick).result(HANG_SECONDS) == 2
        await reached(runtime, "not", Status.BLOCKED)


async def test_an_id_that_is_in_use_gives_the_instance_that_has_it(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        first = await runtime.start(patient, 1, id="a")

        again, other = await runtime.start_many(patient, [("a", (100,)), ("b", (10,))])
        await asyncio.gather(*[one.raise_event("more", 5) for one in (first, other)])

        assert [await one.result(HANG_SECONDS) for one in (first, again, other)] == [6, 6, 15]


async def test_an_id_that_occurs_twice_is_started_once(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        one, two = await runtime.start_many(quick, [("same", (4,)), ("same", (9,))])

        assert await one.result(HANG_SECONDS) == await two.result(HANG_SECONDS) == 8


async def test_starts_that_must_not_exist_are_refused_by_name(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        await runtime.start(quick, 1, id="taken")

        with pytest.raises(AlreadyExists, match="1 of 2 ids exist already") as refused:
            await runtime.start_many(quick, [("taken", (1,)), ("free", (2,))], if_exists="fail")

        assert "taken" in str(refused.value)
        assert await runtime.get("free", quick).result(HANG_SECONDS) == 4


@pytest.mark.parametrize("starts", [1, 700])
async def test_an_id_of_another_orchestration_is_refused_by_name(make_runtime, starts):
    async with make_runtime(HANDLERS) as runtime:
        await runtime.start(patient, 1, id="theirs")
        given = [(f"free-{n}", (n,)) for n in range(starts)]

        with pytest.raises(AlreadyExists, match=r"1 of .* belong to another .*'theirs'"):
            await runtime.start_many(quick, [*given, ("theirs", (1,))])

        assert await runtime.get("free-0", quick).result(HANG_SECONDS) == 0
        assert len(await runtime.start_many(quick, given)) == starts


async def test_an_orchestration_without_code_here_waits_in_the_queue(make_runtime, make_provider):
    provider = make_provider()
    async with make_runtime([double, quick], provider) as runtime:
        await runtime.start_many(patient, [("p", (1,))])

        await reached(Client(provider), "p", Status.PENDING)


async def test_one_argument_of_the_wrong_type_refuses_all_before_any_is_started(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        with pytest.raises(PayloadError, match="quick"):
            await runtime.start_many(quick, [("good", (1,)), ("bad", ("two",))])

        assert await runtime.admin.count() == 0
