"""One opened file: its threads, and the way from a verb to them and back to the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import apsw

from perdure.errors import StoreClosed
from perdure.providers._shared import moved
from perdure.providers.items import FetchedOrchestration, FetchedWork
from perdure.providers.sqlite import connection as connections
from perdure.providers.sqlite import place, strangers, turns, worker_queue
from perdure.providers.sqlite.bell import Bell
from perdure.providers.sqlite.committer import unknown_outcome
from perdure.providers.sqlite.entries import Delivery, Entry
from perdure.providers.sqlite.nothing import Nothing
from perdure.providers.sqlite.readers import Reader
from perdure.providers.sqlite.writer import BATCH_OPERATIONS_MAX, Writer
from perdure.providers.watching import ChangeHub, Signal, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from perdure.clock import Clock
    from perdure.providers._shared.migrate import Migration
    from perdure.providers._shared.polling import Poll
    from perdure.providers.sqlite.connection import Durability
    from perdure.providers.sqlite.lending import LendableConnection

_log = logging.getLogger("perdure.sqlite")

OPEN_SECONDS_MAX: Final = 20.0
"""How long opening waits for other processes that are opening the same file."""


class Handle:
    """Accepts operations while it is open. The verbs themselves are functions elsewhere."""

    def __init__(
        self,
        path: Path,
        durability: Durability,
        clock: Clock,
        reached: Callable[[str], None],
        *,
        orphan_grace_ms: int,
    ) -> None:
        self.path = path
        self.clock = clock
        self.turns = Signal(clock)
        self.work = Signal(clock)
        self._changes = ChangeHub(clock)
        self._durability: Durability = durability
        self._reached = reached
        self._orphan_grace_ms = orphan_grace_ms
        self._is_open = False
        self._file: strangers.File = None
        self._opening = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._bell: Bell | None = None
        self._writer: Writer | None = None
        self._quick: Reader | None = None
        self._slow: Reader | None = None
        self._accepted: list[Entry] = []
        self._watchers = 0
        self._is_lone = False
        """The last answer was a single one: what it leads to will come alone too."""
        self._under_way: set[Entry] = set()
        """Operations of this loop that were handed to the writer and not answered yet."""
        self._waits: set[asyncio.Task[None]] = set()

    # --- opening and closing

    async def open(self, *, allow_moved: bool) -> None:
        async with self._opening:
            if not self._is_open:
                await self._open(allow_moved=allow_moved)

    async def _open(self, *, allow_moved: bool) -> None:
        connection = await asyncio.to_thread(self._connect, allow_moved=allow_moved)
        self._loop = asyncio.get_running_loop()
        self._thread_id = get_ident()
        self._bell = Bell(self._loop, self._hear, str(self.path))
        self._writer = Writer(
            self.path,
            self._durability,
            self.clock,
            self._deliver_soon,
            self._reached,
            orphan_grace_ms=self._orphan_grace_ms,
        )
        self._quick = Reader(self.path, self.clock, self._deliver_soon, "perdure-sqlite-quick")
        self._slow = Reader(self.path, self.clock, self._deliver_soon, "perdure-sqlite-slow")
        self._writer.start(connection)
        self._quick.start()
        self._slow.start()
        self._is_open = True
        self._file = strangers.keep_away(self.path)
        _open_handles.add(self)

    def due_migrations(self) -> Sequence[Migration]:
        """What opening would apply. Nothing is made or changed."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return connections.MIGRATIONS
        place.check_existing(self.path)
        try:
            connection = connections.connect_reader(self.path)
            try:
                connections.check_application(connection, self.path)
                return connections.due(connection, self.path)
            finally:
                connections.disconnect(connection)
        except apsw.NotADBError as error:
            raise place.not_a_database(self.path) from error
        except apsw.Error as error:
            raise connections.translate("migrate", error, self.path) from error

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        # Carried through when the caller is cancelled: nobody could close it a second time.
        self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        _open_handles.discard(self)
        self.turns.notify()
        self.work.notify()
        self._changes.notify_all()
        if self._waits:
            await asyncio.wait(self._waits)
        self._hand_over()
        await asyncio.to_thread(self._stop_threads)
        if self._bell is not None:
            self._bell.close()
        strangers.let_in(self._file)

    def _stop_threads(self) -> None:
        # The writer last: only a connection that may write can clear the log away.
        for thread in (self._quick, self._slow, self._writer):
            if thread is not None:
                thread.stop()
                thread.join()

    def _connect(self, *, allow_moved: bool) -> LendableConnection:
        connections.check_library()
        strangers.look_for(self.path)
        place.prepare_file(self.path)
        if self._durability == "full" and self.path.stat().st_size == 0:
            # Tables first: SQLite removes the log of an empty file.
            connections.disconnect(self._connect_in_time(allow_moved=True))
            place.reserve_log(self.path)
        return self._connect_in_time(allow_moved=allow_moved)

    def _connect_in_time(self, *, allow_moved: bool) -> LendableConnection:
        deadline = time.monotonic() + OPEN_SECONDS_MAX
        while True:
            try:
                return self._try_to_connect(allow_moved=allow_moved)
            except apsw.Error as error:
                is_busy = isinstance(error, apsw.BusyError | apsw.LockedError | apsw.ProtocolError)
                if not is_busy or time.monotonic() > deadline:
                    raise connections.translate("open", error, self.path) from error
            time.sleep(random.uniform(0.002, 0.02))

    def _try_to_connect(self, *, allow_moved: bool) -> LendableConnection:
        connection = connections.connect_writer(self.path, self._durability)
        try:
            connections.migrate(connection, self.path, self.clock)
            moved_to = connections.moved_to(connection)
            if moved_to is not None and not allow_moved:
                raise moved.refusal(repr(str(self.path)), moved_to)
        except BaseException:
            connections.disconnect(connection)
            raise
        return connection

    # --- accepting operations

    def write(
        self,
        name: str,
        operation: Callable[..., Any],
        *args: Any,
        alone: bool = False,
        is_small: bool = False,
        poll: Poll | None = None,
        raw: bool = False,
    ) -> asyncio.Future[Any]:
        writer = self._writer
        if not self._is_open or writer is None:
            raise self.closed(name)
        future = self._new_future()
        entry = Entry(
            future, name, operation, args, alone=alone, is_small=is_small, poll=poll, raw=raw
        )
        loop = future.get_loop()
        if loop is not self._loop:
            writer.submit([entry])
        elif self._is_lone:
            self._is_lone = False
            self._write_one(writer, entry)
        elif self._accepted:
            self._accepted.append(entry)
        else:
            # Handed over when every task that is ready has had its say: one by one, the writer
            # would wake at the first and fight over the interpreter with those that follow.
            self._accepted.append(entry)
            loop.call_soon(self._hand_over)
        return future

    def _hand_over(self) -> None:
        accepted, self._accepted = self._accepted, []
        writer = self._writer
        if writer is None:
            return
        if len(accepted) == 1 and self._is_open:
            self._write_one(writer, accepted[0])
            return
        self._under_way.update(accepted)
        # In parts, so that the first need not wait for the commit of ten thousand others.
        for start in range(0, len(accepted), BATCH_OPERATIONS_MAX):
            writer.submit(accepted[start : start + BATCH_OPERATIONS_MAX])

    def _write_one(self, writer: Writer, entry: Entry) -> None:
        """Here, if it is small and nothing was handed over before it; else in the other thread."""
        may_pass = entry.is_small and not self._under_way
        if not may_pass or not self._write_here(writer, entry):
            self._under_way.add(entry)
            writer.submit([entry])

    def _write_here(self, writer: Writer, entry: Entry) -> bool:
        delivery = Delivery()
        try:
            is_done = writer.commit_here(entry, delivery)
        except BaseException as signal:  # noqa: BLE001 - raised again when this is answered
            assert self._loop is not None
            self._loop.call_soon(_raise, signal)
            is_done = True  # or half done: the thread must not write it once more
            if not delivery.outcomes:
                delivery.outcomes.append((entry, None, unknown_outcome(self.path, signal)))
        if is_done:
            # By the first of its callbacks: what else is written now would not be alone.
            entry.future.add_done_callback(self._note_lone)
            self._deliver(delivery)
        return is_done

    def _note_lone(self, _: object) -> None:
        self._is_lone = not self._accepted and not self._under_way

    def read(self, name: str, operation: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """For a few rows."""
        return self._query(self._quick, name, operation, args)

    def search(self, name: str, operation: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """For a query that may take its time."""
        return self._query(self._slow, name, operation, args)

    def _query(
        self, reader: Reader | None, name: str, operation: Callable[..., Any], args: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        if not self._is_open or reader is None:
            raise self.closed(name)
        future = self._new_future()
        reader.submit(Entry(future, name, operation, args))
        return future

    def _new_future(self) -> asyncio.Future[Any]:
        # Asking for the running loop costs a system call, and is nearly always this one.
        loop = self._loop if get_ident() == self._thread_id else asyncio.get_running_loop()
        assert loop is not None
        return loop.create_future()

    def closed(self, operation: str) -> StoreClosed:
        return StoreClosed(
            operation,
            f"the provider of {str(self.path)!r} is not open here; use async with, in this process",
        )

    # --- back on the event loop

    def _deliver_soon(self, delivery: Delivery) -> None:
        """Called by the threads. Each answer goes to the loop that asked: the home loop may be
        blocked while another one, in a thread of its own, must go on.
        """
        home, bell = self._loop, self._bell
        assert bell is not None
        for entry, value, error in delivery.outcomes:
            loop = entry.future.get_loop()
            if loop is not home:
                try:
                    loop.call_soon_threadsafe(self._settle, entry, value, error)
                except RuntimeError:
                    _log.warning("the event loop of a caller is gone; its answer was dropped")
        bell.ring(delivery)

    def _hear(self, delivery: Delivery) -> None:
        """From one of the threads."""
        self._under_way.difference_update([entry for entry, _, _ in delivery.outcomes])
        self._deliver(delivery)
        self._is_lone = False
        if len(delivery.outcomes) == 1:
            self._note_lone(delivery)

    def _deliver(self, delivery: Delivery) -> None:
        # First the signals: whoever starts to wait below must see that they have been given.
        if delivery.turns_changed or delivery.foreign:
            self.turns.notify()
        if delivery.work_changed or delivery.foreign:
            self.work.notify()
        if delivery.foreign:
            self._changes.notify_all()
        elif delivery.changed_instances:
            self._changes.notify(delivery.changed_instances)
        for entry, value, error in delivery.outcomes:
            if entry.future.get_loop() is self._loop:
                self._settle(entry, value, error)

    def _settle(self, entry: Entry, value: Any, error: BaseException | None) -> None:
        future = entry.future
        if future.done():
            self._give_back(value)
        elif error is not None:
            future.set_exception(error)
        elif value.__class__ is not Nothing or entry.raw:
            future.set_result(value)
        elif entry.poll is None or not self._is_open:
            future.set_result(None)
        else:
            self._wait(entry, entry.poll, value)

    def _give_back(self, value: Any) -> None:
        """A fetch whose caller has gone away must not leave a lock behind."""
        if not self._is_open:
            return
        if value.__class__ is list:
            for member in value:
                self._give_back(member)
            return
        if isinstance(value, FetchedOrchestration):
            given = self.write("abandon_orchestration_item", turns.give_back, value)
        elif isinstance(value, FetchedWork):
            given = self.write(
                "abandon_work_item", worker_queue.abandon, value.lock_token, None, True
            )
        else:
            return
        given.add_done_callback(_note_failure)

    # --- waiting

    def _wait(self, entry: Entry, poll: Poll, nothing: Nothing) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._keep_looking(entry, poll, nothing))
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)
        entry.future.add_done_callback(lambda future: task.cancel() if future.cancelled() else None)

    async def _keep_looking(self, entry: Entry, poll: Poll, nothing: Nothing) -> None:
        answer: Any = nothing
        with self.watching():
            try:
                while isinstance(answer, Nothing):
                    if not await poll.wait(answer.due_at_ms) or not self._is_open:
                        answer = None
                    else:
                        answer = await self.write(
                            entry.name, entry.operation, *entry.args, raw=True
                        )
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                if not entry.future.done():
                    entry.future.set_exception(error)
                return
        if entry.future.done():
            self._give_back(answer)
        else:
            entry.future.set_result(answer)

    def watch(self, instance_id: str) -> Watch:
        if not self._is_open:
            raise self.closed("watch")
        return _FileWatch(self._changes, instance_id, self)

    def watching(self) -> _Watching:
        """While it is entered, commits of other processes are noticed."""
        return _Watching(self)

    def add_watcher(self, count: int) -> None:
        before, self._watchers = self._watchers, self._watchers + count
        if self._writer is not None and bool(before) != bool(self._watchers):
            self._writer.watch(is_watching=bool(self._watchers))

    # --- forking

    def disown(self) -> None:
        """In a forked child: the threads and the file's locks stayed with the parent."""
        self._is_open = False


class _Watching:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        self._handle.add_watcher(1)

    def __exit__(self, *_: object) -> None:
        self._handle.add_watcher(-1)


class _FileWatch(Watch):
    """Lets the writer look for commits of other processes while somebody watches."""

    def __init__(self, hub: ChangeHub, instance_id: str, handle: Handle) -> None:
        super().__init__(hub, instance_id)
        self._handle = handle

    def __enter__(self) -> Self:
        self._handle.add_watcher(1)
        return super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._handle.add_watcher(-1)


def _raise(error: BaseException) -> None:
    raise error


def _note_failure(given: asyncio.Future[Any]) -> None:
    if not given.cancelled() and (error := given.exception()) is not None:
        _log.debug("a lock that nobody wanted could not be given back: %s", error)


_open_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
_inherited: list[Handle] = []
"""Kept for ever in a forked child: closing connections there could harm those of the parent."""


def _disown_inherited() -> None:
    for handle in list(_open_handles):
        handle.disown()
        _inherited.append(handle)
    _open_handles.clear()
    strangers.forget_all()


os.register_at_fork(after_in_child=_disown_inherited)
