"""Files of the directory store: readable files, safe names, private modes, one owner."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
import unicodedata
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from campaigns.filesystem_ids import NASTY, generated_ids, round_trip
from integration.conditions import until
from perdure.clock import ManualClock
from perdure.conformance import factories
from perdure.errors import CorruptData, StoreClosed, StoreMoved, StoreRefused
from perdure.model.status import Status
from perdure.providers.directory import FileSystemProvider, documents, layout
from perdure.providers.local_files import NETWORK_FILE_SYSTEMS, find_file_system
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    KvSet,
    TurnCommit,
)

if TYPE_CHECKING:
    from pathlib import Path


async def fill(provider: FileSystemProvider) -> None:
    """One finished instance, one that waits for an activity and a timer, one that is pending."""
    for instance_id in ("done", "waiting", "pending"):
        await provider.enqueue_for_orchestrator(factories.start(instance_id))
    for status in (Status.COMPLETED, None):
        fetched = await provider.fetch_orchestration_item(1000, 0)
        assert fetched is not None
        instance_id = fetched.item.instance_id
        await provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(
                execution_id=1,
                history_delta=tuple(factories.event(instance_id, number) for number in (1, 2)),
                worker_items=() if status else (factories.activity(instance_id),),
                metadata=ExecutionMetadata(
                    name="Shop", version="1.0.0", status=status, output='{"total":3}'
                ),
                custom_status=CustomStatusChange(value='{"step":2}'),
                kv_changes=(KvSet(key="key", value="[1,2]", updated_at_ms=1),),
            ),
        )


def name_of(instance_id: str) -> str:
    return layout.instance_names(instance_id)[0]


def filled_store(path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(path, clock=ManualClock()) as provider:
            await fill(provider)

    asyncio.run(scenario())


# --- readable


def test_a_closed_store_can_be_read_with_a_pager(tmp_path: Path) -> None:
    root = tmp_path / "store"

    filled_store(root)

    meta = json.loads((root / layout.document_file(name_of("done"))).read_text())
    assert (meta["instance_id"], meta["status"]) == ("done", "Completed")
    (execution,) = meta["executions"]
    assert (execution["execution_id"], execution["output"]) == (1, {"total": 3})
    assert [each["event_id"] for each in execution["history"]] == [1, 2]
    assert meta["custom_status"] == {"step": 2}
    assert meta["created_at"].endswith("Z")
    assert meta["kv_store"]["key"]["value"] == [1, 2]
    queued = [path.name for path in sorted((root / layout.ORCHESTRATOR_QUEUE).iterdir())]
    assert queued == [f"000000000003-{name_of('pending')}~start-orchestration.json"]
    assert name_of("pending").startswith("pending~")
    assert [path.name for path in (root / layout.WORKER_QUEUE).iterdir()] == [
        f"000000000001-{name_of('waiting')}~act.json"
    ]
    assert not list((root / layout.JOURNAL).iterdir())
    assert "journal/" in (root / "README.md").read_text()
    assert (root / "lock").read_text() == ""


@given(st.integers(0, (1 << 63) - 1) | st.integers(0, 1 << 48))
@example(253_402_300_799_999)
@example(253_402_300_800_000)
def test_a_time_comes_back_to_the_millisecond(time_ms: int) -> None:
    assert documents.time_ms(documents.time_text(time_ms)) == time_ms


@given(st.sets(st.integers(0, 40)))
def test_ranges_come_back(ids: set[int]) -> None:
    ranges = documents.ranges(documents.ranges_text(sorted(ids)))

    assert [each for part in ranges for each in part] == sorted(ids)


def test_a_big_instance_has_a_directory(tmp_path: Path) -> None:
    """With one file for each execution, and one to which the events of a long history are added."""
    root, name = tmp_path / "store", name_of("big")
    history = root / layout.history_file(name, 2)

    async def scenario() -> None:
        async with FileSystemProvider(root, clock=ManualClock()) as provider:
            await provider.append_with_execution("big", 1, [factories.event("big", 1)])
            await provider.checkpoint()
            assert (root / layout.document_file(name)).exists()
            events = [factories.event("big", number) for number in range(1, 400)]
            await provider.append_with_execution("big", 2, events)
            await provider.checkpoint()
            assert not (root / layout.document_file(name)).exists()
            begin = history.read_bytes()
            await provider.append_with_execution("big", 2, [factories.event("big", 400)])
            await provider.checkpoint()
            assert history.read_bytes().startswith(begin)

    asyncio.run(scenario())

    lines = history.read_text().splitlines()
    assert [json.loads(line)["event_id"] for line in lines] == list(range(1, 401))
    meta = json.loads((root / layout.meta_file(name)).read_text())
    assert (meta["instance_id"], meta["execution_ids"]) == ("big", "1-2")
    first = json.loads((root / layout.execution_file(name, 1)).read_text())
    assert [each["event_id"] for each in first["history"]] == [1]
    assert json.loads((root / layout.execution_file(name, 2)).read_text())["events"] == "1-400"


def test_reopening_an_unchanged_store_changes_no_readable_file(tmp_path: Path) -> None:
    root = tmp_path / "store"
    filled_store(root)

    async def suspend() -> None:
        async with FileSystemProvider(root, clock=ManualClock()) as provider:
            await provider.enqueue_for_orchestrator(factories.start("suspended"))
            await provider.admin.suspend_instance("suspended")

    asyncio.run(suspend())
    before = {path: path.read_bytes() for path in root.rglob("*.json*") if path.is_file()}

    async def reopen() -> None:
        async with FileSystemProvider(root, clock=ManualClock()):
            pass

    asyncio.run(reopen())

    assert before == {path: path.read_bytes() for path in root.rglob("*.json*") if path.is_file()}


def test_files_follow_by_themselves_after_a_moment(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as provider:
            await provider.enqueue_for_orchestrator(factories.start("a"))
            queue = tmp_path / "store" / layout.ORCHESTRATOR_QUEUE
            await until(lambda: list(queue.iterdir()))

    asyncio.run(scenario())


@given(st.text(max_size=200))
@example('{"a": 1}')
@example('{"a":1}')
@example("1,2")
@example("1],[2")
@example("")
@example("null")
@example('"\\u00e9"')
@example("[" * 2000 + "]" * 2000)
@example("[" * 450 + "]" * 450)
@settings(max_examples=300, deadline=None)
def test_a_payload_comes_back_to_the_letter(text: str) -> None:
    texts = {1: '{"a":1}', 2: text, 3: text + "1", 4: "2"}
    for some in ({2: text}, texts):
        history = documents.history(some.items())

        sealed = documents.seal({"history": history})
        back = documents.unseal(sealed, dict[str, msgspec.Raw])

        assert documents.history_texts(back["history"]) == some


# --- names


def test_ids_round_trip_and_no_file_lies_outside(tmp_path: Path) -> None:
    ids = [*NASTY, *generated_ids(500, seed=7)]

    asyncio.run(round_trip(tmp_path, ids))


@given(st.lists(st.text(min_size=1, max_size=60), min_size=2, max_size=2, unique=True))
@example(["Straße", "STRASSE"])
@example(["é", "e\u0301"])
@settings(max_examples=500, deadline=None)
def test_names_differ_on_a_file_system_that_ignores_case(ids: list[str]) -> None:
    try:
        names = [name_of(each) for each in ids]
    except UnicodeEncodeError:  # a lone surrogate is no id
        return

    assert len({unicodedata.normalize("NFC", name).casefold() for name in names}) == 2
    assert all(len(name) <= 53 for name in names)


def test_two_ids_with_the_same_short_name_get_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids whose short hashes are equal can be found with some effort."""
    monkeypatch.setattr(layout, "_HASH_CHARACTERS", (0, 32))
    layout.instance_names.cache_clear()
    ids = ["a b", "a-b", "a/b"]

    async def check(provider: FileSystemProvider) -> None:
        for each in ids:
            assert await provider.read(each) == [factories.event(each, 1)]

    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as provider:
            for each in ids:
                await provider.enqueue_for_orchestrator(factories.start(each))
                fetched = await provider.fetch_orchestration_item(1000, 0)
                assert fetched is not None
                ended = ExecutionMetadata(name="Shop", version="1.0.0", status=Status.COMPLETED)
                commit = TurnCommit(
                    execution_id=1, history_delta=(factories.event(each, 1),), metadata=ended
                )
                await provider.ack_orchestration_item(fetched.lock_token, commit)
        async with FileSystemProvider(tmp_path / "store") as provider:
            await check(provider)
            await provider.admin.delete_instance(ids.pop(0))
        async with FileSystemProvider(tmp_path / "store") as provider:
            await check(provider)
            assert not (await provider.admin.get_store_info()).damages

    asyncio.run(scenario())


