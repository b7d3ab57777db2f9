"""Retention deletes ended trees after their time on every store, and never what runs."""

import asyncio
from datetime import timedelta
from types import SimpleNamespace

import pytest

from integration.conditions import until
from perdure import (
    InMemoryProvider,
    Runtime,
    activity,
    orchestration,
    promise,
    wait_for_event,
)
from perdure.client.retention import Retention, keep_rules, retention_by_worker
from perdure.clock import ManualClock
from perdure.errors import InvalidValue, OrchestrationFailed
from perdure.model.status import Status
from perdure.providers.records import KeepRule, WorkerInfo
from perdure.runtime import housekeeping

DAY_MS = 86_400_000


@activity
async def echo(value: str) -> str:
    return value


@orchestration
async def leaf(value: str) -> str:
    return await echo(value)


@orchestration
async def tree(value: str) -> list[str]:
    return list(await asyncio.gather(*(leaf(f"{value}{each}") for each in range(3))))


@orchestration
async def fails() -> None:
    raise LookupError("no such order")


@orchestration
async def waits() -> str:
    await leaf("done")
    return await wait_for_event("go", str)


@orchestration
async def awaits(key: str) -> int:
    return await promise(key, int)


@orchestration(keep={"completed": "7d", "failed": "forever"})
async def own(is_bad: bool) -> None:
    if is_bad:
        raise LookupError("kept forever")


@orchestration
async def leaves_a_child() -> None:
    child = waits.options(id="left", on_parent_close="abandon")()
    await echo("started")
    del child


HANDLERS = [echo, leaf, tree, fails, waits, awaits, own, leaves_a_child]


