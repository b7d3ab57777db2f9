"""What lies in the directory: readable files, safe names, private modes, one owner."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import time
import unicodedata
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from campaigns.filesystem_ids import NASTY, generated_ids, round_trip
from perdure.clock import ManualClock
from perdure.conformance import factories
from perdure.errors import StoreClosed, StoreMoved, StoreRefused
from perdure.model.status import Status
from perdure.providers.embedding import embed, extract
from perdure.providers.directory import FileSystemProvider, documents, layout, readable
from perdure.providers.directory.history import History
from perdure.providers.directory.mounts import find_type
from perdure.providers.local_files import NETWORK_FILE_SYSTEMS
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    HistoryRecord,
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


def filled_store(path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(path, clock=ManualClock()) as provider:
            await fill(provider)

    asyncio.run(scenario())


# --- readable


def test_a_closed_store_can_be_read_with_a_pager(tmp_path: Path) -> None:
    root = tmp_path / "store"

    filled_store(root)

    execution = root / layout.execution_directory("done", 1)
    assert json.loads((execution / "state.json").read_text())["output"] == {"total": 3}
    lines = (execution / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["event_id"] for line in lines] == [1, 2]
    meta = json.loads((root / layout.instance_directory("done") / "meta.json").read_text())
    assert (meta["instance_id"], meta["status"]) == ("done", "Completed")
    assert (meta["executions"], meta["custom_status"]) == ("1", {"step": 2})
    assert meta["created_at"].endswith("Z")
    assert meta["kv_store"]["key"]["value"] == [1, 2]
    queued = [path.name for path in sorted((root / layout.ORCHESTRATOR_QUEUE).iterdir())]
    assert queued == ["000000000003-pending~start-orchestration.json"]
    assert [path.name for path in (root / layout.WORKER_QUEUE).iterdir()] == [
        "000000000004-waiting~act.json"
    ]
    assert "journal/" in (root / "README.md").read_text()
    assert (root / "lock").read_text() == ""


@given(st.integers(0, (1 << 63) - 1) | st.integers(0, 1 << 48))
@example(253_402_300_799_999)
@example(253_402_300_800_000)
def test_a_time_comes_back_to_the_millisecond(time_ms: int) -> None:
    assert readable.time_ms(readable.time_text(time_ms)) == time_ms


@given(st.sets(st.integers(0, 40)), st.tuples(*[st.integers(0, 1 << 40)] * 3))
def test_ranges_and_versions_come_back(ids: set[int], version: tuple[int, int, int]) -> None:
    history = History().extended([HistoryRecord(event_id=each, data="") for each in sorted(ids)])

    assert readable.ranges(readable.ranges_text(history.ids)) == history.ids
    assert readable.version(readable.version_text(version)) == version


def test_reopening_an_unchanged_store_changes_no_readable_file(tmp_path: Path) -> None:
    root = tmp_path / "store"
    filled_store(root)
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
            deadline = time.monotonic() + 30
            while not list((tmp_path / "store" / layout.ORCHESTRATOR_QUEUE).iterdir()):
                assert time.monotonic() < deadline, "no file after half a minute"
                await asyncio.sleep(0)

    asyncio.run(scenario())


@given(st.text(max_size=200))
@example('{"a": 1}')
@example('{"a":1}')
@example("1,2")
@example("")
@example("null")
@example('"\\u00e9"')
@example("[" * 2000 + "]" * 2000)
@example("[" * 450 + "]" * 450)
@settings(max_examples=300, deadline=None)
def test_a_payload_comes_back_to_the_letter(text: str) -> None:
    body, body_text = embed(text)
    document = documents.MessageDocument(
        message_id=1,
        instance_id="i",
        kind="k",
        visible_at=0,
        enqueued_at=0,
        body=body,
        body_text=body_text,
    )

    back = documents.unseal(documents.seal(document), documents.MessageDocument)

    assert extract(back.body, back.body_text) == text


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
        names = [layout.instance_name(each) for each in ids]
    except UnicodeEncodeError:  # a lone surrogate is no id
        return

    assert len({unicodedata.normalize("NFC", name).casefold() for name in names}) == 2
    assert all(len(name) <= 105 for name in names)


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


def test_the_type_of_a_file_system_is_found_by_its_device() -> None:
    mounts = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "40 22 0:45 / /home rw - nfs4 server:/home rw,vers=4.2\n"
    )

    assert find_type(mounts, 0, 45) == "nfs4"
    assert find_type(mounts, 254, 0) == "ext4"
    assert find_type(mounts, 9, 9) is None
    assert "nfs4" in NETWORK_FILE_SYSTEMS


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")

    with pytest.raises(StoreRefused, match=r"thesis\.txt"):
        open_store(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "store")
    newer = documents.StoreDocument(format_version=1, layout_version=99, created_at=0)
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
        provider.store("read")
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

    asyncio.run(scenario())
