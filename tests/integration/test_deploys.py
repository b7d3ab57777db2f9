"""Effects of a deploy on running instances: versions, changed code, missing code, bad data."""

import asyncio

import pytest

from integration.conditions import reached, until, waiting
from patience import HANG_SECONDS
from perdure import (
    InMemoryProvider,
    Runtime,
    RuntimeOptions,
    Status,
    activity,
    continue_as_new,
    orchestration,
    wait_for_event,
)
from perdure.errors import WaitTimeout
from perdure.model.failures import Block, BlockReason
from perdure.providers.records import HistoryRecord, OrchestratorMessage
from perdure.providers.sqlite.memory import MemoryStore
from perdure.runtime import housekeeping
from perdure.runtime.housekeeping import Housekeeping


@activity
async def note(text: str) -> str:
    return text


@activity
async def other(text: str) -> str:
    return text


def version_1():
    @orchestration(name="flow", version="1.0.0")
    async def flow(round_: int) -> str:
        await note("one")
        await wait_for_event("go", None)
        if round_:
            continue_as_new(round_ - 1)
        return "1.0.0"

    return flow


def version_2():
    @orchestration(name="flow", version="2.0.0")
    async def flow(round_: int) -> str:
        await other("two")
        return "2.0.0"

    return flow


def changed_version_1():
    @orchestration(name="flow", version="1.0.0")
    async def flow(round_: int) -> str:
        await other("one")
        await wait_for_event("go", None)
        return "changed"

    return flow


def _runtime(store, *handlers):
    options = RuntimeOptions(orchestration_lock_timeout=1, activity_lock_timeout=1)
    return Runtime(InMemoryProvider(store=store), [*handlers, note, other], options=options)


async def test_a_started_instance_keeps_its_version():
    store = MemoryStore()
    async with _runtime(store, version_1()) as old:
        await old.start(version_1(), 0, id="f")
        await waiting(old, "f")
    async with _runtime(store, version_1(), version_2()) as new:
        await new.raise_event("f", "go")

        assert await new.get("f").result(HANG_SECONDS) == "1.0.0"


async def test_the_latest_version_is_taken_at_continue_as_new():
    store = MemoryStore()
    async with _runtime(store, version_1()) as old:
        await old.start(version_1(), 1, id="f")
        await waiting(old, "f")
    async with _runtime(store, version_1(), version_2()) as new:
        await new.raise_event("f", "go")

        assert await new.get("f").result(HANG_SECONDS) == "2.0.0"
        assert (await new.describe("f")).version == "2.0.0"


async def test_a_waiter_for_a_blocked_instance_learns_why(caplog):
    store = MemoryStore()
    async with _runtime(store, version_1()) as runtime:
        await runtime.start("flow", 0, id="f")
        await waiting(runtime, "f")
    async with _runtime(store, changed_version_1()) as broken:
        await broken.raise_event("f", "go")
        await reached(broken, "f", Status.BLOCKED)

        with pytest.raises(
            WaitTimeout,
            match=r"goes on: Blocked for .*: its code no longer does what its history says: "
            r"orchestration 'flow'",
        ):
            await broken.get("f").result(0.05)
        with pytest.raises(WaitTimeout, match="has not set"):
            await broken.get("f").wait_for_state("stage", timeout=0)

    said = [record for record in caplog.records if record.name == "perdure.client"]
    assert [record.levelname for record in said] == ["WARNING", "WARNING"]
    assert all("'f' is Blocked: orchestration 'flow'" in each.getMessage() for each in said)


async def test_a_version_that_only_another_worker_has_takes_over_at_continue_as_new():
    @orchestration(name="flow", version="1.0.0")
    async def leaving(round_: int) -> str:
        continue_as_new(round_, version="2.0.0")

    store = MemoryStore()
    async with _runtime(store, leaving) as old, _runtime(store, version_2()) as new:
        await old.start(leaving, 0, id="f")

        assert await new.get("f").result(HANG_SECONDS) == "2.0.0"


