"""Stores and exports of version 0.1: they open, read the same, and go on to their end.

The stores are in tests/data/stores-of-0.1; the README there has the program that made them.
"""

from __future__ import annotations

import asyncio
import errno
import random
import tarfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from campaigns.filesystem_faults import CHANGING, SYNCING
from campaigns.filesystem_ops import FailingFileOps
from patience import HANG_SECONDS
from perdure import (
    Runtime,
    activity,
    continue_as_new,
    orchestration,
    set_custom_status,
    state,
    wait_for_event,
)
from perdure.client.moving import copy_store, decode_snapshot, encode_snapshot
from perdure.errors import CorruptData, ProviderError
from perdure.model.status import Status
from perdure.providers.directory import FileSystemProvider
from perdure.providers.sqlite import SqliteProvider

if TYPE_CHECKING:
    from perdure.providers.contract import Provider

DATA = Path(__file__).parents[1] / "data/stores-of-0.1"
KINDS = ("sqlite", "directory", "killed")


@activity
def greet(name: str) -> str:
    return f"hello {name}"


@activity
def hold(name: str) -> str:
    return f"held {name}"


@activity
def fail(text: str) -> str:
    raise ValueError(text)


@orchestration
async def hello(name: str) -> str:
    return await greet(name)


@orchestration
async def failing(text: str) -> str:
    return await fail(text)


@orchestration
async def approval(number: int) -> str:
    await greet(str(number))
    set_custom_status("waiting for approval")
    state["number"] = number
    answer = await wait_for_event("answer", str)
    return f"{state['number']}: {answer}"


