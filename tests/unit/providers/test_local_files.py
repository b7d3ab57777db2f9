"""Files on every system: locks, names, long paths. Runs under Windows too."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.conformance import factories
from perdure.providers import local_files
from perdure.providers.directory import FileSystemProvider
from perdure.providers.sqlite import SqliteProvider

HOLD = """
import os, sys
from perdure.providers import local_files
lock = os.open(sys.argv[1], os.O_RDWR | local_files.PLAIN_FILE)
print(local_files.try_lock(lock), flush=True)
sys.stdin.read()
"""


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | local_files.PLAIN_FILE)


def test_a_lock_belongs_to_one_descriptor_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"who has it")
    first, second = opened(path), opened(path)
    try:
        assert local_files.try_lock(first)
        assert not local_files.try_lock(second)
        assert local_files.is_locked(second)
        os.close(first)
        first = -1
        assert not local_files.is_locked(second)
        assert local_files.try_lock(second)
    finally:
        for each in (first, second):
            if each >= 0:
                os.close(each)


def test_a_lock_ends_with_its_process_and_its_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"who has it")
    with subprocess.Popen(
        (sys.executable, "-c", HOLD, str(path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == b"True"
        descriptor = opened(path)
        try:
            assert not local_files.try_lock(descriptor)
            assert os.read(descriptor, 100) == b"who has it"
            holder.kill()
            holder.wait()
            assert local_files.try_lock(descriptor)
        finally:
            os.close(descriptor)


def test_a_draft_does_not_replace_a_file(tmp_path: Path) -> None:
    draft, path = tmp_path / "draft", tmp_path / "path"
    os.close(local_files.create_private(draft))
    local_files.put_in_place(draft, path)
    draft.unlink(missing_ok=True)
    draft.write_bytes(b"another")

    with pytest.raises(FileExistsError):
        local_files.put_in_place(draft, path)

    assert path.read_bytes() == b""


def test_a_file_is_replaced_in_an_open_directory(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "old").write_bytes(b"old")
    directory = local_files.open_directory(str(tmp_path))
    try:
        local_files.replace("new", "old", directory)
        assert [each.name for each in tmp_path.iterdir()] == ["old"]
        assert (tmp_path / "old").read_bytes() == b"new"
        local_files.remove("old", directory)
        local_files.sync_names(directory)
        assert not list(tmp_path.iterdir())
    finally:
        local_files.close_directory(directory)


def test_a_file_is_written_anywhere_and_line_ends_stay(tmp_path: Path) -> None:
    descriptor = local_files.create_private(tmp_path / "file")
    try:
        local_files.write_at(descriptor, b"one\ntwo\n", 0)
        local_files.write_at(descriptor, b"\n", 8)
        local_files.write_at(descriptor, b"ONE", 0)
        local_files.sync_data(descriptor)
        local_files.sync_file(descriptor)
    finally:
        os.close(descriptor)

    assert (tmp_path / "file").read_bytes() == b"ONE\ntwo\n\n"


@pytest.mark.parametrize("kind", [FileSystemProvider, SqliteProvider])
def test_a_store_may_lie_behind_a_long_path(kind: type, tmp_path: Path) -> None:
    folder = tmp_path
    while len(str(folder)) < (300 if kind is FileSystemProvider else 200):
        folder /= "f" * 40
    Path(local_files.long_path(str(folder))).mkdir(parents=True)

    async def scenario() -> None:
        async with kind(folder / "store") as provider:
            await provider.enqueue_for_orchestrator(factories.start("a"))
        async with kind(folder / "store") as provider:
            assert await provider.fetch_orchestration_item(1000, 0) is not None

    asyncio.run(scenario())


def test_names_of_devices_are_no_files_on_windows() -> None:
    names = ("nul", "NUL.db", "com1.txt", "con .db")
    assert all(local_files.is_device(each) for each in names) == (sys.platform == "win32")
    assert not local_files.is_device("console.db")
