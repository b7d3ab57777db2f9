"""Let every operation on the files fail, one after the other, and see that the store goes on.

    python -m campaigns.filesystem_faults      (with tests/ on the path; a part of it as root)

Without space or with a failing disk a verb must end with a clean error and leave no half turn, and
the same handle must go on as soon as the error is gone; a failed flush must close the store for
good. Last, a real file system runs full, and gets more space later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import subprocess
import sys
import tempfile
from itertools import count
from typing import TYPE_CHECKING

from campaigns.filesystem_ops import FailingFileOps
from campaigns.filesystem_workload import (
    LOCK_MS,
    check_finished,
    check_whole,
    run_to_the_end,
    start_instances,
)
from perdure.clock import ManualClock
from perdure.errors import ProviderError, StoreFull, StoreUnavailable
from perdure.providers.directory import FileSystemProvider

if TYPE_CHECKING:
    from collections.abc import Iterator


INSTANCES, TURNS = 2, 2
CHANGING = frozenset({"write", "create", "open", "rename", "mkdir", "unlink", "truncate"})
SYNCING = frozenset({"fsync", "fdatasync", "syncfs"})
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.EROFS)
_FULL_INSTANCES = 200


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    logging.getLogger("perdure").setLevel(logging.CRITICAL)  # it rightly warns at every point
    for error in ERRORS:
        for times in (1, 5):
            points = fail_at_every_change(error, times=times)
            print(f"{errno.errorcode[error]} {times} times at {points} points: clean", flush=True)
    points = fail_at_every_sync()
    print(f"a failed flush at {points} points: closed for good, and whole afterwards", flush=True)
    reason = why_no_full_disk()
    if reason is not None:
        sys.exit(f"NOT RUN: {reason}")
    refusals = fill_a_disk()
    print(f"a full disk: {refusals} refusals, no half turn, went on when space was back")


# --- every operation


def fail_at_every_change(error: int, *, times: int = 1, first: int = 1, step: int = 1) -> int:
    """Return how many points there were; raise at the first that was not clean."""
    for points, ops in enumerate(_failing(error, CHANGING, first, step, times)):
        errors = _run_with(ops)
        if not ops.failures:
            return points
        assert all(each.retryable for each in errors), (ops.at, errors)
    raise AssertionError("unreachable")


def fail_at_every_sync(*, first: int = 1, step: int = 1) -> int:
    """Return how many points there were; raise at the first that was not clean."""
    for points, ops in enumerate(_failing(errno.EIO, SYNCING, first, step)):
        errors = _run_with(ops, must_tell=True)
        if not ops.failures:
            return points
        assert len(errors) <= 1, (ops.at, errors)  # none if it was the close that failed
    raise AssertionError("unreachable")


def _failing(
    error: int, names: frozenset[str], first: int, step: int, times: int = 1
) -> Iterator[FailingFileOps]:
    return (FailingFileOps(error, names, at=at, times=times) for at in count(first, step))


def _run_with(ops: FailingFileOps, *, must_tell: bool = False) -> list[ProviderError]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            run = run_until_it_works(f"{directory}/store", ops, must_tell=must_tell)
            return asyncio.run(run)
        except BaseException as error:
            error.add_note(f"with an error at point {ops.at}")
            raise


async def run_until_it_works(
    path: str, ops: FailingFileOps, *, must_tell: bool
) -> list[ProviderError]:
    """The errors on the way to the end; if the store must tell, each failure is one of them."""
    errors: list[ProviderError] = []
    clock = ManualClock()
    while True:
        provider = FileSystemProvider(path, clock=clock, file_ops=ops)
        try:
            await provider.open()
            await _run_provider(provider, clock, errors)
            if must_tell and ops.failures and not errors:
                # It failed beside the last verb: then the next one says so.
                await start_instances(provider, INSTANCES + 1, lambda _: None)
                raise AssertionError("no verb told of the failed flush")
            await provider.close()
        except ProviderError as error:
            errors.append(error)
            await provider.close()
            clock.advance(LOCK_MS + 1)
            continue
        return errors


async def _run_provider(
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


# --- a full disk


def why_no_full_disk() -> str | None:
    """Return why no file system can be filled here, or None if one can."""
    if os.geteuid() != 0:
        return "a full disk needs root, to mount a small file system"
    try:
        with _small_disk("1m"):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"a small file system cannot be mounted here: {error}"


def fill_a_disk() -> int:
    """Return how many calls were refused for want of space before space was added."""
    with _small_disk("600k") as mount_point:
        return asyncio.run(_fill_a_disk(mount_point))


async def _fill_a_disk(mount_point: str) -> int:
    clock = ManualClock()
    refusals = 0
    async with FileSystemProvider(f"{mount_point}/store", clock=clock) as provider:
        while True:
            try:
                await start_instances(provider, _FULL_INSTANCES, lambda _: None)
                await run_to_the_end(provider, TURNS, lambda _: None, checkpoint_every=10)
            except StoreFull:
                refusals += 1
                await check_whole(provider, _FULL_INSTANCES)
                clock.advance(LOCK_MS + 1)
                if refusals == 20:
                    _mount("-o", "remount,size=64m", mount_point)
                continue
            break
        await check_finished(provider, _FULL_INSTANCES, TURNS)
    assert refusals >= 20, f"only {refusals} calls were refused"
    async with FileSystemProvider(f"{mount_point}/store", clock=clock) as provider:
        await check_finished(provider, _FULL_INSTANCES, TURNS)
    return refusals


@contextlib.contextmanager
def _small_disk(size: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as mount_point:
        _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount_point)
        try:
            yield mount_point
        finally:
            subprocess.run(["umount", mount_point], check=True, capture_output=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    main()
