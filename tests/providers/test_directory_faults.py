"""Errors of the operating system: clean answers, no half turn, and it goes on afterwards."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from campaigns import filesystem_faults
from campaigns.filesystem_ops import CountedFileOps, FailingFileOps
from perdure.errors import StoreClosed, StoreFull, StoreUnavailable
from perdure.providers.directory import FileSystemProvider, layout
from perdure.providers.directory.fileops import FileOps
from perdure.providers.records import OrchestratorMessage, StartRouting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_an_error_at_any_change_is_clean_and_passes(error: int) -> None:
    """At every third point, from another one in each run; an error tells the point."""
    first = random.randint(1, 3)

    assert filesystem_faults.fail_at_every_change(error, first=first, step=3) >= 20


def test_an_error_at_any_sync_closes_the_store_for_good() -> None:
    first = random.randint(1, 3)

    assert filesystem_faults.fail_at_every_sync(first=first, step=3) >= 10


def test_a_full_disk_is_reported_and_the_store_goes_on_when_there_is_space() -> None:
    reason = filesystem_faults.why_no_full_disk()
    if reason is not None:
        pytest.skip(f"NOT RUN: {reason}")

    assert filesystem_faults.fill_a_disk() >= 20


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


@pytest.mark.parametrize(
    ("name", "starts"),
    [("fsync", 1), ("fsync", 40), ("syncfs", 40)],
    ids=["while the journal goes on in a new segment", "before many files", "of many files"],
)
def test_a_checkpoint_whose_flush_fails_closes_the_store(
    tmp_path: Path, name: str, starts: int
) -> None:
    async def scenario() -> None:
        ops = FailingFileOps(errno.EIO, frozenset({name}), at=1_000_000)
        if name == "syncfs" and not ops.can_sync_filesystem:
            pytest.skip("this system flushes files one by one")
        provider = FileSystemProvider(tmp_path / "store", file_ops=ops)
        await provider.open()
        for number in range(starts):
            await provider.enqueue_for_orchestrator(start(number))
        ops.fail_next()
        with pytest.raises(StoreClosed, match="Input/output error"):
            await provider.checkpoint()
        with pytest.raises(StoreClosed, match="Input/output error"):
            await provider.enqueue_for_orchestrator(start(1_000))
        await provider.close()

    asyncio.run(scenario())

    async def count() -> int:
        async with FileSystemProvider(tmp_path / "store") as provider:
            return await provider.admin.count_instances()

    assert asyncio.run(count()) == starts


class OneByOneFileOps(CountedFileOps):
    """As on a system that cannot flush a whole file system."""

    can_sync_filesystem = False


def test_many_files_are_flushed_one_by_one_where_there_is_no_other_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = OneByOneFileOps()
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            for number in range(40):
                await provider.enqueue_for_orchestrator(start(number))
            ops.names.clear()
            await provider.checkpoint()

        assert "syncfs" not in ops.names
        assert ops.names.count("fsync") >= ops.names.count("rename") >= 40

    asyncio.run(scenario())


def test_a_store_is_open_after_open_or_open_says_what_failed(tmp_path: Path) -> None:
    async def scenario(path: Path, at: int) -> bool:
        ops = FailingFileOps(errno.EIO, filesystem_faults.CHANGING, at=at)
        provider = FileSystemProvider(path, file_ops=ops)
        try:
            await provider.open()
        except StoreUnavailable:
            assert ops.failures
            await provider.open()
        is_behind = not ops.failures
        ops.times_left = 0
        await provider.enqueue_for_orchestrator(start(1))
        await provider.close()
        return is_behind

    at = 1
    while not asyncio.run(scenario(tmp_path / f"{at}", at)):
        at += 1
    assert at > 5


@pytest.mark.parametrize("flush", ["fsync", "fdatasync", "sync_names", "sync_filesystem"])
def test_each_flush_reaches_the_system_and_its_error_is_raised(flush: str) -> None:
    ops = FileOps()
    if flush == "sync_filesystem" and not ops.can_sync_filesystem:
        pytest.skip("this system flushes files one by one")

    with pytest.raises(OSError, match="Bad file descriptor"):
        getattr(ops, flush)(1 << 30)


def test_all_who_share_a_failed_write_are_told_and_undone(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = FailingFileOps(errno.ENOSPC, frozenset({"write"}), at=1_000_000)
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            ops.fail_next()
            calls = (provider.enqueue_for_orchestrator(start(number)) for number in range(10))

            answers = await asyncio.gather(*calls, return_exceptions=True)

            assert [type(answer) for answer in answers] == [StoreFull] * 10
            assert (await provider.admin.get_queue_depths()).orchestrator.visible == 0
            assert await provider.enqueue_for_orchestrator(start(1))
            assert (await provider.admin.get_queue_depths()).orchestrator.visible == 1

    asyncio.run(scenario())


def test_a_read_never_shows_what_then_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = FailingFileOps(errno.ENOSPC, frozenset({"write"}), at=1_000_000)
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            ops.fail_next()

            failing, count = await asyncio.gather(
                provider.enqueue_for_orchestrator(start(1)),
                provider.admin.count_instances(),
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
            ops.fail_next()
            for _ in range(3):
                with pytest.raises(StoreFull):
                    await provider.checkpoint()
            await provider.enqueue_for_orchestrator(start(2))

            await provider.checkpoint()

            files = sorted(path.name for path in (tmp_path / "store/queues/orchestrator").iterdir())
            assert [name.split("-")[0] for name in files] == ["000000000001", "000000000002"]
            assert not list((tmp_path / "store/tmp").iterdir())

    asyncio.run(scenario())


def _remove(root: Path) -> None:
    shutil.rmtree(root)


def _replace(root: Path) -> None:
    root.rename(root.with_name("before"))
    shutil.copytree(root.with_name("before"), root)


def _remove_the_journal(root: Path) -> None:
    for segment in (root / layout.JOURNAL).iterdir():
        segment.unlink()


def _remove_the_lock(root: Path) -> None:
    (root / layout.LOCK_FILE).unlink()


@pytest.mark.parametrize("harm", [_remove, _replace, _remove_the_journal, _remove_the_lock])
def test_a_commit_that_nobody_would_find_again_is_not_answered_for(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    async def scenario() -> None:
        provider = FileSystemProvider(tmp_path / "store")
        await provider.open()
        await provider.enqueue_for_orchestrator(start(1))
        harm(tmp_path / "store")
        for _ in range(2):
            with pytest.raises(StoreClosed, match="removed or replaced while it was open"):
                await provider.enqueue_for_orchestrator(start(2))
        await provider.close()

    asyncio.run(scenario())
