"""A store in a file: where it may lie, who may read it, what is refused."""

from __future__ import annotations

import asyncio
import grp
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from commit_points import ObservedProvider
from patience import HANG_SECONDS
from perdure.clock import ManualClock
from perdure.conformance.factories import start
from perdure.errors import (
    AlreadyExists,
    CorruptData,
    InvalidValue,
    ProviderError,
    StoreClosed,
    StoreMoved,
    StoreRefused,
    StoreUnavailable,
    UsageError,
)
from perdure.providers import local_files
from perdure.providers.local_files import Draft, draft_beside, find_file_system
from perdure.providers.sqlite import SqliteProvider, connection, guards
from perdure.providers.sqlite.transaction import Verb


async def open_and_close(path, **options):
    async with SqliteProvider(path, **options):
        pass


def refusal_of(path, **options) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        asyncio.run(open_and_close(path, **options))
    return caught.value


@pytest.mark.parametrize("path", [":memory:", ""])
def test_a_store_without_a_file_points_to_the_in_memory_provider(path):
    with pytest.raises(InvalidValue, match="InMemoryProvider"):
        SqliteProvider(path)


def test_an_unknown_durability_is_refused():
    with pytest.raises(InvalidValue, match="'full' or 'relaxed'"):
        SqliteProvider("x.db", durability="fast")


def test_files_are_private_whatever_the_umask(tmp_path):
    async def modes():
        async with SqliteProvider(tmp_path / "store.db") as provider:
            await provider.enqueue_for_orchestrator(start("one"))
            return {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}

    before = os.umask(0)
    try:
        found = asyncio.run(modes())
    finally:
        os.umask(before)

    assert found == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}


# --- other users


class AsSeen:
    """The status of files, some of which belong to other users."""

    def __init__(self, monkeypatch, changes):
        self._changes = changes
        monkeypatch.setattr(guards, "_status", self._status)

    def _status(self, path):
        found = os.lstat(path)
        ending = str(path).rpartition("store.db")[2].strip("-") or "main"
        if ending not in self._changes or "store.db" not in str(path):
            return found
        fields = list(found)
        fields[4] = self._changes[ending]
        return os.stat_result(fields)


@pytest.fixture
def existing(tmp_path):
    """A store that is closed, with a file of each kind beside it."""
    path = tmp_path / "store.db"
    asyncio.run(open_and_close(path))
    return path


STRANGER = 54_321


@pytest.mark.parametrize("ending", ["wal", "shm", "journal"])
def test_a_file_of_another_user_beside_the_database_is_refused(existing, ending, monkeypatch):
    beside = existing.with_name(f"store.db-{ending}")
    beside.write_bytes(b"")
    beside.chmod(0o600)
    AsSeen(monkeypatch, {ending: STRANGER})

    refusal = refusal_of(existing)

    assert isinstance(refusal, StoreRefused)
    assert f"store.db-{ending}" in refusal.message
    assert f"belongs to user {STRANGER}" in refusal.message
    assert beside.read_bytes() == b""


@pytest.mark.parametrize("ending", ["wal", "shm", "journal"])
@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606])
def test_a_file_beside_the_database_with_wider_rights_is_refused(existing, ending, mode):
    beside = existing.with_name(f"store.db-{ending}")
    beside.write_bytes(b"")
    beside.chmod(mode)

    refusal = refusal_of(existing)

    assert isinstance(refusal, StoreRefused)
    assert "chmod 600" in refusal.message


