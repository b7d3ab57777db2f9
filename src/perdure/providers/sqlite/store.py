"""The store: accepts operations, routes them to the writer and delivers their outcomes.

This module, with ``Database``, ``System`` and ``EngineProvider``, is the surface on which other
stores are built:

- a ``System`` has the clock, the random numbers and the threads;
- a ``Database`` has the connection. Subclass it to open and to close it in another way, and give it
  a ``CommitHook`` to take part in each commit, for example to write a journal line before COMMIT;
  its ``transaction_type`` can be a subclass of ``Transaction`` that keeps events elsewhere;
- a ``Store`` runs operations, with a writer in a thread or, ``on_loop=True``, on the event loop.
  If the database has no connections for readers, the writer reads too;
- an ``EngineProvider`` has all verbs of the contract on a store, and ``EngineAdmin`` those of its
  administration.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from perdure.errors import StoreClosed
from perdure.logs import get_logger
from perdure.processes import after_fork_in_child
from perdure.providers.records import FetchedOrchestration, FetchedWork
from perdure.providers.sqlite import guards, peers
from perdure.providers.sqlite.control import RELEASE_HOLDER
from perdure.providers.sqlite.readiness import NoWork
from perdure.providers.sqlite.turns import GIVE_BACK_TURN
from perdure.providers.sqlite.work import ABANDON_WORK
from perdure.providers.sqlite.writer import (
    BATCH_OPERATIONS_MAX,
    CommitResult,
    Entry,
    Reader,
    ThreadWriter,
    Writer,
    unknown_outcome,
)
from perdure.providers.waiting import ChangeHub, Poll, Signal, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from perdure.clock import Clock
    from perdure.providers.sqlite.database import Database
    from perdure.providers.sqlite.transaction import Verb

_log = get_logger("perdure.sqlite")


class Signals:
    """Wake those who wait for turns, for work, or for a change of an instance.

    Stores that share a database share these too.
    """

    def __init__(self, clock: Clock) -> None:
        self.turns = Signal(clock)
        self.work = Signal(clock)
        self.changes = ChangeHub(clock)

    def notify_all(self) -> None:
        self.turns.notify()
        self.work.notify()
        self.changes.notify_all()


class Store:
    """Accepts operations while it is open. The verbs themselves are functions elsewhere."""

    def __init__(
        self, database: Database, *, on_loop: bool = False, signals: Signals | None = None
    ) -> None:
        self.database = database
        self.clock = database.system.clock
        self.signals = Signals(self.clock) if signals is None else signals
        self._on_loop = on_loop
        self.is_open = False
        self._opening = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._home_thread = 0
        """The thread that opened the store."""
        self._writer: Writer | None = None
        self._quick: Reader | Writer | None = None
        self._slow: Reader | Writer | None = None
        self._accepted: list[Entry] = []
        self._watchers = 0
        self._expected: set[int] = set()
        """Topics that this process waits for until it closes the store."""
        self._topics: dict[int, list[str]] = {}
        """Watched instances, by the topic under which other processes tell of them."""
        self._is_lone = False
        """The last commit held one operation, so commit the next one inline."""
        self._under_way: set[Entry] = set()
        """Operations of this loop that were handed to the writer and not answered yet."""
        self._waits: set[asyncio.Task[None]] = set()

    # --- opening and closing

    async def open(self, *, allow_moved: bool) -> None:
        async with self._opening:
            if not self.is_open:
                await self._open(allow_moved=allow_moved)

    async def _open(self, *, allow_moved: bool) -> None:
        database = self.database
        if self._on_loop:
            database.open(allow_moved=allow_moved)
        else:
            await database.system.run_in_thread(database.open, allow_moved=allow_moved)
        self._loop = asyncio.get_running_loop()
        self._home_thread = get_ident()
        if self._on_loop:
            self._writer = Writer(database, self._deliver_here)
            self._quick = self._slow = self._writer
        else:
            self._thread_id = get_ident()
            self._writer = ThreadWriter(database, self._deliver_soon)
            self._quick = self._slow = self._writer
            if database.has_readers:
                self._quick = self._start_reader("perdure-sqlite-quick")
                self._slow = self._start_reader("perdure-sqlite-slow")
            _open_stores.add(self)
        self._writer.start()
        self.is_open = True
        database.started()
        self._release_dead(database.peers.take_dead(database.system.monotonic()))

    def _start_reader(self, name: str) -> Reader:
        reader = Reader(self.database, self._deliver_soon, name)
        reader.start()
        return reader

    async def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        # Carried through when the caller is cancelled: it cannot be closed a second time.
        self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        _open_stores.discard(self)
        self.signals.notify_all()
        if self._waits:
            await asyncio.wait(self._waits)
        self._hand_over()
        if self._on_loop:
            self._stop()
        else:
            await self.database.system.run_in_thread(self._stop)
        self.database.stopped()

    def _stop(self) -> None:
        # The writer last: only a connection that may write can clear the log away.
        for each in (self._quick, self._slow):
            if isinstance(each, Reader):
                each.stop()
        if self._writer is not None:
            self._writer.stop()

    # --- accepting operations

    def write(
        self,
        verb: Verb,
        *args: Any,
        is_small: bool = False,
        poll: Poll | None = None,
        raw: bool = False,
    ) -> asyncio.Future[Any]:
        writer = self._writer
        if not self.is_open or writer is None:
            raise self.closed(verb.name)
        future = self._new_future()
        entry = Entry(future, verb, args, is_small, poll, raw)
        loop = future.get_loop()
        if loop is not self._loop:
            # For a writer on the loop, this is a loop that took the place of the first one.
            writer.submit([entry])
        elif self._is_lone:
            self._is_lone = False
            self._write_one(writer, entry)
        elif self._accepted:
            self._accepted.append(entry)
        else:
            # Handed over after every ready task has run. One by one, the writer would wake at the
            # first operation and compete for the interpreter with the tasks that follow.
            self._accepted.append(entry)
            loop.call_soon(self._hand_over)
        return future

    def _hand_over(self) -> None:
        accepted, self._accepted = self._accepted, []
        writer = self._writer
        if writer is None:
            return
        if len(accepted) == 1 and self.is_open:
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
        result = CommitResult()
        try:
            is_done = writer.commit_here(entry, result)
        except BaseException as signal:  # noqa: BLE001 - raised again when this is answered
            assert self._loop is not None
            self._loop.call_soon(_raise, signal)
            is_done = True  # or half done: the thread must not write it once more
            if not result.outcomes:
                result.outcomes.append((entry, None, unknown_outcome(self.database.label, signal)))
        if is_done:
            # In the next pass of the loop: what else is written in this one would not be alone.
            assert self._loop is not None
            self._loop.call_soon(self._note_lone)
            self._answer(result)
        return is_done

    def _note_lone(self) -> None:
        self._is_lone = not self._accepted and not self._under_way

    def read(self, verb: Verb, *args: Any) -> asyncio.Future[Any]:
        """Run a verb that reads a few rows."""
        return self._query(self._quick, verb, args)

    def search(self, verb: Verb, *args: Any) -> asyncio.Future[Any]:
        """Run a verb that may take long, on another thread than quick reads."""
        return self._query(self._slow, verb, args)

    def _query(
        self,
        reader: Reader | Writer | None,
        verb: Verb,
        args: tuple[Any, ...],
    ) -> asyncio.Future[Any]:
        if not self.is_open or reader is None:
            raise self.closed(verb.name)
        future = self._new_future()
        reader.query(Entry(future, verb, args, is_query=True))
        return future

    def _new_future(self) -> asyncio.Future[Any]:
        # Asking for the running loop costs a system call, and is nearly always this one.
        loop = self._loop if get_ident() == self._thread_id else asyncio.get_running_loop()
        assert loop is not None
        return loop.create_future()

    def closed(self, operation: str) -> StoreClosed:
        return StoreClosed(
            operation,
            f"the provider of {self.database.label} is not open here; use async with, in this "
            "process",
        )

    # --- back on the event loop

    def _deliver_here(self, result: CommitResult) -> None:
        """Called by a writer without a thread, in the thread that asked."""
        assert self._loop is not None
        # If the home loop does not run any more, another one took its place.
        if get_ident() == self._home_thread or not self._loop.is_running():
            self._deliver(result)
        else:
            self._deliver_soon(result)

    def _deliver_soon(self, result: CommitResult) -> None:
        """Called by the threads. Each answer goes to the loop that asked: the home loop may be
        blocked while another one, in a thread of its own, must go on.
        """
        home, outcomes = self._loop, result.outcomes
        assert home is not None
        result.outcomes = [each for each in outcomes if each[0].future.get_loop() is home]
        self._call_soon(home, self._deliver, result)
        if len(result.outcomes) < len(outcomes):
            for entry, value, error in outcomes:
                loop = entry.future.get_loop()
                if loop is not home:
                    self._call_soon(loop, self._settle, entry, value, error)

    def _call_soon(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any
    ) -> None:
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            label = self.database.label
            _log.warning("an event loop that uses %s is gone; an answer was dropped", label)

    def _deliver(self, result: CommitResult) -> None:
        """Called on the event loop with outcomes of the writer or of a reader."""
        self._under_way.difference_update([entry for entry, _, _ in result.outcomes])
        self._answer(result)
        self._is_lone = False
        if len(result.outcomes) == 1:
            self._note_lone()

    def _answer(self, result: CommitResult) -> None:
        # First the signals: a wait that begins below must see that they have been given.
        signals = self.signals
        if result.foreign:
            signals.notify_all()
        if result.turns_changed:
            signals.turns.notify()
        if result.work_changed:
            signals.work.notify()
        if result.changed_instances:
            signals.changes.notify(result.changed_instances)
        if result.dead_holders:
            self._release_dead(result.dead_holders)
        for entry, value, error in result.outcomes:
            self._settle(entry, value, error)

    def _settle(self, entry: Entry, value: Any, error: BaseException | None) -> None:
        future = entry.future
        if future.done():
            self._release_fetched(value)
        elif error is not None:
            future.set_exception(error)
        elif value.__class__ is not NoWork or entry.raw:
            future.set_result(value)
        elif entry.poll is None or not self.is_open:
            future.set_result(None)
        else:
            self._wait(entry, entry.poll, value)

    def _release_fetched(self, value: Any) -> None:
        """Release what a fetch has locked after its caller was cancelled."""
        if not self.is_open:
            return
        if value.__class__ is list:
            for member in value:
                self._release_fetched(member)
            return
        if isinstance(value, FetchedOrchestration):
            given = self.write(GIVE_BACK_TURN, value)
        elif isinstance(value, FetchedWork):
            given = self.write(ABANDON_WORK, value.lock_token, None, True)
        else:
            return
        given.add_done_callback(_note_failure)

    # --- waiting

    def _wait(self, entry: Entry, poll: Poll, nothing: NoWork) -> None:
        task = entry.future.get_loop().create_task(self._keep_looking(entry, poll, nothing))
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)
        entry.future.add_done_callback(lambda future: task.cancel() if future.cancelled() else None)

    async def _keep_looking(self, entry: Entry, poll: Poll, nothing: NoWork) -> None:
        answer: Any = nothing
        self.add_watcher(1)
        try:
            while isinstance(answer, NoWork):
                if not await poll.wait(answer.retry_at_ms) or not self.is_open:
                    answer = None
                else:
                    answer = await self.write(entry.verb, *entry.args, raw=True)
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            if not entry.future.done():
                entry.future.set_exception(error)
            return
        finally:
            self.add_watcher(-1)
        if entry.future.done():
            self._release_fetched(answer)
        else:
            entry.future.set_result(answer)

    def watch(self, instance_id: str) -> Watch:
        if not self.is_open:
            raise self.closed("watch")
        return _StoreWatch(self.signals.changes, instance_id, self)

    def add_watcher(self, count: int) -> None:
        """Notice commits of other processes while the number of watchers is not 0."""
        before, self._watchers = self._watchers, self._watchers + count
        if self._writer is not None and bool(before) != bool(self._watchers):
            if self._watchers:
                self._listen()
            self._writer.watch(is_watching=bool(self._watchers))

    # --- other processes

    def _listen(self) -> None:
        assert self._loop is not None
        self.database.peers.listen(self._loop, self._hear_others)

    def expect(self, topic: int) -> None:
        """Let others wake the fetches of this process from now on. Call it before a fetch.

        Also lets others see when this process has died: only a process that fetches takes locks.
        """
        if topic not in self._expected and self.is_open:
            self._expected.add(topic)
            self._listen()
            self.database.peers.want(topic)

    def _release_dead(self, holders: Sequence[str]) -> None:
        """Release everything that dead processes held, then forget them."""
        for holder in holders:
            if self.is_open:
                released = self.write(RELEASE_HOLDER, holder)
                released.add_done_callback(partial(self._forget_dead, holder))

    def _forget_dead(self, holder: str, released: asyncio.Future[Any]) -> None:
        _note_failure(released)
        if not released.cancelled() and released.exception() is None:
            self.database.peers.remove(holder)

    def want_changes(self, instance_id: str) -> None:
        """Let others wake this process when an instance has changed."""
        topic = peers.topic_of(instance_id)
        self._topics.setdefault(topic, []).append(instance_id)
        self.database.peers.want(topic)

    def release_changes(self, instance_id: str) -> None:
        """End one ``want_changes``."""
        topic = peers.topic_of(instance_id)
        watched = self._topics[topic]
        watched.remove(instance_id)
        if not watched:
            del self._topics[topic]
        self.database.peers.release(topic)

    def _hear_others(self, topics: Sequence[int]) -> None:
        """Called on the event loop when another process has committed."""
        for topic in topics:
            if topic == peers.EVERYTHING:
                self.signals.notify_all()
            elif topic == peers.TURNS:
                self.signals.turns.notify()
            elif topic == peers.WORK:
                self.signals.work.notify()
            else:
                self.signals.changes.notify(set(self._topics.get(topic, ())))

    # --- forking

    def disown(self) -> None:
        """Close the store in a forked child: its threads and file locks stayed with the parent."""
        self.is_open = False
        self.database.peers.disown()


class _StoreWatch(Watch):
    """Lets the writer look for commits of other processes while it is entered."""

    def __init__(self, hub: ChangeHub, instance_id: str, store: Store) -> None:
        super().__init__(hub, instance_id)
        self._store = store

    def __enter__(self) -> Self:
        self._store.add_watcher(1)
        self._store.want_changes(self._instance_id)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._store.release_changes(self._instance_id)
        self._store.add_watcher(-1)


def _passing_on(way: str) -> Callable[[Verb], Any]:
    """Return a function that makes methods of a provider out of verbs.

    Such a method passes its arguments on to its ``_store``, those by name after the others.
    """

    def method_of(verb: Verb) -> Any:
        def method(provider: Any, *args: Any, **named: Any) -> Any:
            pass_on = getattr(provider._store, way)  # noqa: SLF001 - it becomes a method
            return pass_on(verb, *args, *named.values())

        return method

    return method_of


writes: Final = _passing_on("write")
reads: Final = _passing_on("read")
"""Makes a method of a verb that reads a few rows."""
searches: Final = _passing_on("search")
"""Makes a method of a verb that may take long."""


def _raise(error: BaseException) -> None:
    raise error


def _note_failure(given: asyncio.Future[Any]) -> None:
    if not given.cancelled() and (error := given.exception()) is not None:
        _log.debug("a lock could not be released: %s", error)


_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()
"""Those with threads."""
_inherited: list[Store] = []
"""Kept for ever in a forked child: closing connections there could harm those of the parent."""


def _disown_inherited() -> None:
    for store in list(_open_stores):
        store.disown()
        _inherited.append(store)
    _open_stores.clear()
    guards.forget_all()


after_fork_in_child(_disown_inherited)