# --- modes


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_everything_is_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        filled_store(tmp_path / "store")
    finally:
        os.umask(old)

    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def open_store(path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(path):
            pass

    asyncio.run(scenario())


def test_a_root_that_anybody_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)

    with pytest.raises(StoreRefused, match="chmod 700"):
        open_store(tmp_path / "store")


def test_a_root_behind_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(StoreRefused, match="symbolic link"):
        open_store(tmp_path / "link")


def store_of_every_kind_of_file(root: Path) -> None:
    clock = ManualClock()

    async def scenario() -> None:
        async with FileSystemProvider(root, clock=clock, archive=timedelta(hours=1)) as provider:
            await fill(provider)
            await provider.append_with_execution(
                "big", 1, [factories.event("big", number) for number in range(1, 400)]
            )
            await provider.checkpoint()
            clock.advance(7_200_000)
            await provider.checkpoint()
            await provider.enqueue_for_orchestrator(factories.start("last"))
            # Killed here: the journal has a record.
            shutil.copytree(root, root.with_name("image"))

    asyncio.run(scenario())
    shutil.rmtree(root)
    root.with_name("image").rename(root)


def test_a_link_anywhere_in_a_store_is_refused_and_not_followed(tmp_path: Path) -> None:
    store_of_every_kind_of_file(tmp_path / "store")
    names = {str(path.relative_to(tmp_path / "store")) for path in tmp_path.glob("store/**/*")}
    assert {"archive", "journal", "queues/worker", "lock", "store.json"} < names
    assert any(each.endswith("/executions") for each in names)
    assert any(each.endswith(".gz") for each in names)
    for number, name in enumerate(sorted(names - {"tmp"})):  # emptied without following links
        root, outside = tmp_path / f"{number}", tmp_path / f"outside {number}"
        shutil.copytree(tmp_path / "store", root)
        (root / name).rename(outside)
        (root / name).symlink_to(outside)
        before = content(outside)

        # A file of the archive is opened only when it is needed.
        expected = CorruptData if name.endswith(".gz") else StoreRefused
        with pytest.raises(expected, match="link"):
            read_all(root)

        assert content(outside) == before, name


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(each): each.read_bytes() for each in files}


