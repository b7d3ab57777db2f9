"""Calls that are written wrongly: each is refused at once, by name, with the way out."""

import asyncio
import math
import re
from datetime import timedelta

import pytest

from patience import HANG_SECONDS
from perdure import BlockingClient, Runtime, orchestration, wait_for_event
from perdure.errors import NotFound, PerdureError, UsageError
from perdure.limits import REASON_CHARACTERS_MAX
from perdure.providers.records import InstanceQuery


@orchestration
async def gate(value: int) -> int:
    return await wait_for_event("go", int)


CALLED = [
    (lambda c: c.start(gate, 1, delay=True), "delay.*seconds.*True"),
    (lambda c: c.start(gate, 1, delay=1e15), "delay.*seconds.*1000000000000000"),
    (lambda c: c.start(gate, 1, delay=timedelta(-1)), "delay must be at least 0 seconds"),
    (lambda c: c.start(gate, 1, delay=[]), r"delay.*number of seconds or a timedelta, not \[\]"),
    (lambda c: c.start(5, 1), "start takes an orchestration or its name, not 5"),
    (lambda c: c.start("gate", kwargs={"value": 1}), "'gate' is started by its name.*by position"),
    (lambda c: c.start(gate, kwargs=[1]), r"kwargs takes a dict.*\[1\]"),
    (lambda c: c.start_many(gate, 5), "pairs.*5"),
    (lambda c: c.start_many(gate, None), "pairs.*None"),
    (lambda c: c.start_many(gate, "ab"), "pairs.*'ab'"),
    (lambda c: c.start_many(gate, [("a",)]), r"pairs.*\('a',\)"),
    (lambda c: c.start_many(gate, ["ab"]), "pairs.*'ab'"),
    (lambda c: c.start_many(gate, {"q": (1,)}), r"pairs.*\.items\(\)"),
    (lambda c: c.get("w").result("1"), "timeout.*seconds.*'1'"),
    (lambda c: c.get("w").result(math.nan), "timeout.*seconds.*nan"),
    (lambda c: c.get("w").result(math.inf), "timeout.*inf.*None"),
    (lambda c: c.get("w").result(1e300), "timeout.*seconds.*1e\\+300"),
    (lambda c: c.get("w").result(True), "timeout.*seconds.*True"),
    (lambda c: c.get("w").result([]), r"timeout.*seconds or a timedelta, not \[\]; None waits"),
    (lambda c: c.get("w").wait_for_status_change(0, "x"), "timeout.*seconds.*'x'"),
    (lambda c: c.get("w").wait_for_status_change("1"), "last_seen_version.*integer.*'1'"),
    (lambda c: c.get("w").wait_for_status_change(None), "last_seen_version.*integer.*None"),
    (lambda c: c.history("w", 0), "execution_id must be.* 1.*0"),
    (lambda c: c.history("w", 1.5), "execution_id must be an integer.*1.5"),
    (lambda c: c.history("w", "1"), "execution_id must be an integer.*'1'"),
    (lambda c: c.history("w", -1), "execution_id must be.* 1.*-1"),
    (lambda c: c.get("w").state(5), "key must be a string.*5"),
    (lambda c: c.get("w").state("x", 5), "state.*'x'.*5"),
    (lambda c: c.admin.page({}), r"InstanceQuery\(.*\{\}"),
    (lambda c: c.admin.count({}), r"InstanceQuery\(.*\{\}"),
    (lambda c: c.admin.count(""), r"InstanceQuery\(.*''"),
    (lambda c: c.admin.page(limit="5"), "limit.*integer.*'5'"),
    (lambda c: c.admin.page(limit=True), "limit.*integer.*True"),
    (lambda c: c.admin.page(cursor=5), "cursor must be a string.*5"),
    (lambda c: c.admin.delete_many(5), r"InstanceQuery\(.*5"),
    (lambda c: c.admin.delete_many(None), r"InstanceQuery\(.*None"),
    (lambda c: c.admin.delete_many({}), r"InstanceQuery\(.*\{\}"),
    (lambda c: c.admin.prune_many(5), r"InstanceQuery\(.*5"),
    (lambda c: c.admin.prune_many(InstanceQuery(), {}), r"PruneOptions\(.*\{\}"),
    (lambda c: c.admin.prune("w", 5), r"PruneOptions\(.*5"),
    (lambda c: c.admin.prune("w", {}), r"PruneOptions\(.*\{\}"),
]