async def test_what_old_code_blocks_beside_new_code_goes_on_too(monkeypatch):
    looks = []
    look = Housekeeping.retry_blocked

    async def counted(self):
        await look(self)
        looks.append(1)

    monkeypatch.setattr(housekeeping, "_UNBLOCK_SECONDS", 0.05)
    monkeypatch.setattr(Housekeeping, "retry_blocked", counted)
    store = MemoryStore()
    async with _runtime(store, version_1()) as old:
        await old.start(version_1(), 0, id="f")
        await waiting(old, "f")
    async with _runtime(store, version_1()) as new:
        await until(lambda: _is_true(looks))
        # As a worker with the old code does that still runs.
        fetched = await new.provider.admin.lock_instance("f", 1000)
        block = Block(reason=BlockReason.NONDETERMINISM, message="changed", code="old code")
        await new.provider.abandon_orchestration_item(fetched.lock_token, 10**9, block=block)
        await new.raise_event("f", "go")

        assert await new.get("f").result(HANG_SECONDS) == "1.0.0"


async def _is_true(value):
    return bool(value)


async def test_changed_code_blocks_the_instance_and_a_fixed_deploy_lets_it_go_on():
    store = MemoryStore()
    async with _runtime(store, version_1()) as old:
        await old.start(version_1(), 0, id="f")
        await waiting(old, "f")
    async with _runtime(store, changed_version_1()) as broken:
        await broken.raise_event("f", "go")
        await reached(broken, "f", Status.BLOCKED)
        block = (await broken.describe("f", waits=False)).block
        assert block is not None
        assert block.reason is BlockReason.NONDETERMINISM
        assert "note" in str(block.detail)
        assert "other" in str(block.detail)
    async with _runtime(store, version_1()) as fixed:
        assert await fixed.get("f").result(HANG_SECONDS) == "1.0.0"


async def test_an_instance_waits_for_a_worker_that_has_its_code():
    store = MemoryStore()
    async with _runtime(store) as ignorant:
        await ignorant.start("flow", 0, id="f")
        await asyncio.sleep(0.05)
        assert (await ignorant.describe("f")).status is Status.PENDING
        async with _runtime(store, version_2()) as able:
            assert await able.get("f").result(HANG_SECONDS) == "2.0.0"


async def test_damaged_history_blocks_only_its_own_instance():
    store = MemoryStore()
    async with _runtime(store, version_1()) as old:
        for name in ("bad", "good"):
            await old.start(version_1(), 0, id=name)
            await waiting(old, name)
        garbage = HistoryRecord(event_id=99, data="{not an event")
        await old.provider.append_with_execution("bad", 1, [garbage])
    async with _runtime(store, version_1()) as new:
        await new.raise_event("bad", "go")
        await new.raise_event("good", "go")

        assert await new.get("good").result(HANG_SECONDS) == "1.0.0"
        await reached(new, "bad", Status.BLOCKED)
        block = (await new.describe("bad", waits=False)).block
        assert block is not None
        assert block.reason is BlockReason.UNDECODABLE


async def test_an_undecodable_message_is_kept_and_blocks_only_its_own_instance():
    store = MemoryStore()
    async with _runtime(store, version_1()) as runtime:
        await runtime.start(version_1(), 0, id="f")
        await waiting(runtime, "f")
        bad = OrchestratorMessage(instance_id="f", kind="ExternalRaised", body="{nonsense")
        await runtime.provider.enqueue_for_orchestrator(bad)
        await reached(runtime, "f", Status.BLOCKED)
        admin = runtime.provider.admin
        assert admin is not None
        assert [queued.message.body for queued in await admin.list_messages("f")] == ["{nonsense"]

        await runtime.terminate("f", "cannot be saved")
        assert (await runtime.describe("f")).status is Status.TERMINATED


async def test_a_runtime_tells_which_version_cannot_take_over(caplog):
    @orchestration(name="loop")
    async def before(n: int) -> None: ...

    @orchestration(name="loop", version="2.0.0")
    async def after(n: int, region: str) -> None: ...

    async with Runtime("memory:", [before, after]):
        pass

    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told.startswith(
        "orchestration 'loop' 2.0.0 requires 'region', which 1.0.0 does not have"
    )
    assert told.endswith("give it a default")
