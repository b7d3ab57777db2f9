"""Opening what a crash, a half-done checkpoint or a damaged disk has left."""

from __future__ import annotations

import asyncio
import errno
import inspect
import random
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from campaigns.filesystem_ops import FailingFileOps
from campaigns.filesystem_workload import (
    check_finished,
    check_whole,
    instance_id,
    provider_of_life,
    run_to_the_end,
    start_instances,
)
from perdure.clock import ManualClock
from perdure.conformance import factories
from perdure.errors import CorruptData, PerdureError, StoreFull, StoreUnavailable
from perdure.providers.directory import FileSystemProvider, layout
from perdure.providers.directory.fileops import FileOps
from perdure.providers.directory.journal import Record, frame, read_records
from perdure.providers.directory.root import Root
from perdure.providers.records import (
    ExecutionMetadata,
    InstanceSnapshot,
    PruneOptions,
    TurnCommit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from perdure.providers.local_files import Directory

INSTANCES, TURNS = 3, 3


def work_and_copy(path: Path, target: Path, file_ops: FileOps | None = None) -> None:
    """A copy of the open store is as good as a crash."""

    async def scenario() -> None:
        async with provider_of_life(str(path), 0, file_ops) as provider:
            await start_instances(provider, INSTANCES, lambda _: None)
            await run_to_the_end(provider, TURNS - 1, lambda _: None)
            shutil.copytree(path, target)

    asyncio.run(scenario())


def crash_image(path: Path, target: Path) -> None:
    """A crash with everything in one segment: no other can be opened, so no checkpoint is made."""
    only_one = FailingFileOps(names=frozenset({"open"}), at=2, times=1 << 30)
    work_and_copy(path, target, only_one)


def only_segment(path: Path) -> Path:
    (segment,) = [each for each in (path / layout.JOURNAL).iterdir() if each.stat().st_size]
    return segment


def records_end(segment: Path) -> int:
    """Return the position where the blanks begin that are written ahead."""
    return segment.read_bytes().rindex(b"\n") + 1


def read_journal(path: Path) -> list[Record]:
    root = Root(str(path), FileOps())
    root.open()
    try:
        return list(read_records(root, 0))
    finally:
        root.close()


def records(path: Path) -> int:
    return len(read_journal(path))


def open_and_close(path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(path):
            pass

    asyncio.run(scenario())


def check_recovers(path: Path) -> None:
    async def scenario() -> None:
        async with provider_of_life(str(path), 1) as provider:
            await check_whole(provider, INSTANCES)
            await start_instances(provider, INSTANCES, lambda _: None)
            await run_to_the_end(provider, TURNS - 1, lambda _: None)
            await check_finished(provider, INSTANCES, TURNS - 1)

    asyncio.run(scenario())


# --- torn ends


def test_a_journal_cut_anywhere_keeps_every_whole_record(tmp_path: Path) -> None:
    crash_image(tmp_path / "store", tmp_path / "image")
    segment = only_segment(tmp_path / "image")
    data = segment.read_bytes()[: records_end(segment) + 100]

    for size in range(0, len(data), 13):
        segment.write_bytes(data[:size])

        assert records(tmp_path / "image") == data[:size].count(b"\n")
        assert segment.stat().st_size == data.rfind(b"\n", 0, size) + 1


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.85])
def test_a_store_goes_on_after_a_torn_end(tmp_path: Path, share: float) -> None:
    crash_image(tmp_path / "store", tmp_path / "image")
    segment = only_segment(tmp_path / "image")
    data = segment.read_bytes()[: records_end(segment)]

    segment.write_bytes(data[: int(len(data) * share)] + b"\0" * 700)

    check_recovers(tmp_path / "image")


def test_records_of_one_batch_of_version_1_may_reach_the_disk_out_of_order(tmp_path: Path) -> None:
    open_and_close(tmp_path / "store")
    segment = tmp_path / "store" / layout.segment_file(1)
    lines = [
        frame(b'{"sequence":%d,"synced":%d,"at_ms":0,"verb":""}' % (number, number > 1))
        for number in range(1, 11)
    ]
    lines[3] = b"\0" * len(lines[3])
    segment.write_bytes(b"".join(lines))

    assert records(tmp_path / "store") == 3