@pytest.mark.parametrize("ending", ["wal", "shm", "journal"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_beside_the_database_is_refused(existing, ending, link, tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    target.chmod(0o600)
    link(target, existing.with_name(f"store.db-{ending}"))

    assert isinstance(refusal_of(existing), StoreRefused)
    assert target.read_bytes() == b"mine"


def test_a_database_of_another_user_is_refused(existing, monkeypatch):
    monkeypatch.setattr(guards, "own_user", lambda: 1_000)
    AsSeen(monkeypatch, {"main": STRANGER})

    assert f"belongs to user {STRANGER}" in refusal_of(existing).message


def test_root_may_use_the_store_of_a_user(existing, monkeypatch):
    monkeypatch.setattr(guards, "own_user", lambda: 0)
    AsSeen(monkeypatch, dict.fromkeys(("main", "wal", "shm"), STRANGER))

    asyncio.run(open_and_close(existing))


def test_a_database_that_every_user_may_write_is_refused(existing):
    existing.chmod(0o666)

    assert "chmod o-w" in refusal_of(existing).message


@pytest.mark.parametrize("existing_first", [True, False])
def test_a_directory_that_every_user_may_write_is_refused(tmp_path, existing_first):
    if existing_first:
        asyncio.run(open_and_close(tmp_path / "store.db"))
    tmp_path.chmod(0o777)

    assert "chmod o-w" in refusal_of(tmp_path / "store.db").message

    tmp_path.chmod(0o1777)
    asyncio.run(open_and_close(tmp_path / "store.db"))


@pytest.mark.parametrize(
    ("members", "is_refused"), [(["ann", "bob"], True), (["root"], False), ([], False)]
)
def test_a_directory_that_a_group_may_write_is_refused_if_it_has_other_members(
    tmp_path, members, is_refused, monkeypatch
):
    tmp_path.chmod(0o775)
    group = grp.struct_group(("staff", "x", 50, members))
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)

    if is_refused:
        assert "(ann, bob)" in refusal_of(tmp_path / "store.db").message
    else:
        asyncio.run(open_and_close(tmp_path / "store.db"))


def test_a_group_without_a_name_has_no_other_members(tmp_path, monkeypatch):
    tmp_path.chmod(0o775)
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)

    asyncio.run(open_and_close(tmp_path / "store.db"))


def test_the_files_beside_the_target_of_a_link_count(existing, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "link.db").symlink_to(existing)
    existing.with_name("store.db-wal").write_bytes(b"")
    existing.with_name("store.db-wal").chmod(0o666)

    assert "store.db-wal" in refusal_of(tmp_path / "below" / "link.db").message


def test_a_file_that_appears_while_the_store_is_opened_is_noticed(existing, monkeypatch):
    connect = connection.connect_writer
    changes = {}
    AsSeen(monkeypatch, changes)

    def connect_beside_a_stranger(*args):
        changes["wal"] = STRANGER
        return connect(*args)

    monkeypatch.setattr(connection, "connect_writer", connect_beside_a_stranger)

    assert f"belongs to user {STRANGER}" in refusal_of(existing).message


def test_nothing_but_the_database_is_left_after_closing(tmp_path):
    asyncio.run(open_and_close(tmp_path / "store.db"))

    assert [path.name for path in tmp_path.iterdir()] == ["store.db"]


def test_a_missing_directory_is_named_and_not_created(tmp_path):
    refusal = refusal_of(tmp_path / "nowhere" / "store.db")

    assert isinstance(refusal, StoreUnavailable)
    assert "nowhere" in refusal.message
    assert "create it" in refusal.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_directory_that_takes_no_files_is_named():
    assert "cannot create '/proc/perdure.db'" in refusal_of(Path("/proc/perdure.db")).message


def test_a_directory_is_no_store(tmp_path):
    assert isinstance(refusal_of(tmp_path), StoreRefused)


def test_a_pipe_is_no_store(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    assert isinstance(refusal_of(tmp_path / "pipe"), StoreRefused)


@pytest.mark.parametrize("content", [b"x", b"hello, world\n" * 100, b"\x00" * 4096])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)

    refusal = refusal_of(path)

    assert isinstance(refusal, StoreRefused)
    assert "notes.txt" in refusal.message
    assert path.read_bytes() == content


def test_a_database_of_another_application_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.db"
    other = apsw.Connection(str(path))
    other.execute("CREATE TABLE customers (name)")
    other.close()
    before = path.read_bytes()

    refusal = refusal_of(path)

    assert isinstance(refusal, StoreRefused)
    assert "another application" in refusal.message
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "store.db"
    asyncio.run(open_and_close(path))
    newer = apsw.Connection(str(path))
    newer.pragma("user_version", 99)
    newer.close()

    refusal = refusal_of(path)

    assert isinstance(refusal, StoreRefused)
    assert "99" in refusal.message
    assert "Upgrade perdure" in refusal.message


def test_a_damaged_file_is_reported_with_the_way_out(tmp_path):
    path = tmp_path / "store.db"
    asyncio.run(open_and_close(path))
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    content[100:4096] = os.urandom(3996)
    path.write_bytes(content)

    refusal = refusal_of(path)

    assert isinstance(refusal, CorruptData)
    assert "backup" in refusal.message


def test_an_integrity_check_finds_what_opening_did_not_touch(tmp_path):
    path = tmp_path / "store.db"

    async def fill():
        async with SqliteProvider(path) as provider:
            for number in range(200):
                await provider.enqueue_for_orchestrator(start(f"i-{number}" + "x" * 200))

    async def check():
        async with SqliteProvider(path) as provider:
            await provider.admin.integrity_check()

    asyncio.run(fill())
    asyncio.run(check())
    content = bytearray(path.read_bytes())
    content[-8192:] = b"\x5a" * 8192
    path.write_bytes(content)

    with pytest.raises(CorruptData, match="damaged"):
        asyncio.run(check())


def test_a_moved_store_points_to_its_new_place(tmp_path):
    path = tmp_path / "store.db"

    async def move():
        async with SqliteProvider(path) as provider:
            await provider.admin.mark_moved("postgresql://db/shop")

    asyncio.run(move())

    refusal = refusal_of(path)
    assert isinstance(refusal, StoreMoved)
    assert "postgresql://db/shop" in refusal.message
    asyncio.run(open_and_close(path, allow_moved=True))


MOUNTS = """\
22 1 252:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:27 / /mnt/nfs rw - nfs4 server:/export rw
31 22 0:28 / /mnt/nfs/local rw - ext4 /dev/vdb rw
32 22 0:29 / /mnt/with\\040space rw - fuse.sshfs host:/ rw
33 22 0:30 / /mnt/twice rw - ext4 /dev/vdc rw
34 33 0:31 / /mnt/twice rw - cifs //host/share rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/shop.db", "ext4"),
        ("/mnt/nfs/shop.db", "nfs4"),
        ("/mnt/nfsother/shop.db", "ext4"),
        ("/mnt/nfs/local/shop.db", "ext4"),
        ("/mnt/with space/shop.db", "fuse.sshfs"),
        ("/mnt/twice/shop.db", "cifs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(path, kind):
    assert find_file_system(path, MOUNTS) == kind


def test_a_network_file_system_is_refused(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr("perdure.providers.local_files._MOUNTS", mounts)

    refusal = refusal_of(tmp_path / "store.db")

    assert isinstance(refusal, StoreRefused)
    assert "nfs4" in refusal.message
    assert "local disk" in refusal.message
    assert not (tmp_path / "store.db").exists()


def test_an_sqlite_that_loses_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_SAFE_SQLITE", (99, 0, 0))

    refusal = refusal_of(tmp_path / "store.db")

    assert isinstance(refusal, StoreRefused)
    assert apsw.sqlite_lib_version() in refusal.message


def test_a_setting_that_sqlite_does_not_take_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(connection._SYNCHRONOUS, "full", "WAL")

    refusal = refusal_of(tmp_path / "store.db")

    assert isinstance(refusal, StoreRefused)
    assert "synchronous" in refusal.message


@pytest.mark.parametrize(("durability", "level"), [("full", 2), ("relaxed", 1)])
def test_durability_decides_when_the_disk_is_waited_for(tmp_path, durability, level):
    async def synchronous():
        async with SqliteProvider(tmp_path / "store.db", durability=durability) as provider:
            return await provider._store.write(
                Verb("test", lambda tx: tx.row("PRAGMA synchronous", ())[0])
            )

    assert asyncio.run(synchronous()) == level


@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "store.db-shm"])
def test_a_file_that_disappears_stops_the_writing(tmp_path, name):
    async def lose_the_file():
        async with SqliteProvider(tmp_path / "store.db") as provider:
            await provider.enqueue_for_orchestrator(start("one"))
            (tmp_path / name).unlink()
            await provider.enqueue_for_orchestrator(start("two"))

    with pytest.raises(StoreClosed, match="removed or replaced"):
        asyncio.run(lose_the_file())


@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "store.db-shm"])
def test_a_commit_into_a_file_that_has_disappeared_is_not_answered_for(tmp_path, name):
    class Losing(ObservedProvider):
        def reached(self, point):
            if point == "before commit":
                (tmp_path / name).unlink()

    async def lose_the_file():
        async with Losing(tmp_path / "store.db") as provider:
            await provider.enqueue_for_orchestrator(start("one"))

    with pytest.raises(StoreClosed, match="removed or replaced"):
        asyncio.run(lose_the_file())


@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "store.db-shm"])
@pytest.mark.parametrize(
    "way", ["removed", "replaced", "moved with its directory", "behind a link"]
)
def test_no_change_is_overlooked_however_quiet_the_directory_was(tmp_path, monkeypatch, name, way):
    monkeypatch.setattr(guards, "_SETTLED_NS", 0)
    directory = tmp_path / "stores"
    directory.mkdir()
    named = directory / "store.db"
    if way == "behind a link":
        asyncio.run(open_and_close(named))
        named = tmp_path / "named.db"
        named.symlink_to(directory / "store.db")

    async def change():
        async with SqliteProvider(named) as provider:
            await provider.enqueue_for_orchestrator(start("one"))
            await provider.enqueue_for_orchestrator(start("two"))
            before = directory.stat()
            if way == "replaced":
                copy = directory / "copy"
                shutil.copy(directory / name, copy)
                copy.rename(directory / name)
            elif way == "moved with its directory":
                directory.rename(tmp_path / "elsewhere")
            else:
                (directory / name).unlink()
            if directory.exists():  # as a tool does that puts a backup in place
                os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))
            await provider.enqueue_for_orchestrator(start("three"))

    with pytest.raises(StoreClosed, match="removed or replaced"):
        asyncio.run(change())


def test_a_file_that_is_back_is_written_again(tmp_path):
    path, away = tmp_path / "store.db", tmp_path / "away.db"

    async def move_the_file():
        async with SqliteProvider(path) as provider:
            path.rename(away)
            with pytest.raises(StoreClosed, match="removed or replaced"):
                await provider.enqueue_for_orchestrator(start("one"))
            away.rename(path)
            return await provider.enqueue_for_orchestrator(start("two"))

    assert asyncio.run(move_the_file())


def test_a_file_with_two_names_is_refused(tmp_path):
    path, other = tmp_path / "store.db", tmp_path / "other.db"
    asyncio.run(open_and_close(path))
    os.link(path, other)

    for each in (path, other):
        with pytest.raises(StoreRefused, match="has 2 names"):
            asyncio.run(open_and_close(each))
    other.unlink()
    asyncio.run(open_and_close(path))


def draft_of(path):
    draft = Draft(path, is_directory=False)
    draft.unlock()
    return draft.path


def test_a_creation_that_was_cut_off_leaves_no_second_name(tmp_path):
    path = tmp_path / "store.db"
    draft = draft_of(path)
    os.link(draft, path)

    asyncio.run(open_and_close(path))

    assert not draft.exists()


def test_processes_that_create_one_file_do_not_disturb_each_other(tmp_path, monkeypatch):
    """A draft is unlocked before it gets its name: another process may take it for a left one."""
    path = tmp_path / "store.db"
    put_in_place = local_files.put_in_place

    def put_in_place_late(draft, target):
        monkeypatch.undo()
        with draft_beside(target):
            assert not draft.exists()
        put_in_place(draft, target)

    monkeypatch.setattr(local_files, "put_in_place", put_in_place_late)
    asyncio.run(open_and_close(path))
    assert [each.name for each in tmp_path.iterdir()] == ["store.db"]


def test_a_draft_may_vanish_while_another_process_opens_the_file(tmp_path, monkeypatch):
    path = tmp_path / "store.db"
    draft = draft_of(path)
    os.link(draft, path)
    is_same = Path.samefile

    def vanish_first(self, other):
        draft.unlink()  # as its maker does, once the file has its name
        return is_same(self, other)

    monkeypatch.setattr(Path, "samefile", vanish_first)

    asyncio.run(open_and_close(path))

    assert not draft.exists()


@pytest.mark.parametrize("spelled", ["text", "bytes", "path", "link", "address"])
def test_another_copy_of_sqlite_cannot_open_a_store_that_is_open_here(tmp_path, spelled):
    path = tmp_path / "a store.db"
    (tmp_path / "link.db").symlink_to(path)
    database = {
        "text": str(path),
        "bytes": os.fsencode(path),
        "path": path,
        "link": tmp_path / "link.db",
        "address": f"{path.as_uri()}?mode=ro",
    }[spelled]

    async def meet():
        async with SqliteProvider(path), SqliteProvider(tmp_path / "link.db"):
            with pytest.raises(UsageError, match="package apsw"):
                sqlite3.connect(database, uri=spelled == "address")
            for other in (":memory:", tmp_path / "other.db", ""):
                sqlite3.connect(other).close()

    asyncio.run(meet())
    sqlite3.connect(database, uri=spelled == "address").close()


def test_another_copy_of_sqlite_that_was_there_first_is_warned_of(tmp_path, caplog):
    path = tmp_path / "store.db"
    asyncio.run(open_and_close(path))
    assert not caplog.text

    stranger = sqlite3.connect(path)
    stranger.execute("SELECT * FROM sqlite_master").fetchall()
    asyncio.run(open_and_close(path))
    stranger.close()

    assert "is open in this program already" in caplog.text


def test_what_was_written_to_a_log_that_disappeared_is_kept_by_closing(tmp_path):
    async def lose_the_log():
        async with SqliteProvider(tmp_path / "store.db") as provider:
            await provider.enqueue_for_orchestrator(start("one"))
            (tmp_path / "store.db-wal").unlink()
        async with SqliteProvider(tmp_path / "store.db") as provider:
            return (await provider.admin.list_instances()).instances[0].instance_id

    assert asyncio.run(lose_the_log()) == "one"


def test_a_closed_provider_says_so(tmp_path):
    provider = SqliteProvider(tmp_path / "store.db")

    async def use():
        for call in (
            lambda: provider.enqueue_for_orchestrator(start("one")),
            lambda: provider.read("one"),
            provider.admin.get_system_metrics,
            lambda: provider.watch("one"),
        ):
            with pytest.raises(StoreClosed):
                await call()

    asyncio.run(use())
    asyncio.run(open_and_close(tmp_path / "store.db"))
    asyncio.run(use())


FORKS = """
import asyncio, os, sys
from perdure.conformance.factories import start
from perdure.errors import StoreClosed
from perdure.providers.sqlite import SqliteProvider

async def enqueue(name):
    await provider.enqueue_for_orchestrator(start(name))

async def count():
    await provider.admin.integrity_check()
    return (await provider.admin.get_system_metrics()).total_instances

provider = SqliteProvider(sys.argv[1])
runner = asyncio.Runner()
runner.run(provider.open())
runner.run(enqueue("before"))
child = os.fork()
if child == 0:
    try:
        asyncio.new_event_loop().run_until_complete(enqueue("child"))
    except StoreClosed as error:
        os.write(1, b"refused ")
    del provider
    sys.exit(0)
os.waitpid(child, 0)
runner.run(enqueue("after"))
print(runner.run(count()))
runner.run(provider.close())
"""


def test_a_forked_process_is_refused_and_harms_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path / "store.db")],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )

    assert done.stdout.split() == ["refused", "2"], done.stderr


def test_a_backup_is_a_store_of_its_own(tmp_path):
    async def back_up():
        async with SqliteProvider(tmp_path / "store.db") as provider:
            await provider.enqueue_for_orchestrator(start("one"))
            await provider.admin.backup(tmp_path / "copy.db")
            await provider.enqueue_for_orchestrator(start("two"))

    async def instances(path):
        async with SqliteProvider(path) as provider:
            page = await provider.admin.list_instances()
            return sorted(info.instance_id for info in page.instances)

    asyncio.run(back_up())

    assert asyncio.run(instances(tmp_path / "copy.db")) == ["one"]
    assert asyncio.run(instances(tmp_path / "store.db")) == ["one", "two"]
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db", "store.db"]


def test_a_backup_never_overwrites(tmp_path):
    (tmp_path / "copy.db").write_text("precious")

    async def back_up():
        async with SqliteProvider(tmp_path / "store.db") as provider:
            await provider.admin.backup(tmp_path / "copy.db")

    with pytest.raises(AlreadyExists):
        asyncio.run(back_up())
    assert (tmp_path / "copy.db").read_text() == "precious"


def test_a_backup_of_a_damaged_store_is_not_written(tmp_path):
    path = tmp_path / "store.db"

    async def fill(prefix):
        async with SqliteProvider(path) as provider:
            for number in range(60):
                await provider.enqueue_for_orchestrator(start(f"{prefix}-{number}" + "x" * 150))

    async def is_sound():
        async with SqliteProvider(path) as provider:
            try:
                await provider.admin.integrity_check()
            except CorruptData:
                return False
            return True

    async def back_up():
        async with SqliteProvider(path) as provider:
            await provider.admin.backup(tmp_path / "copy.db")

    asyncio.run(fill("old"))
    old = path.read_bytes()
    asyncio.run(fill("new"))
    sound = path.read_bytes()
    asyncio.run(back_up())
    (tmp_path / "copy.db").unlink()
    found = 0
    for place in range(4096, len(sound), 4096):
        # Overwritten, or as it was before: a write that the disk has lost.
        for page in {b"\xff" * 4096, old[place : place + 4096] or bytes(4096)}:
            path.write_bytes(sound[:place] + page + sound[place + 4096 :])
            try:
                if asyncio.run(is_sound()):
                    continue
            except ProviderError:  # not even opened
                continue
            found += 1
            with pytest.raises(CorruptData, match=r"No backup was written.*earlier backup"):
                asyncio.run(back_up())
            assert [file.name for file in tmp_path.iterdir()] == ["store.db"]
    assert found > 20


def test_the_store_tells_how_it_keeps_data(tmp_path):
    async def info():
        provider = SqliteProvider(tmp_path / "store.db", clock=ManualClock())
        async with provider:
            return await provider.admin.get_store_info()

    found = asyncio.run(info())

    assert found.location == str(tmp_path / "store.db")
    assert found.details["sqlite"] == apsw.sqlite_lib_version()
    assert found.details["journal_mode"] == "wal"
    assert found.details["durability"] == "full"
    assert found.size_bytes is not None
    assert found.size_bytes > 0


def test_a_relative_path_stays_where_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    provider = SqliteProvider("store.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    async def use():
        async with provider:
            await provider.enqueue_for_orchestrator(start("one"))

    asyncio.run(use())

    assert Path(tmp_path, "store.db").exists()
