"""Copying between any two providers, and one instance as one file."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns import filesystem_copy
from perdure import Client
from perdure.client.moving import copy_store, decode_snapshot, encode_snapshot, snapshot_hash
from perdure.clock import ManualClock
from perdure.conformance import factories
from perdure.errors import AlreadyExists, InvalidValue, StoreBusy, StoreMoved
from perdure.limits import ORPHAN_GRACE_MS
from perdure.providers.directory import FileSystemProvider
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    HistoryRecord,
    KvSet,
    TurnCommit,
    WorkerInfo,
)
from perdure.providers.sqlite import SqliteProvider
from perdure.providers.sqlite.connection import moved_to
from perdure.providers.sqlite.memory import InMemoryProvider, MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceSnapshot

LOCK_MS = 1000


def provider(kind: str, path: Path, clock: ManualClock) -> Provider:
    match kind:
        case "memory":
            return InMemoryProvider(clock=clock)
        case "sqlite":
            return SqliteProvider(path / "store.db", clock=clock)
        case _:
            return FileSystemProvider(path / "store", clock=clock)


def admin_of(provider: Provider) -> ProviderAdmin:
    admin = provider.admin
    assert admin is not None
    return admin


async def fill(source: Provider, clock: ManualClock, count: int = 5) -> None:
    """Instances with history, state, a timer, work that was tried and given back; one pending."""
    for number in range(count):
        await source.enqueue_for_orchestrator(factories.start(f"i-{number}"))
    for _ in range(count - 1):
        fetched = await source.fetch_orchestration_item(LOCK_MS, 0)
        assert fetched is not None
        instance = fetched.item.instance_id
        commit = TurnCommit(
            execution_id=1,
            history_delta=(factories.started(instance), factories.event(instance, 2, data="ü")),
            worker_items=(factories.activity(instance, session="s", tag="gpu"),),
            orchestrator_items=(factories.timer(instance, clock.now_ms() + 60_000),),
            metadata=ExecutionMetadata(name="Shop", version="1.0.0", framework_version=(1, 2, 3)),
            custom_status=CustomStatusChange(value='"half"'),
            kv_changes=(KvSet(key="k", value="v", updated_at_ms=1),),
        )
        await source.ack_orchestration_item(fetched.lock_token, commit)
        clock.advance(1)
    await source.enqueue_for_orchestrator(factories.raised("nobody"))
    clock.advance(ORPHAN_GRACE_MS)
    assert await source.fetch_orchestration_item(LOCK_MS, 0)
    clock.advance(LOCK_MS)


async def snapshots(provider: Provider) -> dict[str, InstanceSnapshot]:
    admin = admin_of(provider)
    page = await admin.list_instances(limit=1000)
    return {
        info.instance_id: await admin.export_instance(info.instance_id) for info in page.instances
    }


async def hashes(provider: Provider) -> dict[str, str]:
    return {each: snapshot_hash(found) for each, found in (await snapshots(provider)).items()}


# --- whole stores


@pytest.mark.parametrize(
    ("first", "second"),
    [("memory", "sqlite"), ("sqlite", "filesystem"), ("filesystem", "memory")],
)
def test_a_copy_holds_everything_and_can_be_repeated(
    tmp_path: Path, first: str, second: str
) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with AsyncExitStack() as stack:
            source = await stack.enter_async_context(provider(first, tmp_path, clock))
            target = await stack.enter_async_context(provider(second, tmp_path, clock))
            await fill(source, clock)
            progress: list[tuple[int, int]] = []

            report = await copy_store(
                source, target, on_progress=lambda *step: progress.append(step)
            )

            assert (report.instances, report.copied, report.dead_letters) == (5, 5, 1)
            assert (report.messages, report.work) == (5, 4)
            assert await hashes(target) == await hashes(source)
            assert progress == [(number, 5) for number in range(1, 6)]
            again = await copy_store(source, target)
            assert (again.copied, again.already_there) == (0, 5)
            assert len(await admin_of(target).list_messages("nobody")) == 1

    asyncio.run(scenario())


def test_work_in_flight_goes_on_at_the_target(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        target = FileSystemProvider(tmp_path / "store", clock=clock)
        async with InMemoryProvider(clock=clock) as source, target:
            await source.enqueue_for_orchestrator(factories.start("a"))
            fetched = await source.fetch_orchestration_item(LOCK_MS, 0)
            assert fetched is not None
            await source.abandon_orchestration_item(fetched.lock_token)

            await copy_store(source, target)

            there = await target.fetch_orchestration_item(LOCK_MS, 0)
            assert there is not None
            assert (there.item.instance_id, there.attempt_count) == ("a", 2)

    asyncio.run(scenario())


def test_a_source_in_use_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with InMemoryProvider(clock=clock) as source, InMemoryProvider() as target:
            worker = WorkerInfo(
                worker_id="w", host="h", process_id=1, started_at_ms=0, framework_version="1"
            )
            await admin_of(source).register_worker(worker, 60_000)
            with pytest.raises(StoreBusy, match="stop its workers"):
                await copy_store(source, target)
            await admin_of(source).register_worker(worker, 0)
            await source.enqueue_for_orchestrator(factories.start("a"))
            await source.fetch_orchestration_item(LOCK_MS, 0)
            with pytest.raises(StoreBusy, match="1 items locked"):
                await copy_store(source, target)

    asyncio.run(scenario())


def test_an_instance_of_the_target_is_not_overwritten_unasked() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with InMemoryProvider(clock=clock) as source, InMemoryProvider() as target:
            await source.enqueue_for_orchestrator(factories.start("a"))
            await target.enqueue_for_orchestrator(factories.start("a", name="Other"))
            with pytest.raises(AlreadyExists, match="'a'"):
                await copy_store(source, target, mark_moved=True)
            assert (await admin_of(source).get_store_info()).moved_to is None

            await copy_store(source, target, replace=True)

            assert await hashes(source) == await hashes(target)

    asyncio.run(scenario())


def test_a_moved_store_says_where_to_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        target = SqliteProvider(tmp_path / "new.db")
        async with FileSystemProvider(tmp_path / "store") as source, target:
            await source.enqueue_for_orchestrator(factories.start("a"))
            await copy_store(source, target, mark_moved=True)
        with pytest.raises(StoreMoved, match=r"new\.db"):
            await FileSystemProvider(tmp_path / "store").open()

    asyncio.run(scenario())


def test_a_move_that_is_cancelled_takes_its_mark_back() -> None:
    async def scenario() -> None:
        store, marks = MemoryStore(), list[str | None]()
        async with InMemoryProvider(store=store) as source, InMemoryProvider() as target:
            await source.enqueue_for_orchestrator(factories.start("a"))
            await source.enqueue_for_orchestrator(factories.start("b"))

            def stop(*_: int) -> None:
                marks.append(moved_to(store.database.ready().connection))
                move.cancel()

            move = asyncio.ensure_future(
                copy_store(source, target, mark_moved=True, on_progress=stop)
            )
            with pytest.raises(asyncio.CancelledError):
                await move

        assert (marks[0], moved_to(store.database.ready().connection)) == (
            "unfinished move to memory:",
            None,
        )

    asyncio.run(scenario())


def test_a_move_that_is_done_is_not_repeated_over_what_went_on_at_the_target() -> None:
    async def scenario() -> None:
        async with InMemoryProvider() as source, InMemoryProvider() as target:
            await source.enqueue_for_orchestrator(factories.start("a"))
            await copy_store(source, target, mark_moved=True)
            await target.enqueue_for_orchestrator(factories.raised("a"))
            went_on = await hashes(target)

            with pytest.raises(StoreMoved, match="was moved to memory:"):
                await copy_store(source, target, mark_moved=True, replace=True)

            assert await hashes(target) == went_on

    asyncio.run(scenario())


def test_a_move_that_fails_when_it_is_repeated_keeps_the_mark_that_it_found() -> None:
    async def scenario() -> None:
        async with InMemoryProvider() as source, InMemoryProvider() as target:
            await source.enqueue_for_orchestrator(factories.start("a"))
            await admin_of(source).mark_moved("unfinished move to memory:")
            await target.enqueue_for_orchestrator(factories.start("a", name="Other"))

            with pytest.raises(AlreadyExists, match="'a'"):
                await copy_store(source, target, mark_moved=True)
            assert (await admin_of(source).get_store_info()).moved_to is not None
            await copy_store(source, target, mark_moved=True, replace=True)

            assert (await admin_of(source).get_store_info()).moved_to == "memory:"

    asyncio.run(scenario())


def test_a_client_that_has_the_source_open_is_told_of_the_move(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with Client(path) as client, InMemoryProvider() as target:
            await client.start("Flow", id="a")
            async with SqliteProvider(path) as mover:
                await copy_store(mover, target, mark_moved=True)

            with pytest.raises(StoreMoved, match="was moved to memory:"):
                await client.start("Flow", id="b")
            with pytest.raises(StoreMoved, match="was moved to memory:"):
                await client.raise_event("a", "late", 1)
            assert await admin_of(client.provider).count_instances() == 1

    asyncio.run(scenario())


def test_a_directory_that_was_moved_takes_nothing_when_it_is_opened_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as source:
            await source.enqueue_for_orchestrator(factories.start("a"))
            await admin_of(source).mark_moved("elsewhere")
        async with FileSystemProvider(tmp_path / "store", allow_moved=True) as source:
            with pytest.raises(StoreMoved, match="was moved to elsewhere"):
                await source.enqueue_for_orchestrator(factories.start("b"))

            await admin_of(source).mark_moved(None)
            await source.enqueue_for_orchestrator(factories.start("b"))

    asyncio.run(scenario())


def test_a_copy_that_is_killed_and_repeated_ends_the_same(tmp_path: Path) -> None:
    filesystem_copy.run(tmp_path, 40, random.Random())


# --- one instance, one file


def a_snapshot() -> InstanceSnapshot:
    async def scenario() -> InstanceSnapshot:
        clock = ManualClock()
        async with InMemoryProvider(clock=clock) as source:
            await fill(source, clock)
            return (await snapshots(source))["i-0"]

    return asyncio.run(scenario())


def test_an_instance_survives_a_file() -> None:
    snapshot = a_snapshot()

    for indent in (-1, 2):
        text = encode_snapshot(snapshot, indent=indent)
        assert snapshot_hash(decode_snapshot(text)) == snapshot_hash(snapshot)
    assert "\n" not in encode_snapshot(snapshot)
    history = json.loads(encode_snapshot(snapshot))["instance"]["executions"][0]["history"]
    assert history[0]["event"]["type"] == "OrchestrationStarted"


@given(st.text(max_size=50), st.text(max_size=50))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_a_file(data: str, body: str) -> None:
    snapshot = a_snapshot()
    (execution,) = snapshot.executions
    odd = msgspec.structs.replace(
        execution, history=(HistoryRecord(event_id=1, data=data.replace("\0", "")),), output=body
    )
    snapshot = msgspec.structs.replace(snapshot, executions=(odd,))

    for indent in (-1, 2):
        back = decode_snapshot(encode_snapshot(snapshot, indent=indent))
        assert back.executions == snapshot.executions


def resealed(change: dict[str, object]) -> str:
    """The file of an instance with some fields exchanged, and a checksum that fits."""
    import hashlib

    document = json.loads(encode_snapshot(a_snapshot()))
    document["instance"].update(change)
    body = json.dumps(document["instance"], separators=(",", ":"), ensure_ascii=False)
    document["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    return (
        f'{{"perdure_export":{document["perdure_export"]},'
        f'"sha256":"{document["sha256"]}","instance":{body}}}'
    )


@pytest.mark.parametrize(
    "change",
    [
        {"instance_id": ""},
        {"instance_id": "a\x00b"},
        {"instance_id": "x" * 300},
        {"instance_id": 5},
        {"execution_id": 0},
        {"execution_id": 7},
        {"created_at_ms": -1},
        {"updated_at_ms": 2**70},
        {"executions": [{"execution_id": 1, "status": "Nonsense", "started_at_ms": 0}]},
        {"executions": [{"execution_id": 1, "status": "Running", "started_at_ms": 0}] * 2},
        {"messages": [{"kind": "", "visible_at_ms": 0, "enqueued_at_ms": 0, "body": {}}]},
        {"messages": [{"kind": "k", "visible_at_ms": 0, "enqueued_at_ms": 0}]},
        {"kv_store": {"k": {"value": "x" * 20_000, "updated_at_ms": 1}}},
        {"kv_store": {f"k{n}": {"value": "", "updated_at_ms": 1} for n in range(300)}},
        {"__class__": "os.system"},
        {"custom_status": "x" * 300_000},
    ],
)
def test_a_hostile_file_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidValue):
        decode_snapshot(resealed(change))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "[]",
        '{"perdure_export":2}',
        "[" * 100_000,
        '{"perdure_export":1}',
        "\ud800",
    ],
)
def test_a_file_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        decode_snapshot(text)


def test_a_file_that_was_changed_is_refused() -> None:
    text = encode_snapshot(a_snapshot())

    with pytest.raises(InvalidValue, match="checksum"):
        decode_snapshot(text.replace('"Shop"', '"Shot"'))


def test_a_resealed_file_without_changes_is_taken() -> None:
    assert decode_snapshot(resealed({})).instance_id == "i-0"
