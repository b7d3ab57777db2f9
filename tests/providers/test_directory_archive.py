"""Histories of old executions are compressed and moved aside; every verb reads them as before."""

from __future__ import annotations

import asyncio
import errno
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

import pytest

from campaigns.filesystem_faults import CHANGING, SYNCING
from campaigns.filesystem_ops import FailingFileOps
from perdure.clock import ManualClock
from perdure.conformance import factories
from perdure.errors import CorruptData, ProviderError
from perdure.model.status import Status
from perdure.providers.directory import FileSystemProvider, layout
from perdure.providers.records import ExecutionMetadata, TurnCommit

if TYPE_CHECKING:
    from pathlib import Path

    from perdure.providers.directory.fileops import FileOps

HOUR_MS = 3_600_000
EVENTS = 40
LONG = 150
"""Events of a history that has a file of its own."""
ALL_OPERATIONS = CHANGING | SYNCING


def opened(path: Path, clock: ManualClock, ops: FileOps | None = None) -> FileSystemProvider:
    return FileSystemProvider(path, clock=clock, archive=timedelta(hours=1), file_ops=ops)


async def finish(provider: FileSystemProvider, instance: str, events: int = EVENTS) -> None:
    await provider.enqueue_for_orchestrator(factories.start(instance))
    fetched = await provider.fetch_orchestration_item(1000, 0)
    assert fetched is not None
    commit = TurnCommit(
        execution_id=1,
        history_delta=tuple(factories.event(instance, n) for n in range(1, events + 1)),
        metadata=ExecutionMetadata(
            name="Shop", version="1.0.0", status=Status.COMPLETED, output="1"
        ),
    )
    await provider.ack_orchestration_item(fetched.lock_token, commit)


def name_of(instance: str) -> str:
    return layout.instance_names(instance)[0]


def has_original(path: Path, instance: str) -> bool:
    """The history is in the instance's document, or in a file of its own."""
    name = name_of(instance)
    if (path / layout.history_file(name, 1)).exists():
        return True
    document = path / layout.document_file(name)
    if not document.exists():
        document = path / layout.execution_file(name, 1)
    return '"event_id"' in document.read_text()


def archived(path: Path, instance: str) -> Path:
    return path / layout.archived_history(name_of(instance), 1)


async def check_readable(provider: FileSystemProvider, instance: str, events: int) -> None:
    expected = [factories.event(instance, number) for number in range(1, events + 1)]
    admin = provider.admin
    assert await provider.read(instance) == expected
    assert await admin.read_history_with_execution_id(instance, 1) == expected
    assert (await admin.get_execution_info(instance, 1)).event_count == events
    assert (await admin.export_instance(instance)).executions[0].history == tuple(expected)


def test_only_old_executions_are_archived_and_all_can_be_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, clock = tmp_path / "store", ManualClock()
        async with opened(path, clock) as provider:
            await finish(provider, "old")
            clock.advance(HOUR_MS)
            await finish(provider, "young")

            await provider.checkpoint()

            assert archived(path, "old").exists()
            assert not has_original(path, "old")
            assert has_original(path, "young")
            for instance in ("old", "young"):
                await check_readable(provider, instance, EVENTS)
        async with opened(path, clock) as provider:
            await check_readable(provider, "old", EVENTS)
            young = path / layout.document_file(name_of("young"))
            assert archived(path, "old").stat().st_size < young.stat().st_size

    asyncio.run(scenario())


def test_a_store_that_is_opened_later_archives_what_has_become_old(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, clock = tmp_path / "store", ManualClock()
        async with FileSystemProvider(path, clock=clock) as provider:
            await finish(provider, "a")
        clock.advance(2 * HOUR_MS)
        async with opened(path, clock):
            pass
        assert archived(path, "a").exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("events", [EVENTS, LONG])
@pytest.mark.parametrize("archive", [timedelta(hours=1), None])
def test_an_archived_history_can_grow_again(
    tmp_path: Path, events: int, archive: timedelta | None
) -> None:
    async def scenario() -> None:
        path, clock = tmp_path / "store", ManualClock()
        async with opened(path, clock) as provider:
            await finish(provider, "a", events)
            await provider.checkpoint()
            assert (path / layout.history_file(name_of("a"), 1)).exists() == (events == LONG)
            clock.advance(HOUR_MS)
            await provider.checkpoint()
            assert archived(path, "a").exists()
            assert not has_original(path, "a")
        async with FileSystemProvider(path, clock=clock, archive=archive) as provider:
            await check_readable(provider, "a", events)
            await provider.append_with_execution("a", 1, [factories.event("a", events + 1)])
            await check_readable(provider, "a", events + 1)
            await provider.checkpoint()

            await check_readable(provider, "a", events + 1)
            assert archived(path, "a").exists() == (archive is not None)
        async with opened(path, clock) as provider:
            await check_readable(provider, "a", events + 1)

    asyncio.run(scenario())


def test_deleting_an_instance_deletes_its_archive(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, clock = tmp_path / "store", ManualClock()
        async with opened(path, clock) as provider:
            await finish(provider, "a")
            clock.advance(HOUR_MS)
            await provider.checkpoint()

            await provider.admin.delete_instance("a")
            await provider.checkpoint()

            assert not archived(path, "a").parent.exists()
            assert not list((path / layout.SCRATCH).iterdir())

    asyncio.run(scenario())


def test_the_archive_of_a_damaged_instance_is_there_when_it_is_repaired(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, clock = tmp_path / "store", ManualClock()
        async with opened(path, clock) as provider:
            await finish(provider, "a")
            clock.advance(HOUR_MS)
            await provider.checkpoint()
        document = path / layout.document_file(name_of("a"))
        good = document.read_bytes()
        document.write_bytes(good.replace(b"Shop", b"Shot"))
        async with opened(path, clock) as provider:
            with pytest.raises(CorruptData):
                await provider.read("a")
            await finish(provider, "b")
            await provider.checkpoint()

        document.write_bytes(good)
        async with opened(path, clock) as provider:
            await check_readable(provider, "a", EVENTS)

    asyncio.run(scenario())


async def archive_until_it_works(path: Path, ops: FileOps, events: int) -> None:
    clock = ManualClock()
    async with FileSystemProvider(path, clock=clock) as provider:
        await finish(provider, "a", events)
    clock.advance(HOUR_MS)
    for _ in range(3):
        provider = opened(path, clock, ops)
        try:
            async with provider:
                await provider.checkpoint()
                await check_readable(provider, "a", events)
        except ProviderError:
            continue
    async with opened(path, clock) as provider:
        await check_readable(provider, "a", events)
        await provider.checkpoint()
        assert archived(path, "a").exists()
        assert not has_original(path, "a")


@pytest.mark.parametrize("events", [EVENTS, LONG])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_moment_of_archiving_loses_nothing(
    tmp_path: Path, error: int, events: int
) -> None:
    for at in count(1):
        failing = FailingFileOps(error, ALL_OPERATIONS, at=at)

        asyncio.run(archive_until_it_works(tmp_path / f"{at}", failing, events))

        if not failing.failures:
            break
    assert at > 20