def test_a_torn_record_takes_its_whole_batch_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        only_one = FailingFileOps(names=frozenset({"open"}), at=2, times=1 << 30)
        async with FileSystemProvider(tmp_path / "store", file_ops=only_one) as provider:
            await provider.enqueue_for_orchestrator(factories.start("before"))
            await asyncio.gather(
                *(provider.enqueue_for_orchestrator(factories.start(f"i-{n}")) for n in range(9))
            )
            shutil.copytree(tmp_path / "store", tmp_path / "image")

    asyncio.run(scenario())
    everything = {"before", *(f"i-{n}" for n in range(9))}
    segment = only_segment(tmp_path / "image")
    last = repr(read_journal(tmp_path / "image")[-1].body)
    torn = {f"i-{n}" for n in range(9) if f"'i-{n}'" in last}
    assert torn
    data = bytearray(segment.read_bytes())
    data[-10] = 0
    segment.write_bytes(data)

    assert set(instances_in(tmp_path / "image")) == everything - torn


@pytest.mark.parametrize("filler", [b" ", b"\0"])
def test_what_was_written_ahead_ends_the_journal(tmp_path: Path, filler: bytes) -> None:
    crash_image(tmp_path / "store", tmp_path / "image")
    segment = only_segment(tmp_path / "image")
    data = segment.read_bytes()
    end = records_end(segment)
    assert data[end:].strip() == b""
    assert len(data) > end + 1000

    segment.write_bytes(data[:end] + filler * 100_000)

    assert records(tmp_path / "image") == data.count(b"\n")
    assert segment.stat().st_size == end
    check_recovers(tmp_path / "image")


def test_a_refused_commit_does_not_come_back_from_an_older_segment(tmp_path: Path) -> None:
    """The half-written record could not be cut at once, and the next one went to a new segment."""
    ops = BrokenJournal()

    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            await provider.enqueue_for_orchestrator(factories.start("before"))
            ops.is_broken = True
            with pytest.raises(StoreUnavailable):
                await provider.enqueue_for_orchestrator(factories.start("refused"))
            ops.is_broken, ops.is_full = False, True
            with pytest.raises(StoreFull):
                await provider.checkpoint()
            await provider.enqueue_for_orchestrator(factories.start("after"))
            shutil.copytree(tmp_path / "store", tmp_path / "image")

    asyncio.run(scenario())

    assert instances_in(tmp_path / "image") == ["after", "before"]


class BrokenJournal(FileOps):
    """While it is broken, records are written whole and reported as failed; nothing is cut.

    While it is full, a checkpoint gets no further than to a new segment.
    """

    is_broken = False
    is_full = False

    def create_file(self, path: str, *, at: Directory) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "full")
        return super().create_file(path, at=at)

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        written = super().write_at(descriptor, data, offset)
        self._fail_if_broken()
        return written

    def truncate(self, descriptor: int, size: int) -> None:
        self._fail_if_broken()
        super().truncate(descriptor, size)

    def _fail_if_broken(self) -> None:
        if self.is_broken:
            raise OSError(errno.EIO, "broken")


def instances_in(path: Path) -> list[str]:
    async def scenario() -> list[str]:
        async with FileSystemProvider(path) as provider:
            page = await provider.admin.list_instances()
            return sorted(info.instance_id for info in page.instances)

    return asyncio.run(scenario())


# --- damage


def test_a_committed_record_that_vanished_before_a_later_one_is_refused(tmp_path: Path) -> None:
    crash_image(tmp_path / "store", tmp_path / "image")
    segment = only_segment(tmp_path / "image")
    lines = segment.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.strip())

    lines[last - 1] = b"\0" * len(lines[last - 1])
    segment.write_bytes(b"".join(lines))

    with pytest.raises(CorruptData, match="damaged at byte"):
        check_recovers(tmp_path / "image")