@pytest.mark.parametrize(("call", "said"), CALLED, ids=[said for _, said in CALLED])
async def test_a_call_with_wrong_values_is_refused(call, said):
    async with Runtime("memory:", [gate]) as runtime:
        await runtime.start(gate, 1, id="w")
        with pytest.raises(UsageError, match=said):
            await call(runtime)
        assert await runtime.admin.count() == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.history("nobody"),
        lambda c: c.history("nobody", 1),
        lambda c: c.history("w", 99),
        lambda c: c.admin.executions("nobody"),
    ],
)
async def test_what_does_not_exist_is_not_empty(call, make_runtime):
    async with make_runtime([gate]) as runtime:
        await runtime.start(gate, 1, id="w")
        with pytest.raises(NotFound):
            await call(runtime)


async def test_what_has_not_begun_has_no_history_yet(make_runtime):
    async with make_runtime([gate]) as runtime:
        handle = await runtime.start(gate, 1, delay=60)

        assert await handle.history() == []
        assert await runtime.admin.executions(handle.id) == []
        assert await handle.history((await handle.describe()).execution_id) == []
        with pytest.raises(NotFound, match="has no execution 2; its latest is 1"):
            await handle.history(2)


async def test_time_that_is_over_is_no_mistake():
    async with Runtime("memory:", [gate]) as runtime:
        handle = await runtime.start(gate, 1)
        with pytest.raises(TimeoutError):
            await handle.result(-1)


WRONG_REASONS = [
    (None, "reason must be a string.*None"),
    (404, "reason must be a string.*404"),
    (object(), "reason must be a string"),
    ("\ud800", "reason.*lone surrogate"),
    ("x" * (REASON_CHARACTERS_MAX + 1), f"{REASON_CHARACTERS_MAX + 1} characters"),
]


@pytest.mark.parametrize("verb", ["cancel", "terminate"])
@pytest.mark.parametrize(("reason", "said"), WRONG_REASONS, ids=[said for _, said in WRONG_REASONS])
async def test_a_reason_that_no_history_could_keep_is_refused(verb, reason, said):
    async with Runtime("memory:", [gate]) as runtime:
        handle = await runtime.start(gate, 1, id="w")
        with pytest.raises(UsageError, match=said):
            await getattr(handle, verb)(reason)
        with pytest.raises(UsageError, match=said):
            await getattr(runtime, verb)("w", reason)

        await handle.raise_event("go", 3)
        assert await handle.result(HANG_SECONDS) == 3


@pytest.mark.parametrize("verb", ["cancel", "terminate"])
async def test_the_longest_reason_is_kept_with_the_instance(verb):
    reason = "é" * REASON_CHARACTERS_MAX
    async with Runtime("memory:", [gate]) as runtime:
        handle = await runtime.start(gate, 1)
        await getattr(handle, verb)(reason)
        with pytest.raises(PerdureError, match=reason):
            await handle.result(HANG_SECONDS)
        assert (await handle.history())[-1].reason == reason


def test_a_blocking_client_says_how_a_call_is_written():
    with BlockingClient(Runtime("memory:", [gate])) as portal:
        said = re.escape("write call(client.start, ...) without calling it")
        with pytest.raises(UsageError, match=said):
            portal.call(portal.client.start(gate, 1))
        for wrong in (None, 5, "start"):
            with pytest.raises(UsageError, match=f"a method and its arguments.*{wrong!r}"):
                portal.call(wrong)
        with pytest.raises(UsageError, match="gave 5, which cannot be awaited"):
            portal.call(lambda: 5)
        handle = portal.call(portal.client.start, gate, 1)
        with pytest.raises(UsageError, match="reason"):
            portal.call(handle.cancel, None)
        with pytest.raises(UsageError, match="entered already; make another one"):
            portal.__enter__()
        assert portal.call(portal.client.admin.count) == 1
    with pytest.raises(UsageError, match="entered already; make another one"), portal:
        pass


def test_a_coroutine_for_a_client_that_is_not_open_is_not_left_behind():
    portal = BlockingClient(Runtime("memory:", [gate]))
    with pytest.raises(UsageError, match="without calling it"):
        portal.call(portal.client.start(gate, 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda r: r.start(gate, 1),
        lambda r: r.start_many(gate, [("a", (1,)), ("b", (1,))]),
        lambda r: r.start("gate", 1),
        lambda r: r.get("w").result(HANG_SECONDS),
    ],
)
async def test_a_runtime_is_used_on_its_own_event_loop(call):
    async with Runtime("memory:", [gate]) as runtime:
        await runtime.start(gate, 1, id="w")

        def elsewhere():
            with pytest.raises(UsageError, match=r"another event loop.*run_coroutine_threadsafe"):
                asyncio.run(call(runtime))

        await asyncio.to_thread(elsewhere)
        assert await runtime.admin.count() == 1