@pytest.fixture
def quick(monkeypatch):
    """Let housekeeping look all the time, in pages of two, and hardly pause."""
    monkeypatch.setattr(housekeeping, "_DELETE_SECONDS", 0.02)
    monkeypatch.setattr(housekeeping, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("perdure.client.retention._PAGE_ITEMS", 2)


async def ids(runtime):
    return {each.id async for each in runtime.admin.instances()}


async def until_only(runtime, expected):
    async def is_so():
        return await ids(runtime) == expected

    await until(is_so)


async def test_ended_trees_go_and_running_ones_stay_on_every_store(make_every_store, quick):
    keep = {"completed": 0, "failed": timedelta(days=90), "cancelled": "0s", "terminated": 0.0}
    async with Runtime(make_every_store(), HANDLERS, keep=keep) as runtime:
        running = await runtime.start(waits, id="running")
        await runtime.start(fails, id="failed")
        for each in ("cancelled", "terminated"):
            await runtime.start(waits, id=each)
        await runtime.start(leaves_a_child, id="leaver")
        for each in "abcde":
            await runtime.start(tree, each, id=f"tree-{each}")
        await runtime.start(echo, "job", id="job")
        await runtime.resolve("early", 1)
        await runtime.cancel("cancelled", reason="enough")
        await runtime.terminate("terminated", reason="enough")

        # The child of the running root has ended, and stays; so does the root of a running child.
        await until_only(
            runtime, {"running", "running::1.2", "failed", "leaver", "left", "left::1.2"}
        )

        await runtime.raise_event("left", "go", "now")
        await until_only(runtime, {"running", "running::1.2", "failed"})
        await running.raise_event("go", "now")
        await until_only(runtime, {"failed"})


async def test_each_goes_at_its_own_time(quick):
    clock = ManualClock()
    keep = {"completed": "30d", "failed": "90d"}
    async with Runtime(InMemoryProvider(clock=clock), HANDLERS, keep=keep) as runtime:
        await (await runtime.start(tree, "x", id="tree")).result()
        await (await runtime.start(own, False, id="own")).result()
        for handler, each, arguments in ((fails, "failed", ()), (own, "own-bad", (True,))):
            with pytest.raises(OrchestrationFailed):
                await (await runtime.start(handler, *arguments, id=each)).result()
        rest = await ids(runtime)
        assert len(rest) == 7

        for days, gone in (
            (7, {"own"}),
            (23, {each for each in rest if "tree" in each}),
            (60, {"failed"}),
        ):
            clock.advance(days * DAY_MS - 60_000)
            await rounds_pass(runtime, clock)
            assert await ids(runtime) == rest
            clock.advance(60_000)
            rest -= gone
            await passing_until_only(runtime, clock, rest)
        clock.advance(1_000 * DAY_MS)
        await rounds_pass(runtime, clock)
        assert await ids(runtime) == {"own-bad"}


async def passing_until_only(runtime, clock, expected):
    async def is_so():
        clock.advance(25)
        return await ids(runtime) == expected

    await until(is_so)


async def rounds_pass(runtime, clock):
    """Let housekeeping look three times, with time that hardly passes."""
    looked = 0
    admin = runtime.provider.admin
    list_workers = admin.list_workers

    def counted():
        nonlocal looked
        looked += 1
        return list_workers()

    async def has_looked():
        clock.advance(25)
        return looked >= 3

    admin.list_workers = counted
    try:
        await until(has_looked)
    finally:
        del admin.list_workers


async def test_the_bound_is_exact_on_every_store(make_every_store):
    own_keep = {"own": {Status.COMPLETED: 7 * DAY_MS, Status.FAILED: None}}
    rules = keep_rules({Status.COMPLETED: 30 * DAY_MS, Status.FAILED: 0}, own_keep)
    retention = Retention(rules)
    async with Runtime(make_every_store(), HANDLERS) as runtime:
        for handler, each, argument in ((tree, "tree", "x"), (own, "own", False)):
            await (await runtime.start(handler, argument, id=each)).result()
        with pytest.raises(OrchestrationFailed):
            await (await runtime.start(own, True, id="own-bad")).result()
        admin = runtime.provider.admin

        async def due(now_ms):
            found = [
                each async for batch in retention.due(admin, now_ms) for each in batch.instance_ids
            ]
            assert len(found) == await retention.count_due(admin, now_ms)
            return found

        ended = {
            each: (await admin.get_instance_info(each)).completed_at_ms for each in ("tree", "own")
        }
        assert "own" not in await due(ended["own"] + 7 * DAY_MS)
        assert await due(ended["own"] + 7 * DAY_MS + 1) == ["own"]
        assert "tree" not in await due(ended["tree"] + 30 * DAY_MS)
        assert "tree" in await due(ended["tree"] + 30 * DAY_MS + 1)
        assert sorted(await due(ended["tree"] + 9_000 * DAY_MS)) == ["own", "tree"]


async def test_instances_that_are_kept_forever_are_not_read_again_and_again(make_every_store):
    own_keep = {"own": {Status.COMPLETED: None}}
    rules = keep_rules({Status.COMPLETED: 0}, own_keep)
    retention = Retention(rules, frozenset({"own", "leaf", "tree"}))
    async with Runtime(make_every_store(), HANDLERS) as runtime:
        for each in range(3):
            await (await runtime.start(own, False, id=f"own-{each}")).result()
        await (await runtime.start(leaf, "x", id="leaf")).result()
        admin = runtime.provider.admin
        list_instances, read = admin.list_instances, []

        async def noted(*args, **named):
            page = await list_instances(*args, **named)
            read.extend(each.instance_id for each in page.instances)
            return page

        admin.list_instances = noted
        found = [each async for each in retention.due(admin, 2**42)]
        assert [each.instance_ids for each in found] == [("leaf",)]
        assert read == ["leaf"]


async def test_a_store_that_answers_slowly_is_asked_less_often(monkeypatch):
    slept = []
    clock = ManualClock()
    monkeypatch.setattr(clock, "sleep", noting(clock.sleep, slept))
    times = iter(range(0, 1_000_000, 3))  # each look at the time is three seconds later
    monkeypatch.setattr(housekeeping, "time", SimpleNamespace(monotonic=lambda: next(times)))
    provider = InMemoryProvider(clock=clock)
    async with Runtime(provider, HANDLERS) as runtime:
        await (await runtime.start(leaf, "x", id="leaf")).result()
    clock.advance(1)
    async with Runtime(provider, HANDLERS, keep={"completed": 0}) as runtime:
        await passing_until_only(runtime, clock, set())
    assert 12 in slept


def noting(sleep, slept):
    async def noted(seconds):
        slept.append(seconds)
        await sleep(seconds)

    return noted


async def test_two_workers_at_once_do_no_harm(make_every_store, quick):
    provider = make_every_store()
    async with Runtime(provider, HANDLERS, keep={"completed": 0}) as runtime:
        running = await runtime.start(waits, id="running")
        for each in range(20):
            await runtime.start(tree, "x", id=f"tree-{each}")
        retention = Retention(keep_rules({Status.COMPLETED: 0}, {}))

        async def other():
            while len(await ids(runtime)) > 2:
                await asyncio.sleep(0.001)  # the store in memory answers without a turn of the loop
                async for batch in retention.due(provider.admin, runtime.clock.now_ms()):
                    await provider.admin.delete_instance_bulk(batch)

        await asyncio.gather(other(), other())
        await until_only(runtime, {"running", "running::1.2"})
        await running.raise_event("go", "now")
        await until_only(runtime, set())


async def test_a_promise_and_its_waiter_go_when_they_have_ended(quick):
    async with Runtime(InMemoryProvider(), HANDLERS, keep={"completed": 0}) as runtime:
        await runtime.start(awaits, "key", id="awaits")
        await until_only(runtime, {"awaits", "promise:key"})
        await runtime.resolve("key", 1)
        await until_only(runtime, set())


async def test_orchestrations_without_code_here_stay(quick):
    provider = InMemoryProvider()
    async with Runtime(provider, HANDLERS) as runtime:
        await (await runtime.start(leaf, "x", id="leaf")).result()
        await (await runtime.start(own, False, id="own")).result()
    async with Runtime(provider, [leaf, echo], keep={"completed": 0}) as runtime:
        await until_only(runtime, {"own"})


async def test_without_keep_everything_stays():
    async with Runtime(InMemoryProvider(), [leaf, echo]) as runtime:
        (worker,) = await announced(runtime)
        assert worker.keep == ()
        assert retention_by_worker([worker]) == {}


async def announced(runtime):
    async def is_listed():
        return bool(await runtime.admin.workers())

    await until(is_listed)
    return await runtime.admin.workers()


def worker(worker_id, names, keep):
    return WorkerInfo(
        worker_id=worker_id,
        host="h",
        process_id=1,
        started_at_ms=1,
        framework_version="1.0.0",
        handlers=tuple((name, "1.0.0") for name in names),
        keep=keep,
    )


def test_of_two_workers_with_the_same_code_one_deletes():
    rules = (KeepRule(status=Status.COMPLETED, kept_ms=5),)
    shares = retention_by_worker(
        [worker("c", "xyz", rules), worker("b", "xy", rules), worker("a", "xyz", ())]
    )

    assert set(shares) == {"b", "c"}  # a has no rules
    assert [shares["b"].kept_ms(name, Status.COMPLETED) for name in "xyz"] == [5, 5, None]
    assert [shares["c"].kept_ms(name, Status.COMPLETED) for name in "xyz"] == [None, None, 5]


BAD = [
    ({"done": "30d"}, "'done', which is none of 'completed', 'failed', 'cancelled', 'terminated'"),
    ({"complete": "30d"}, "did you mean 'completed'"),
    ({1: "30d"}, "1, which is none of"),
    ({"completed": "soon"}, r"keep\['completed'\]: 'soon' is no length of time; .*or 'forever'"),
    ({"completed": "-3d"}, "'-3d' is no length of time"),
    ({"failed": -1}, r"keep\['failed'\] must be at least 0 seconds, not -1"),
    ({"failed": timedelta(days=-1)}, "must be at least 0 seconds"),
    ({"failed": float("nan")}, "must be a number of seconds or a timedelta"),
    ({"failed": None}, "must be a number of seconds or a timedelta, not None"),
    ({"failed": True}, "must be a number of seconds"),
    ("30d", "must be a dict such as .* not '30d'"),
    (["completed"], "must be a dict such as"),
]


@pytest.mark.parametrize(("keep", "message"), BAD, ids=repr)
def test_bad_input_is_refused_at_once(keep, message):
    with pytest.raises(InvalidValue, match=message):
        Runtime(InMemoryProvider(), [leaf, echo], keep=keep)

    async def flow() -> None: ...

    with pytest.raises(
        InvalidValue, match=f"keep of orchestration 'flow'.*{message.removeprefix('keep')}"
    ):
        orchestration(keep=keep)(flow)
