"""The stream of a tab: tells it that something has changed, at most four times a second.

An event carries no data of instances, only its topic: the page reads again what it shows. So a slow
reader costs nothing, and a missed event is made good by the next one. A tab that comes back with
``Last-Event-ID`` is told about counts only if they have changed since.

- ``counts``: the numbers of instances by status have changed. One task for all tabs asks the store.
- ``run``: the instance that the tab looks at may have changed.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.dashboard.one_run import run_key
from perdure.dashboard.overview import counts_of
from perdure.errors import PerdureError
from perdure.ids import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perdure.dashboard.service import Service

LOOK_SECONDS: Final = 2.0
LOOK_SHARE: Final = 20
"""Between two looks lies this multiple of the time that a look took, so that a large store is asked
less often."""
PACE_SECONDS: Final = 0.25
PING_SECONDS: Final = 15.0
STREAMS_MAX: Final = 256


class Counts:
    """Asks the store for the counts while at least one tab is open, once for all tabs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None
        self.tabs = 0
        self.number = 0
        """Grows with every change."""
        self._server = new_id()[:8]
        self.counts: dict[str, int] = {}
        self.problem: str | None = None
        self._changed = asyncio.Event()
        self._last: object = None
        """The counts and changes of the last look. They stay when the last tab is closed."""

    def enter(self) -> None:
        self.tabs += 1
        if self._task is None:
            self._task = asyncio.create_task(self._look(), name="perdure-dashboard-counts")

    def leave(self) -> None:
        self.tabs -= 1
        if self.tabs == 0 and self._task is not None:
            self._task.cancel()
            self._task = None

    @property
    def event_id(self) -> str:
        """The id of the last event. It is never that of an event of another server."""
        return f"{self._server}.{self.number}"

    async def wait(self, number: int) -> None:
        """Wait until there is a newer number."""
        while self.number == number:
            await self._changed.wait()

    async def _look(self) -> None:
        while True:
            began = time.monotonic()
            try:
                metrics = await self._service.admin.get_system_metrics()
                self.counts, self.problem = counts_of(metrics.by_status), None
                seen: object = (self.counts, metrics.total_events)
            except PerdureError as error:
                self.problem = str(error)
                seen = self.problem
            if seen != self._last:
                self._last = seen
                self._service.shared.clear()
                self.number += 1
                self._changed.set()
                self._changed = asyncio.Event()
            took = time.monotonic() - began
            await asyncio.sleep(max(LOOK_SECONDS, LOOK_SHARE * took))


async def stream(
    service: Service, counts: Counts, instance_id: str | None, last_id: str | None = None
) -> AsyncIterator[bytes]:
    """Yield server-sent events until the tab is closed. ``last_id`` is the last that it got."""
    known = counts.number if last_id == counts.event_id else -1
    counts.enter()
    news: asyncio.Queue[str] = asyncio.Queue(maxsize=8)
    tasks = [asyncio.create_task(_follow_counts(counts, news, known))]
    if instance_id is not None:
        tasks.append(asyncio.create_task(_follow_run(service, instance_id, news)))
    try:
        yield b"retry: 2000\n\n"
        while True:
            try:
                topic = await asyncio.wait_for(news.get(), PING_SECONDS)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            topics = {topic}
            await asyncio.sleep(PACE_SECONDS)
            while not news.empty():
                topics.add(news.get_nowait())
            body = {"topics": sorted(topics), "counts": counts.counts, "problem": counts.problem}
            data = msgspec.json.encode(body)
            yield b"id: %b\nevent: change\ndata: %b\n\n" % (counts.event_id.encode(), data)
    finally:
        for task in tasks:
            task.cancel()
        counts.leave()


async def _follow_counts(counts: Counts, news: asyncio.Queue[str], number: int) -> None:
    while True:
        await counts.wait(number)
        number = counts.number
        _tell(news, "counts")


async def _follow_run(service: Service, instance_id: str, news: asyncio.Queue[str]) -> None:
    with service.provider.watch(instance_id) as watch:
        while True:  # at first it may have changed since the page has read it
            service.shared.drop(run_key(instance_id))
            _tell(news, "run")
            while not await watch.wait(30_000):
                pass
            await asyncio.sleep(PACE_SECONDS)


def _tell(news: asyncio.Queue[str], topic: str) -> None:
    if not news.full():  # the tab will read everything anyway
        news.put_nowait(topic)
