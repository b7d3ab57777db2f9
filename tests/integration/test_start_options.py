"""Starts with a message, restarts, times, and activities as jobs."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from campaigns.runtime_kill import _fork as fork
from integration.conditions import reached, until, waiting
from perdure import (
    BlockingClient,
    Client,
    InstanceFinished,
    InvalidValue,
    OrchestrationFailed,
    Runtime,
    Status,
    UsageError,
    activity,
    activity_info,
    current,
    next_message,
    orchestration,
)
from perdure.errors import AlreadyExists, NotRegistered, PayloadError
from perdure.testing import assert_replays


@orchestration
async def chat(name: str) -> list[str]:
    heard = [name]
    while heard[-1] != "end":
        heard.append(await next_message("inbox", str))
    return heard


@orchestration
async def other() -> str:
    return await next_message("inbox", str)


@orchestration
async def due() -> str:
    return str(current().scheduled_for)


@activity
async def double(number: int, *, add: int = 0) -> int:
    return number * 2 + add


@activity
def fail(text: str) -> None:
    raise LookupError(text)


class Billing:
    @activity
    async def bill(self, order: str) -> str:
        return f"{order} in attempt {activity_info().attempt}"


HANDLERS = [chat, other, due, double, fail]


async def test_a_message_comes_with_the_start_or_to_what_runs_on_every_store(make_every_store):
    async with Runtime(make_every_store(), HANDLERS) as runtime:
        for text in ("a", "b", "end"):
            handle = await runtime.start(chat, "ann", id="c-1", message=("inbox", text))
        assert await handle.result() == ["ann", "a", "b", "end"]
        with pytest.raises(InstanceFinished, match="if_exists='restart'"):
            await runtime.start(chat, "ann", id="c-1", message=("inbox", "x"))
        again = await runtime.start(
            chat, "ann", id="c-1", message=("inbox", "end"), if_exists="restart"
        )
        assert await again.result() == ["ann", "end"]


async def test_a_client_starts_with_a_message_through_the_queue(make_runtime, tmp_path):
    store = tmp_path / "store.db"
    async with Client(store) as client:
        await client.start(chat, "ann", id="c-1", message=("inbox", "a"))
        await client.start("chat", "ann", id="c-1", message=("inbox", "b"))
        await client.start(chat, "bob", id="c-2", message=("inbox", "end"), delay=0.01)
    async with Runtime(store, HANDLERS) as runtime:
        await runtime.get("c-1").send_message("inbox", "end")
        assert await runtime.get("c-1", chat).result() == ["ann", "a", "b", "end"]
        assert await runtime.get("c-2", chat).result() == ["bob", "end"]
        assert_replays(await runtime.history("c-1"), chat)


async def test_what_exists_decides(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        first = await runtime.start(chat, "ann", id="c-1", message=("inbox", "a"))
        with pytest.raises(AlreadyExists, match="exists already"):
            await runtime.start(chat, "ann", id="c-1", message=("inbox", "x"), if_exists="fail")
        with pytest.raises(AlreadyExists, match="instance of 'chat'"):
            await runtime.start(other, id="c-1", message=("inbox", "x"), if_exists="restart")
        await waiting(runtime, "c-1")
        with pytest.raises(AlreadyExists, match="was started with"):
            await runtime.start(chat, "bob", id="c-1", message=("inbox", "x"), if_changed="fail")
        await runtime.start(chat, "ann", id="c-1", if_exists="restart", message=("inbox", "end"))
        assert await first.result() == ["ann", "a", "end"]
        new = await runtime.start(
            chat, "bob", id="c-1", if_exists="replace", message=("inbox", "end")
        )
        assert await new.result() == ["bob", "end"]
        with pytest.raises(AlreadyExists, match="instance of 'chat'"):
            await runtime.start(other, id="c-1", if_exists="restart")
        assert (await runtime.describe("c-1")).status is Status.COMPLETED


async def test_a_failed_instance_is_restarted(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(fail, "no", id="j-1")
        with pytest.raises(OrchestrationFailed, match="no"):
            await handle.result()
        created = (await handle.describe()).created_at
        again = await runtime.start(fail, "no", id="j-1", if_exists="restart")
        await reached(runtime, "j-1", Status.FAILED)
        assert (await again.describe()).created_at >= created
        assert len([view async for view in runtime.admin.instances()]) == 1


async def test_bad_options_are_refused(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        for message in ("inbox", ("inbox",), ("a", "b", "c"), 5):
            with pytest.raises(UsageError, match="a mailbox and a value"):
                await runtime.start(chat, "ann", message=message)
        with pytest.raises(InvalidValue, match="queue name"):
            await runtime.start(chat, "ann", message=("", 1))
        with pytest.raises(PayloadError, match="message for inbox"):
            await runtime.start(chat, "ann", message=("inbox", object()))
        for at in (datetime(2030, 1, 1), "2030-01-01", 5):  # noqa: DTZ001
            with pytest.raises(InvalidValue, match="at must be a datetime with a time zone"):
                await runtime.start(due, at=at)
        with pytest.raises(UsageError, match="not both"):
            await runtime.start(due, at=datetime.now(UTC), delay=5)
        with pytest.raises(UsageError, match="'restart' or 'replace'"):
            await runtime.start(due, if_exists="again")
        with pytest.raises(UsageError, match="start each"):
            await runtime.start_many(due, [("d-1", ())], if_exists="restart")
        assert [view async for view in runtime.admin.instances()] == []


@dataclass
class Order:
    item: str
    count: int = 1


@orchestration
async def order(wanted: Order, note: str = "") -> str:
    return f"{wanted.count} {wanted.item}{note}"


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("order", (5,), r"arguments \(wanted, note\) of orchestration 'order'"),
        ("order", (), "orchestration 'order'"),
        ("order", ({"item": "lamp"}, "", "one too many"), "orchestration 'order'"),
        ("activity:double", ("two",), "activity 'double'"),
    ],
)
async def test_a_start_by_name_is_refused_where_the_code_is_known(name, args, said, make_runtime):
    async with make_runtime([order, double]) as runtime:
        with pytest.raises(PayloadError, match=said):
            await runtime.start(name, *args)
        with pytest.raises(PayloadError, match=said):
            await runtime.start(name, *args, delay=5)
        with pytest.raises(PayloadError, match=said):
            await runtime.start_many(name, [("o-1", args)])
        assert [view async for view in runtime.admin.instances()] == []


@pytest.mark.parametrize("wanted", [Order(5), Order("lamp", 1.5), Order("lamp", None)])
async def test_an_object_whose_fields_do_not_fit_is_refused_at_the_start(wanted, make_runtime):
    async with make_runtime([order]) as runtime:
        with pytest.raises(PayloadError, match=r"arguments .* of orchestration 'order'"):
            await runtime.start(order, wanted)


async def test_an_activity_with_the_longest_name_is_a_job(make_runtime):
    name = "a" * (255 - len("activity:"))
    longest = activity(name=name)(double.fn)
    async with make_runtime([longest]) as runtime:
        assert await (await runtime.start(longest, 2)).result() == 4
        assert (f"activity:{name}", "1.0.0") in runtime.registry.startable_keys


async def test_a_start_by_name_takes_json_and_versions_that_others_have(make_runtime):
    async with make_runtime([order]) as runtime:
        handle = await runtime.start("order", {"item": "lamp", "count": 2})
        assert await handle.result() == "2 lamp"
        await runtime.start("order", 5, version="2.0.0", id="elsewhere")
        await runtime.start("not here", 5, id="elsewhere too")


def _now(env):
    return datetime.fromtimestamp(env.runtime.clock.now_ms() / 1000, UTC)


async def test_an_instance_begins_at_its_time(make_environment):
    async with make_environment(HANDLERS) as env:
        at = _now(env) + timedelta(days=3)
        handle = await env.start(due, id="d-1", at=at)
        await env.advance(timedelta(days=3) - timedelta(seconds=1))
        assert (await handle.describe()).status is Status.PENDING
        assert await handle.result() == str(at)
        past = _now(env) - timedelta(days=1)
        assert await env.run(due, at=past) == str(past)
        # A store counts milliseconds: it begins no part of one too early.
        just_after, next_ms = past + timedelta(microseconds=1), past + timedelta(milliseconds=1)
        assert await env.run(due, at=just_after) == str(next_ms)


async def test_an_activity_is_a_job_on_every_store(make_every_store):
    async with Runtime(make_every_store(), [*HANDLERS, Billing()]) as runtime:
        handle = await runtime.start(double, 4, id="j-1")
        assert await handle.result() == 8
        assert (await handle.describe()).name == "activity:double"
        assert await (await runtime.start(double, 4, kwargs={"add": 1})).result() == 9
        assert await (await runtime.start("activity:double", 5)).result() == 10
        assert await (await runtime.start(Billing.bill, "o-1")).result() == "o-1 in attempt 1"
        assert await (await runtime.start(double, 4, id="j-1")).result() == 8
        with pytest.raises(PayloadError):
            await runtime.start(double, "four")
        with pytest.raises(UsageError, match="options of @activity"):
            await runtime.start(double.options(timeout=5), 4)


async def test_a_job_waits_for_a_worker_that_has_its_activity(tmp_path):
    store = tmp_path / "store.db"
    async with Client(store) as client:
        await client.start(double, 4, id="j-1")
    async with Runtime(store, [chat]) as runtime:
        handle = await runtime.start(chat, "ann", message=("inbox", "end"))
        await handle.result()
        assert (await runtime.describe("j-1")).status is Status.PENDING
        assert (await runtime.describe("j-1")).name == "activity:double"
    async with Runtime(store, [double]) as runtime:
        assert await runtime.get("j-1").result() == 8
        with pytest.raises(NotRegistered, match="'nothing' is not registered"):
            runtime.registry.resolve_orchestration("activity:nothing", None)


def test_a_blocking_client_has_the_same_options(tmp_path):
    with BlockingClient(Runtime(tmp_path / "store.db", HANDLERS)) as shop:
        assert shop.start(double, 4).result() == 8
        told = shop.start(chat, "ann", id="c-1", message=("inbox", "end"), if_exists="restart")
        assert told.result() == ["ann", "end"]
        assert shop.start(due, at=datetime(2020, 1, 1, tzinfo=UTC)).result().startswith("2020")


def test_processes_that_start_and_tell_at_once_lose_and_double_nothing(tmp_path):
    """Four processes tell one instance, which each of them would start."""
    path, count = tmp_path / "store.db", 40

    @orchestration
    async def listens() -> list[str]:
        return [await next_message("inbox", str) for _ in range(4 * count)]

    async def tell(number):
        async with Client(path) as client:
            for place in range(count):
                text = f"{number}-{place}"
                await client.start(listens, id="one", if_exists="restart", message=("inbox", text))

    async def work():
        async with Runtime(path, [listens]) as runtime:
            await until(lambda: _exists(runtime))
            heard = await runtime.get("one", listens).result()
            assert sorted(heard) == sorted(f"{n}-{p}" for n in range(4) for p in range(count))
            for number in range(4):  # those of one sender come in order
                own = [text for text in heard if text.startswith(f"{number}-")]
                assert own == [f"{number}-{place}" for place in range(count)]

    children = [fork(tell, number) for number in range(4)]
    children.append(fork(work))
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


async def _exists(runtime):
    return await runtime.admin.count() > 0