@orchestration
async def sleeper(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


@orchestration
async def parent() -> str:
    return await approval(7)


@orchestration
async def held(name: str) -> str:
    return await hold.options(session="a session")(name)


@orchestration
async def chain(length: int) -> int:
    for number in range(length):
        await greet(str(number))
    await wait_for_event("go", str)
    return length


@orchestration
async def rounds(left: int) -> str:
    state["rounds"] = left
    await greet(str(left))
    if left:
        continue_as_new(left - 1)
    await wait_for_event("go", str)
    return "done"


HANDLERS = [greet, hold, fail, hello, failing, approval, sleeper, parent, held, chain, rounds]


class OldStore:
    def __init__(self, kind: str, path: Path) -> None:
        with tarfile.open(DATA / f"{kind}.tar.gz") as archive:
            archive.extractall(path, filter="data")
        self.kind = kind
        self.path = path / "store"
        self.exports = (path / "exports.jsonl").read_text().splitlines()
        self.dead_letters = (path / "dead-letters.txt").read_text().splitlines()

    def provider(self) -> Provider:
        if self.kind == "sqlite":
            return SqliteProvider(self.path)
        return FileSystemProvider(self.path)


@pytest.fixture(params=KINDS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> OldStore:
    return OldStore(request.param, tmp_path)


async def exports_of(provider: Provider) -> list[str]:
    admin = provider.admin
    page = await admin.list_instances(limit=1000)
    ids = sorted(info.instance_id for info in page.instances)
    return [encode_snapshot(await admin.export_instance(each)) for each in ids]


def test_an_old_store_reads_the_same(old: OldStore) -> None:
    async def scenario() -> None:
        for _ in range(2):  # the second time it is a store of this version
            async with old.provider() as provider:
                assert await exports_of(provider) == old.exports
                letters = await provider.admin.list_dead_letters()
                assert [
                    f"{each.letter_id} {each.reason} {each.message.instance_id}" for each in letters
                ] == old.dead_letters
                assert not (await provider.admin.get_store_info()).damages

    asyncio.run(scenario())


def test_the_work_of_an_old_store_goes_on_to_its_end(old: OldStore) -> None:
    async def scenario() -> None:
        async with old.provider() as provider:
            admin = provider.admin
            await admin.resume_instance("suspended")
            async with Runtime(provider, HANDLERS) as runtime:
                for instance_id in ("waiting", "parent::1.2"):
                    await runtime.get(instance_id).raise_event("answer", "yes")
                for instance_id in ("long", "continued"):
                    await runtime.get(instance_id).raise_event("go", "on")
                ends = {
                    each: await runtime.get(each).result(timeout=HANG_SECONDS)
                    for each in ("waiting", "parent", "long", "continued", "suspended", "queued",
                                 "begun", "in a session")
                }  # fmt: skip
                assert ends == {
                    "waiting": "1: yes",
                    "parent": "7: yes",
                    "long": 60,
                    "continued": "done",
                    "suspended": "2: held back",
                    "queued": "hello bob",
                    "begun": "hello eve",
                    "in a session": "held x",
                }
                assert (await admin.get_instance_info("sleeping")).status is Status.RUNNING
                assert len(await admin.list_executions("continued")) == 4
                assert len(await provider.read_with_execution("continued", 1)) == 5

    asyncio.run(scenario())


def test_old_exports_are_read_and_written_the_same(old: OldStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        for target in (FileSystemProvider(tmp_path / "copy"), SqliteProvider(tmp_path / "copy.db")):
            async with target as provider:
                for text in old.exports:
                    await provider.admin.import_instance(decode_snapshot(text))
                assert await exports_of(provider) == old.exports

    asyncio.run(scenario())


def test_an_old_store_can_be_copied(old: OldStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with old.provider() as source, FileSystemProvider(tmp_path / "copy") as target:
            report = await copy_store(source, target)
            assert report.instances == report.copied == len(old.exports)
            assert report.dead_letters == 1
            assert await exports_of(target) == old.exports

    asyncio.run(scenario())


# --- interrupted and damaged


@pytest.mark.parametrize("kind", ["directory", "killed"])
def test_an_upgrade_that_fails_anywhere_is_done_by_the_next_start(
    tmp_path: Path, kind: str
) -> None:
    every = 11
    for at in count(random.randrange(1, every), every):
        old = OldStore(kind, tmp_path / f"{at}")
        failing = FailingFileOps(errno.EIO, CHANGING | SYNCING, at=at)

        async def scenario(old: OldStore = old, failing: FailingFileOps = failing) -> None:
            try:
                async with FileSystemProvider(old.path, file_ops=failing):
                    pass
            except ProviderError:
                pass
            for _ in range(2):
                async with FileSystemProvider(old.path) as provider:
                    assert await exports_of(provider) == old.exports
                    assert not (await provider.admin.get_store_info()).damages
            assert not list(old.path.rglob("*~" + "[0-9a-f]" * 64))
            assert not list(old.path.rglob("state.json"))

        asyncio.run(scenario())
        if not failing.failures:
            break
    assert at > 4 * every


def old_directory(store: Path, slug: str) -> Path:
    (found,) = (store / "instances").glob(f"{slug}~" + "[0-9a-f]" * 64)
    return found


@pytest.mark.parametrize(
    "part", ["document", "execution", "history", "message", "missing", "exchanged"]
)
def test_an_old_store_with_a_damaged_file_is_refused_and_stays_as_it_is(
    tmp_path: Path, part: str
) -> None:
    old = OldStore("directory", tmp_path)
    (entry,) = (old.path / "queues/orchestrator").glob("*-queued~*")
    long = old_directory(old.path, "long")
    damaged = {
        "document": old_directory(old.path, "waiting") / "meta.json",
        "execution": long / "executions/1/state.json",
        "history": long / "executions/1/history.jsonl",
        "message": entry,
        "missing": long / "meta.json",
        "exchanged": long / "meta.json",
    }[part]
    good = damaged.read_bytes()
    if part == "missing":
        damaged.unlink()
    elif part == "exchanged":
        damaged.write_bytes((old_directory(old.path, "waiting") / "meta.json").read_bytes())
    else:
        damaged.write_bytes(good.replace(b"1", b"2", 1))
    before = contents(old.path)

    async def check() -> None:
        place = damaged.parent if part in {"missing", "exchanged"} else damaged
        with pytest.raises(CorruptData, match=place.relative_to(old.path).as_posix()):
            async with FileSystemProvider(old.path):
                pass
        assert contents(old.path) == before
        damaged.write_bytes(good)
        async with FileSystemProvider(old.path) as provider:
            assert await exports_of(provider) == old.exports
        assert not damaged.exists()

    asyncio.run(check())


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