def test_a_damaged_record_before_later_commits_is_refused(tmp_path: Path) -> None:
    crash_image(tmp_path / "store", tmp_path / "image")
    segment = only_segment(tmp_path / "image")
    data = bytearray(segment.read_bytes())
    data[records_end(segment) // 2] ^= 1
    segment.write_bytes(data)

    with pytest.raises(CorruptData, match="damaged at byte"):
        check_recovers(tmp_path / "image")


def test_a_lost_segment_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        for name in ("a", "b"):  # two segments, of which no checkpoint takes away any
            only_one = FailingFileOps(names=frozenset({"open"}), at=2, times=1 << 30)
            if name == "b":
                only_one.at = 3  # the end of the first segment is opened as well
            async with FileSystemProvider(tmp_path / "store", file_ops=only_one) as provider:
                await provider.enqueue_for_orchestrator(factories.start(name))

    asyncio.run(scenario())
    segments = [each for each in (tmp_path / "store/journal").iterdir() if each.stat().st_size]
    assert len(segments) == 2
    min(segments).unlink()

    with pytest.raises(CorruptData, match="lacks records"):
        check_recovers(tmp_path / "store")


def contents(path: Path) -> dict[str, object]:
    """Everything that can be asked about the store; an error where there is no answer."""

    async def scenario() -> dict[str, object]:
        async with FileSystemProvider(path, clock=ManualClock()) as provider:
            seen: dict[str, object] = {}
            admin = provider.admin
            for number in range(INSTANCES):
                try:
                    seen[instance_id(number)] = await admin.export_instance(instance_id(number))
                except PerdureError as error:
                    seen[instance_id(number)] = error
            seen["details"] = (await admin.get_store_info()).details
            return seen

    return asyncio.run(scenario())


def test_no_flipped_bit_in_a_file_gives_a_wrong_answer(tmp_path: Path) -> None:
    work_and_copy(tmp_path / "store", tmp_path / "image")
    expected = contents(tmp_path / "store")
    files = [
        path
        for path in sorted((tmp_path / "store").rglob("*"))
        if path.is_file() and path.name not in {"README.md", "lock"} and path.stat().st_size
    ]
    rng = random.Random(11)

    for _ in range(60):
        path = rng.choice(files)
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        try:
            seen = contents(tmp_path / "store")
        except CorruptData:
            seen = {}
        for key, value in seen.items():
            is_refused = isinstance(value, CorruptData)
            assert is_refused or key == "details" or value == expected[key], (path, value)
        path.write_bytes(good)


def test_a_damaged_instance_is_refused_and_the_others_work(tmp_path: Path) -> None:
    work_and_copy(tmp_path / "store", tmp_path / "image")
    document = layout.document_file(layout.instance_names(instance_id(1))[0])
    meta = tmp_path / "store" / document
    meta.write_text(meta.read_text().replace("Flow", "Flaw"))
    damaged = meta.read_bytes()

    async def scenario() -> None:
        async with provider_of_life(str(tmp_path / "store"), 1) as provider:
            assert f"damaged: {document}" in (await provider.admin.get_store_info()).details
            with pytest.raises(CorruptData, match="restore"):
                await provider.read(instance_id(1))
            with pytest.raises(CorruptData, match="restore"):
                await start_instances(provider, INSTANCES, lambda _: None)
            assert len(await provider.read(instance_id(0))) == 2 * (TURNS - 1)
            assert len(await provider.read(instance_id(2))) == 2 * (TURNS - 1)

    asyncio.run(scenario())
    assert meta.read_bytes() == damaged


_ARGUMENTS = {
    "execution_id": 1,
    "key": "k",
    "limit": 1,
    "lock_timeout_ms": 1,
    "options": PruneOptions(),
    "records": (),
}


def _verbs_of(owner: Any) -> Iterator[Callable[[str], Any]]:
    """Yield calls, for an id, of all public verbs that name one instance."""
    for name, verb in inspect.getmembers(owner, callable):
        wanted = {} if name.startswith("_") else inspect.signature(verb).parameters
        if "instance_id" in wanted:
            others = {
                each: _ARGUMENTS[each]
                for each, parameter in wanted.items()
                if each != "instance_id" and parameter.default is parameter.empty
            }
            yield partial(verb, **others)


def test_every_verb_that_names_a_damaged_instance_is_refused(tmp_path: Path) -> None:
    work_and_copy(tmp_path / "store", tmp_path / "image")
    damaged = instance_id(1)
    document = layout.document_file(layout.instance_names(damaged)[0])
    (tmp_path / "store" / document).write_text("{}")

    async def scenario() -> None:
        async with provider_of_life(str(tmp_path / "store"), 1) as provider:
            admin = provider.admin
            calls = [*_verbs_of(provider), *_verbs_of(admin)]
            assert len(calls) > 20
            sound = await admin.export_instance(instance_id(0))
            message = factories.raised(damaged)
            calls += [
                lambda each: provider.enqueue_for_orchestrator(factories.raised(each)),
                lambda _: provider.enqueue_many_for_orchestrator([message]),
                lambda each: admin.delete_instances_atomic([instance_id(0), each]),
                lambda each: admin.import_instance(
                    replace(sound, instance_id=each, messages=(), work=()), replace=True
                ),
            ]
            for call in calls:
                with pytest.raises(CorruptData, match="restore"):
                    await call(damaged)
            assert await admin.export_instance(instance_id(0)) == sound

    asyncio.run(scenario())


def test_a_file_that_holds_another_instance_is_damaged(tmp_path: Path) -> None:
    work_and_copy(tmp_path / "store", tmp_path / "image")
    names = [layout.document_file(layout.instance_names(instance_id(n))[0]) for n in (0, 1)]
    source, copy = (tmp_path / "store" / name for name in names)
    shutil.copyfile(source, copy)

    async def scenario() -> None:
        async with provider_of_life(str(tmp_path / "store"), 1) as provider:
            details = (await provider.admin.get_store_info()).details
            assert instance_id(0) in details[f"damaged: {names[1]}"]
            assert len(await provider.read(instance_id(0))) == 2 * (TURNS - 1)

    asyncio.run(scenario())


def test_an_instance_without_the_file_of_an_execution_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    name = layout.instance_names("big")[0]

    async def write() -> None:
        async with FileSystemProvider(store) as provider:
            for execution_id in range(1, 7):
                await provider.append_with_execution(
                    "big", execution_id, [factories.event("big", 1, execution_id)]
                )
            await provider.append_with_execution("other", 1, [factories.event("other", 1)])

    async def read() -> None:
        async with FileSystemProvider(store) as provider:
            assert len(await provider.read("other")) == 1
            for execution_id in (2, 3):
                with pytest.raises(CorruptData, match="execution 3 is missing") as refusal:
                    await provider.read_with_execution("big", execution_id)
                assert refusal.value.operation == "read_with_execution"

    asyncio.run(write())
    missing = store / layout.execution_file(name, 3)
    content = missing.read_bytes()
    missing.rename(store / layout.execution_file(name, 99))
    left = sorted((store / layout.INSTANCES).rglob("*"))
    for _ in range(2):  # the second time after a close
        asyncio.run(read())
    assert sorted((store / layout.INSTANCES).rglob("*")) == left

    missing.write_bytes(content)

    async def read_again() -> None:
        async with FileSystemProvider(store) as provider:
            for execution_id in range(1, 7):
                assert len(await provider.read_with_execution("big", execution_id)) == 1

    asyncio.run(read_again())


@pytest.mark.parametrize("queue", [layout.ORCHESTRATOR_QUEUE, layout.WORKER_QUEUE])
@pytest.mark.parametrize("damage", ["torn", "changed", "renamed", "swapped"])
def test_no_instance_goes_on_without_a_damaged_entry_of_a_queue(
    tmp_path: Path, queue: str, damage: str
) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as provider:
            for name in ("a", "b"):
                await provider.enqueue_for_orchestrator(factories.start(name))
                fetched = await provider.fetch_orchestration_item(1000, 0)
                assert fetched is not None
                work = (factories.activity(name), factories.activity(name, activity_id=3))
                commit = TurnCommit(
                    execution_id=1,
                    history_delta=(factories.event(name, 1),),
                    worker_items=work,
                    metadata=ExecutionMetadata(name="Shop", version="1.0.0"),
                )
                await provider.ack_orchestration_item(fetched.lock_token, commit)
            for name in ("a", "b"):
                for number in (10, 20, 30):
                    await provider.enqueue_for_orchestrator(factories.raised(name, data=number))
        first, second, *_ = sorted((tmp_path / "store" / queue).iterdir())
        sound = first.read_bytes()
        if damage == "torn":
            first.write_bytes(sound[:40])
        elif damage == "changed":
            first.write_bytes(sound.replace(b'"a"', b'"c"'))
        elif damage == "renamed":
            first.rename(first.with_name("000000000099-other~123456789abc~kind.json"))
        else:
            first.write_bytes(second.read_bytes())
        async with FileSystemProvider(tmp_path / "store") as provider:
            assert await damages(provider)
            assert await taken(provider) == {"b"}
            with pytest.raises(CorruptData, match="restore"):
                await provider.enqueue_for_orchestrator(factories.raised("a", data=40))
            with pytest.raises(CorruptData, match="restore"):
                await provider.read("a")
        for path in (tmp_path / "store" / queue).glob("*other~*"):
            path.unlink()
        first.write_bytes(sound)
        async with FileSystemProvider(tmp_path / "store") as provider:
            assert "a" in await taken(provider)

    asyncio.run(scenario())


async def taken(provider: FileSystemProvider) -> set[str]:
    """Return the instances that get turns."""
    turns = set[str]()
    while (fetched := await provider.fetch_orchestration_item(1000, 0)) is not None:
        turns.add(fetched.item.instance_id)
    return turns


async def damages(provider: FileSystemProvider) -> list[str]:
    details = (await provider.admin.get_store_info()).details
    return [key for key in details if key.startswith("damaged")]


async def begin(provider: FileSystemProvider, name: str) -> None:
    """Start an instance that has one work item."""
    await provider.enqueue_for_orchestrator(factories.start(name))
    fetched = await provider.fetch_orchestration_item(1000, 0)
    assert fetched is not None
    commit = TurnCommit(
        execution_id=1,
        history_delta=(factories.event(name, 1),),
        worker_items=(factories.activity(name),),
        metadata=ExecutionMetadata(name="Shop", version="1.0.0"),
    )
    await provider.ack_orchestration_item(fetched.lock_token, commit)


def without_ids(snapshot: InstanceSnapshot) -> InstanceSnapshot:
    return replace(snapshot, work=tuple(replace(each, message_id=0) for each in snapshot.work))


@pytest.mark.parametrize(
    ("place", "is_killed"),
    [(layout.INSTANCES, False), (layout.INSTANCES, True), (layout.WORKER_QUEUE, False)],
)
def test_a_file_that_is_repaired_takes_nothing_from_what_was_made_meanwhile(
    tmp_path: Path, place: str, is_killed: bool
) -> None:
    store, expected = tmp_path / "store", dict[str, InstanceSnapshot]()

    async def scenario() -> None:
        async with FileSystemProvider(store) as provider:
            await begin(provider, "old")
            expected["old"] = await provider.admin.export_instance("old")
        (file,) = (store / place).iterdir()
        sound = file.read_bytes()
        file.write_bytes(sound[:40])
        async with FileSystemProvider(store) as provider:
            with pytest.raises(CorruptData, match="restore"):
                await provider.read("old")
            await begin(provider, "begun")
            expected["begun"] = await provider.admin.export_instance("begun")
            bare = tuple(replace(each, history=()) for each in expected["begun"].executions)
            copy = replace(expected["begun"], instance_id="copied", executions=bare, work=())
            await provider.admin.import_instance(copy)
            expected["copied"] = await provider.admin.export_instance("copied")
            await provider.append_with_execution("tool's", 1, [factories.event("tool's", 1)])
            if is_killed:
                shutil.copytree(store, tmp_path / "killed")
        repaired = tmp_path / "killed" if is_killed else store
        (repaired / place / file.name).write_bytes(sound)
        for _ in range(2):
            async with FileSystemProvider(repaired) as provider:
                assert not await damages(provider)
                for name, snapshot in expected.items():
                    found = await provider.admin.export_instance(name)
                    assert without_ids(found) == without_ids(snapshot)
                assert len(await provider.read("tool's")) == 1

    asyncio.run(scenario())


# --- half-done checkpoints


def test_an_old_journal_over_newer_files_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "store"
        async with provider_of_life(str(path), 0) as provider:
            await start_instances(provider, INSTANCES, lambda _: None)
            await run_to_the_end(provider, TURNS - 1, lambda _: None)
            shutil.copytree(path, tmp_path / "before")
            await provider.checkpoint()
            shutil.copytree(path, tmp_path / "image")
        # The files of after the checkpoint, with the journal and the mark of before it.
        shutil.rmtree(tmp_path / "image/journal")
        shutil.copytree(tmp_path / "before/journal", tmp_path / "image/journal")
        shutil.copy(tmp_path / "before/store.json", tmp_path / "image/store.json")

    asyncio.run(scenario())

    check_recovers(tmp_path / "image")


def test_an_id_that_was_deleted_and_used_again_recovers_as_the_new_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "store"
        async with provider_of_life(str(path), 0) as provider:
            await start_instances(provider, 1, lambda _: None)
            await run_to_the_end(provider, TURNS, lambda _: None, checkpoint_every=2)
            shutil.copytree(path, tmp_path / "before")
            await provider.admin.delete_instance(instance_id(0))
            await start_instances(provider, 1, lambda _: None)
            await run_to_the_end(provider, 1, lambda _: None)
            shutil.copytree(path, tmp_path / "journal only")
            await provider.checkpoint()
            shutil.copytree(path, tmp_path / "files too")
        # Files of the new one, journal of both.
        shutil.rmtree(tmp_path / "files too/journal")
        shutil.copytree(tmp_path / "journal only/journal", tmp_path / "files too/journal")
        shutil.copy(tmp_path / "before/store.json", tmp_path / "files too/store.json")
        for image in ("journal only", "files too"):
            async with provider_of_life(str(tmp_path / image), 1) as provider:
                await check_finished(provider, 1, 1)
            async with provider_of_life(str(tmp_path / image), 2) as provider:
                await check_finished(provider, 1, 1)
                assert not await damages(provider)

    asyncio.run(scenario())
