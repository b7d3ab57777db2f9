"""Errors of the operating system: clean answers, no half turn, and it goes on afterwards."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import pytest

from campaigns.filesystem_faults import CountedFileOps, FailingFileOps
from campaigns.filesystem_workload import (
    LOCK_MS,
    check_finished,
    check_whole,
    run_to_the_end,
    start_instances,
)
from perdure.clock import ManualClock
from perdure.errors import ProviderError, StoreClosed, StoreFull, StoreUnavailable
from perdure.providers.filesystem import FileSystemProvider
from perdure.providers.items import OrchestratorMessage, StartRouting

if TYPE_CHECKING:
    from pathlib import Path

    from perdure.providers.filesystem.fileops import FileOps

INSTANCES, TURNS = 2, 2
CHANGING = frozenset({"write", "create", "open", "rename", "mkdir", "unlink", "truncate"})
SYNCING = frozenset({"fsync", "fdatasync", "syncfs"})


def operations_of_a_run(path: Path) -> list[str]:
    ops = CountedFileOps()
    asyncio.run(run_until_it_works(path, ops))
    return ops.names


async def run_until_it_works(path: Path, ops: FileOps) -> list[ProviderError]:
    """The errors on the way to the end."""
    errors: list[ProviderError] = []
    clock = ManualClock()
    while True:
        provider = FileSystemProvider(path, clock=clock, file_ops=ops)
        try:
            await provider.open()
            await run_provider(provider, clock, errors)
            await provider.close()
        except ProviderError as error:
            errors.append(error)
            await provider.close()
            clock.advance(LOCK_MS + 1)
            continue
        return errors


async def run_provider(
    provider: FileSystemProvider, clock: ManualClock, errors: list[ProviderError]
) -> None:
    while True:
        try:
            await start_instances(provider, INSTANCES, lambda _: None)
            await run_to_the_end(provider, TURNS, lambda _: None, checkpoint_every=3)
        except (StoreFull, StoreUnavailable) as error:
            errors.append(error)
            await check_whole(provider, INSTANCES)
            clock.advance(LOCK_MS + 1)
            continue
        await check_finished(provider, INSTANCES, TURNS)
        return


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_an_error_at_any_change_is_clean_and_passes(tmp_path: Path, error: int) -> None:
    changes = [name for name in operations_of_a_run(tmp_path / "count") if name in CHANGING]
    for at in range(1 + error % 3, len(changes), 3):
        ops = FailingFileOps(error, CHANGING, at=at)

        errors = asyncio.run(run_until_it_works(tmp_path / f"store-{at}", ops))

        assert ops.failures == 1
        assert all(each.retryable for each in errors)


def test_an_error_at_any_sync_closes_the_store_for_good(tmp_path: Path) -> None:
    syncs = [name for name in operations_of_a_run(tmp_path / "count") if name in SYNCING]
    for at in range(1, len(syncs), 4):
        ops = FailingFileOps(errno.EIO, SYNCING, at=at)

        errors = asyncio.run(run_until_it_works(tmp_path / f"store-{at}", ops))

        assert len(errors) <= 1  # none if it was the close that failed
        assert all(isinstance(each, ProviderError) for each in errors)


def start(number: int) -> OrchestratorMessage:
    return OrchestratorMessage(
        instance_id=f"i-{number}",
        kind="StartOrchestration",
        body="{}",
        start=StartRouting(name="Flow", version="1.0.0"),
    )


def test_after_a_failed_sync_every_verb_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = FailingFileOps(errno.EIO, frozenset({"fdatasync"}))
        provider = FileSystemProvider(tmp_path / "store", file_ops=ops)
        await provider.open()
        with pytest.raises(StoreClosed, match="Input/output error"):
            await provider.enqueue_for_orchestrator(start(1))

        with pytest.raises(StoreClosed, match="Input/output error"):
            await provider.read("i-1")
        await provider.close()

    asyncio.run(scenario())


def test_all_who_share_a_failed_write_are_told_and_undone(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = FailingFileOps(errno.ENOSPC, frozenset({"write"}), at=1_000_000)
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            ops._at = 1
            calls = (provider.enqueue_for_orchestrator(start(number)) for number in range(10))

            answers = await asyncio.gather(*calls, return_exceptions=True)

            assert [type(answer) for answer in answers] == [StoreFull] * 10
            assert (await provider.admin().get_queue_depths()).orchestrator.visible == 0
            assert await provider.enqueue_for_orchestrator(start(1))
            assert (await provider.admin().get_queue_depths()).orchestrator.visible == 1

    asyncio.run(scenario())


def test_a_read_never_shows_what_then_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = FailingFileOps(errno.ENOSPC, frozenset({"write"}), at=1_000_000)
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            ops._at = 1

            failing, count = await asyncio.gather(
                provider.enqueue_for_orchestrator(start(1)),
                provider.admin().count_instances(),
                return_exceptions=True,
            )

            assert isinstance(failing, StoreFull)
            assert count == 0

    asyncio.run(scenario())


def test_a_checkpoint_without_space_is_repeated_and_commits_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = FailingFileOps(errno.ENOSPC, frozenset({"create"}), at=1_000_000, times=3)
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            await provider.enqueue_for_orchestrator(start(1))
            ops._at = 1
            for _ in range(3):
                with pytest.raises(StoreFull):
                    await provider.checkpoint()
            await provider.enqueue_for_orchestrator(start(2))

            await provider.checkpoint()

            files = sorted(path.name for path in (tmp_path / "store/queues/orchestrator").iterdir())
            assert [name.split("-")[0] for name in files] == ["000000000001", "000000000002"]
            assert not list((tmp_path / "store/tmp").iterdir())

    asyncio.run(scenario())