def read_all(root: Path) -> None:
    async def scenario() -> None:
        provider = FileSystemProvider(root, clock=ManualClock(), archive=timedelta(hours=1))
        async with provider:
            for instance_id in ("done", "waiting", "big"):
                await provider.read(instance_id)

    asyncio.run(scenario())


def test_a_pipe_in_a_store_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    filled_store(tmp_path / "store")
    path = tmp_path / "store" / layout.document_file(name_of("done"))
    path.unlink()
    os.mkfifo(path)

    with pytest.raises(StoreRefused, match="special file"):
        open_store(tmp_path / "store")


def test_the_type_of_a_file_system_is_found_by_its_path() -> None:
    mounts = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "40 22 0:45 / /home rw - nfs4 server:/home rw,vers=4.2\n"
    )

    assert find_file_system("/home/ann/store", mounts) == "nfs4"
    assert find_file_system("/homes/store", mounts) == "ext4"
    assert find_file_system("/store", "") is None
    assert "nfs4" in NETWORK_FILE_SYSTEMS


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")

    with pytest.raises(StoreRefused, match=r"thesis\.txt"):
        open_store(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("part", ["format_version", "layout_version"])
def test_a_store_of_a_newer_version_is_refused(tmp_path: Path, part: str) -> None:
    open_store(tmp_path / "store")
    versions = {"format_version": 1, "layout_version": 1, part: 99}
    newer = documents.StoreDocument(**versions, created_at=0)
    (tmp_path / "store/store.json").write_bytes(documents.seal(newer))

    with pytest.raises(StoreRefused, match="newer version"):
        open_store(tmp_path / "store")


# --- one owner


def test_a_second_process_is_refused_at_once_and_told_who_has_the_store(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from perdure.providers.directory import FileSystemProvider\n"
        "asyncio.run(FileSystemProvider(sys.argv[1]).open())\n"
    )

    async def scenario() -> str:
        async with FileSystemProvider(tmp_path / "store"):
            result = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", program, str(tmp_path / "store")],
                capture_output=True,
                text=True,
                check=False,
            )
            return result.stderr

    told = asyncio.run(scenario())

    host, today = socket.gethostname(), datetime.now(UTC).date().isoformat()
    assert f"in use by process {os.getpid()} on host {host!r} since {today}T" in told


