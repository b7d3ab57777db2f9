"""The stream of changes: what many tabs cost, and when they are told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest

from dashboard.conftest import running_shop
from patience import HANG_SECONDS
from perdure.dashboard import dashboard, live
from perdure.dashboard.live import Changes, Tab, stream
from perdure.dashboard.service import AnswerCache, Service


@pytest.fixture(scope="module")
def shop_runtime():
    """One store: the stream is above the stores."""
    with running_shop("memory:") as found:
        yield found


def service_of(runtime, kind=Service):
    return kind(runtime, registry=None, read_only=True, redact=None)


def test_tabs_that_ask_at_once_cause_one_computation():
    calls = []

    async def compute():
        calls.append(1)
        await asyncio.sleep(0)
        return str(len(calls)).encode()

    async def ask():
        shared = AnswerCache()
        home, run = ("/home",), ("/run", "id=o-1")
        first = await asyncio.gather(*(shared.get(home, compute, 60) for _ in range(50)))
        shared.clear()
        second = [await shared.get(key, compute, 60) for key in (home, run)]
        shared.drop("o-1")
        return set(first), second, [await shared.get(key, compute, 60) for key in (home, run)]

    assert asyncio.run(ask()) == ({b"1"}, [b"2", b"3"], [b"2", b"4"])


def test_all_tabs_of_a_run_share_one_watch_and_are_told_at_once(shop_runtime):
    loop, runtime = shop_runtime
    watches, is_watched = [], asyncio.Event()

    class Watched(Service):
        @property
        def provider(self):
            return SimpleNamespace(watch=self.watch, admin=super().provider.admin)

        def watch(self, instance_id):
            watches.append(instance_id)
            is_watched.set()
            return runtime.provider.watch(instance_id)

    async def follow():
        changes = Changes(service_of(runtime, Watched))
        tabs = [Tab("big-1") for _ in range(50)]
        for tab in tabs:
            changes.enter(tab)
            assert tab.wake.is_set()
            tab.wake.clear()
            tab.topics.clear()
        async with asyncio.timeout(HANG_SECONDS):
            await is_watched.wait()
            assert watches == ["big-1"]
            for tab in tabs:
                tab.topics.clear()
            await runtime.raise_event("big-1", "noise", value=True)
            for tab in tabs:
                while "run" not in tab.topics:
                    tab.wake.clear()
                    await tab.wake.wait()
        for tab in tabs:
            changes.leave(tab)
        assert changes._tasks == {}

    loop.run(follow())
    assert set(watches) == {"big-1"}


def test_tabs_are_told_the_later_the_longer_their_reads_take():
    pauses = []

    async def tell():
        changes = Changes(None)

        async def sleep(seconds):
            pauses.append(seconds)
            match len(pauses):
                case 1:
                    changes._spent += 0.02  # the reads that were caused by telling
                case 2:
                    changes._news.set()
                case 3:
                    changes._spent += 60
                case _:
                    raise asyncio.CancelledError

        changes._news.set()
        with mock.patch.object(live, "asyncio", SimpleNamespace(sleep=sleep)):
            await changes._tell()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(tell())
    pace, most = live.PACE_SECONDS, live.PACE_SECONDS_MAX
    assert pauses == [pace, pytest.approx(live.READ_SHARE * 0.02 - pace), pace, most - pace]


def test_a_stream_that_a_stopping_server_cancels_ends_in_order(shop_runtime):
    """The server of an application that mounts the page waits only briefly for open pages."""
    loop, runtime = shop_runtime
    sent = []

    async def open_and_cancel():
        is_open = asyncio.Event()

        async def send(message):
            sent.append(message)
            is_open.set()

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/v1/stream",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
        }
        page = asyncio.create_task(dashboard(runtime)(scope, asyncio.Event().wait, send))
        await is_open.wait()
        page.cancel()
        await page

    loop.run(open_and_cancel())
    assert sent[0]["status"] == 200
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_an_event_id_of_another_server_is_not_taken_for_its_own():
    assert Changes(None).event_id != Changes(None).event_id


def test_a_tab_that_comes_back_is_told_only_what_has_changed(shop_runtime):
    """Also if it was the only one, so that the looks begin anew."""
    loop, runtime = shop_runtime
    looks = asyncio.Semaphore(0)

    class Watched(Service):
        @property
        def admin(self):
            looks.release()
            return super().admin

    async def ask():
        service = service_of(runtime, Watched)
        changes = Changes(service)
        tab = stream(changes, None)
        said = [await anext(tab), await anext(tab)]
        await tab.aclose()
        while not looks.locked():
            await looks.acquire()
        again = Tab(None)
        changes.enter(again, changes.event_id)
        for _ in range(2):  # when the second look begins, the first has been evaluated
            await looks.acquire()
        changes.leave(again)
        assert again.topics == set()
        return said[1].decode(), changes.event_id

    with mock.patch.object(live, "LOOK_SECONDS", 0), mock.patch.object(live, "LOOK_SHARE", 0):
        event, last_id = loop.run(ask())
    assert event.startswith(f"id: {last_id}\n")
