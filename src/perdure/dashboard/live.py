"""The stream of a tab: tells it that something has changed, at most four times a second.

An event carries no data of instances, only its topics: the page reads again what it shows. So a
slow reader costs nothing, and the next event makes up for a missed one. A tab that comes back
with ``Last-Event-ID`` is told about counts only if they have changed since.

- ``counts``: the numbers of instances by status have changed. One task for all tabs asks the store.
- ``run``: the instance that the tab looks at may have changed. One task for all tabs of an instance
  watches it.

All tabs are told at the same moment, so that those with the same view share one answer. The next
pause is longer if their reads took longer: open pages give way to the workers.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.client.instance import count_by_status
from perdure.errors import PerdureError
from perdure.ids import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator

    from perdure.dashboard.service import Service
    from perdure.model.status import Status

LOOK_SECONDS: Final = 2.0
LOOK_SHARE: Final = 20
"""The pause between two looks, as a multiple of the time that a look took: a large store is asked
less often."""
READ_SHARE: Final = 100
"""The pause between two messages to the tabs, as a multiple of the time that their reads took,
without the time of sending the answers."""
PACE_SECONDS: Final = 0.25
PACE_SECONDS_MAX: Final = 5.0
PING_SECONDS: Final = 15.0
STREAMS_MAX: Final = 256


class Tab:
    """An open page: the instance that it looks at, and the topics that it has not been told."""

    def __init__(self, instance_id: str | None) -> None:
        self.instance_id = instance_id
        self.topics: set[str] = set()
        self.wake = asyncio.Event()


class Changes:
    """Notices changes of the store while at least one tab is open, and tells the tabs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tabs: set[Tab] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.number = 0
        """Grows with every change of the counts."""
        self._server = new_id()[:8]
        self.counts: dict[Status, int] = {}
        self.problem: str | None = None
        self._last: object = None
        """The counts and changes of the last look. They stay when the last tab is closed."""
        self._news = asyncio.Event()
        self._can_tell = asyncio.Event()
        self._reads = 0
        self._reading_since = 0.0
        self._spent = 0.0
        """Seconds of the CPU, of this thread, while at least one read was under way."""
        self.has_ended = False

    @property
    def is_full(self) -> bool:
        return len(self._tabs) >= STREAMS_MAX

    @property
    def event_id(self) -> str:
        """The id of the last event. No other server uses it."""
        return f"{self._server}.{self.number}"

    @contextmanager
    def reading(self) -> Generator[None]:
        """Count the time of a read of a tab."""
        if self._reads == 0:
            self._reading_since = time.thread_time()
        self._reads += 1
        try:
            yield
        finally:
            self._reads -= 1
            if self._reads == 0:
                self._spent += time.thread_time() - self._reading_since

    def enter(self, tab: Tab, last_id: str | None = None) -> None:
        """Begin to tell a tab. ``last_id`` is the id of the last event that it got."""
        self._tabs.add(tab)
        if tab.instance_id is not None:  # it may have changed since the page has read it
            tab.topics.add("run")
        if self.number > 0 and last_id != self.event_id:
            tab.topics.add("counts")
        if tab.topics:
            tab.wake.set()
        self._adjust_tasks()

    def end(self) -> None:
        """End all streams: the server stops."""
        self.has_ended = True
        for tab in self._tabs:
            tab.wake.set()

    def leave(self, tab: Tab) -> None:
        self._tabs.discard(tab)
        self._adjust_tasks()

    def _adjust_tasks(self) -> None:
        wanted: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        if self._tabs:
            wanted = {"look": self._look, "tell": self._tell}
        for tab in self._tabs:
            if tab.instance_id is not None:
                wanted[f"run {tab.instance_id}"] = partial(self._follow, tab.instance_id)
        for name in self._tasks.keys() - wanted.keys():
            self._tasks.pop(name).cancel()
        for name in wanted:
            if name in self._tasks and not self._tasks[name].done():
                continue
            self._tasks[name] = asyncio.create_task(wanted[name](), name=f"perdure-page-{name}")

    def _note(self, topic: str, instance_id: str | None = None) -> None:
        for tab in self._tabs:
            if instance_id is None or tab.instance_id == instance_id:
                tab.topics.add(topic)
        self._news.set()

    async def _look(self) -> None:
        """Ask the store for the counts, again and again."""
        while True:
            began = time.monotonic()
            try:
                metrics = await self._service.admin.get_system_metrics()
                self.counts, self.problem = count_by_status(metrics.by_status), None
                seen: object = (self.counts, metrics.total_events)
            except PerdureError as error:
                self.problem = str(error)
                seen = self.problem
            if seen != self._last:
                self._last = seen
                self.number += 1
                self._service.answers.clear()
                self._note("counts")
            took = time.monotonic() - began
            await asyncio.sleep(max(LOOK_SECONDS, LOOK_SHARE * took))

    async def _follow(self, instance_id: str) -> None:
        """Watch one instance, but not while its tabs could not be told: each wake-up costs."""
        while True:
            with self._service.provider.watch(instance_id) as watch:
                self._service.answers.drop(instance_id)
                self._note("run", instance_id)
                while not await watch.wait(30_000):
                    pass
            await self._can_tell.wait()

    async def _tell(self) -> None:
        """Wake the tabs that have topics, with a pause that grows with the cost of their reads."""
        while True:
            self._can_tell.set()
            await self._news.wait()
            self._news.clear()
            self._can_tell.clear()
            before = self._spent
            for tab in self._tabs:
                if tab.topics:
                    tab.wake.set()
            await asyncio.sleep(PACE_SECONDS)
            pause = min(PACE_SECONDS_MAX, READ_SHARE * (self._spent - before))
            await asyncio.sleep(max(0.0, pause - PACE_SECONDS))


async def stream(
    changes: Changes, instance_id: str | None, last_id: str | None = None
) -> AsyncIterator[bytes]:
    """Yield server-sent events until the tab is closed. ``last_id`` is the last that it got."""
    tab = Tab(instance_id)
    changes.enter(tab, last_id)
    try:
        yield b"retry: 2000\n\n"
        while True:
            try:
                await asyncio.wait_for(tab.wake.wait(), PING_SECONDS)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            if changes.has_ended:
                return
            tab.wake.clear()
            topics = sorted(tab.topics)
            tab.topics.clear()
            body = {"topics": topics, "counts": changes.counts, "problem": changes.problem}
            data = msgspec.json.encode(body)
            yield b"id: %b\nevent: change\ndata: %b\n\n" % (changes.event_id.encode(), data)
    finally:
        changes.leave(tab)