def test_a_second_handle_is_refused_without_a_wait(tmp_path: Path) -> None:
    async def scenario() -> float:
        async with FileSystemProvider(tmp_path / "store"):
            begin = time.monotonic()
            with pytest.raises(StoreRefused, match="one process at a time"):
                await FileSystemProvider(tmp_path / "store").open()
            return time.monotonic() - begin

    assert asyncio.run(scenario()) < 10


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from perdure.providers.directory import FileSystemProvider\n"
        "asyncio.run(FileSystemProvider(sys.argv[1]).open())\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], check=False)

    open_store(tmp_path / "store")


def test_a_forked_child_cannot_use_the_store_and_does_not_keep_it(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, int]:
        provider = FileSystemProvider(tmp_path / "store")
        await provider.open()
        go_on_reader, go_on = os.pipe()
        answers, answer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(answer, b"1" if is_closed(provider) else b"0")
            os.read(go_on_reader, 1)
            os._exit(0)
        assert os.read(answers, 1) == b"1"
        await provider.enqueue_for_orchestrator(factories.start("a"))
        await provider.close()
        return child, go_on

    child, go_on = asyncio.run(scenario())
    open_store(tmp_path / "store")  # although the child still lives
    os.write(go_on, b"x")
    os.waitpid(child, 0)


def is_closed(provider: FileSystemProvider) -> bool:
    try:
        provider._require_open("read")
    except StoreClosed as error:
        return "fork" in error.message
    return False


# --- life


def test_a_temporary_store_is_gone_after_closing() -> None:
    async def scenario() -> str:
        async with FileSystemProvider.new_temp() as provider:
            await provider.enqueue_for_orchestrator(factories.start("a"))
            return provider.path

    assert not os.path.exists(asyncio.run(scenario()))  # noqa: PTH110


def test_a_moved_store_opens_only_for_tools(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as provider:
            await provider.admin.mark_moved("sqlite:///shop.db")
        with pytest.raises(StoreMoved, match=r"shop\.db"):
            await FileSystemProvider(tmp_path / "store").open()
        async with FileSystemProvider(tmp_path / "store", allow_moved=True) as provider:
            assert (await provider.admin.get_store_info()).moved_to == "sqlite:///shop.db"
            with pytest.raises(StoreMoved, match=r"shop\.db"):
                await provider.enqueue_for_orchestrator(factories.start("x"))

    asyncio.run(scenario())
