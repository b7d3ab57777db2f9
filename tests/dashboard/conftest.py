"""A runtime with one run of each kind, and the dashboard on it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dashboard import shop, shop_before
from dashboard.browsing import Served, Tab, launched, serving
from patience import HANG_SECONDS
from perdure import Client, OrchestrationFailed, Runtime
from perdure.dashboard import dashboard
from perdure.providers.url import open_provider
from postgres_factory import new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class Loop:
    """An event loop in a thread, on which a runtime lives."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(HANG_SECONDS)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(HANG_SECONDS)
        self.loop.close()


@contextmanager
def running_shop(store: str) -> Generator[tuple[Loop, Runtime]]:
    loop = Loop()

    async def begin() -> tuple[Client, Runtime]:
        provider = open_provider(store)
        holder = Client(provider)  # keeps a store in memory over two runtimes
        await holder.__aenter__()
        async with Runtime(provider, [shop_before]) as before:
            await before.start(shop_before.refund, "o-7", id="blocked-1")
            await _until(before, "blocked-1", lambda info: "go" in str(info.waiting_for))
        runtime = Runtime(provider, [shop], schedules=shop.SCHEDULES)
        await runtime.__aenter__()
        done = await runtime.start(shop.checkout, "o-1", ["lamp"], id="o-1")
        await runtime.start(shop.checkout, "big-1", ["lamp", "desk"], id="big-1")
        await runtime.start(shop.checkout, "retry-1", ["lamp"], id="retry-1")
        await runtime.start(shop.pay, "o-9", id="pay-1")
        await runtime.raise_event("blocked-1", "go", value=True)
        bad = await runtime.start(shop.checkout, "bad-1", ["lamp", "anvil"], id="bad-1")
        many = await runtime.start(shop.fan_out, 30, id="fan-1")
        await asyncio.wait_for(asyncio.gather(done.result(), many.result()), HANG_SECONDS)
        with suppress(OrchestrationFailed):
            await bad.result(HANG_SECONDS)
        await _until(runtime, "big-1", lambda info: "approval" in str(info.waiting_for))
        await _until(runtime, "retry-1", lambda info: "charge" in str(info.waiting_for))
        await _until(runtime, "pay-1", lambda info: "payment" in str(info.waiting_for))
        await _until(runtime, "blocked-1", lambda info: info.status == "Blocked")
        return holder, runtime

    holder, runtime = loop.run(begin())
    try:
        yield loop, runtime
    finally:
        loop.run(runtime.__aexit__(None, None, None))
        loop.run(holder.__aexit__(None, None, None))
        loop.close()


async def _until(runtime: Runtime, instance_id: str, is_reached: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        with runtime.provider.watch(instance_id) as watch:
            while not is_reached(await runtime.get(instance_id).describe()):
                await watch.wait(1000)


class OnLoop:
    """Serves each request on the loop of the runtime, as uvicorn would."""

    def __init__(self, app: Any, loop: Loop) -> None:
        self._app = app
        self._loop = loop

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        here = asyncio.get_running_loop()

        async def receive_there() -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(receive(), here))

        async def send_there(message: Any) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(send(message), here))

        there = asyncio.run_coroutine_threadsafe(
            self._app(scope, receive_there, send_there), self._loop.loop
        )
        await asyncio.wrap_future(there)


STORES = ["sqlite", "memory", "postgres"]


def store_of(kind: str, tmp_path_factory: Any) -> str:
    """Return the place of a new store of one kind, in which a lost message is dead at once."""
    match kind:
        case "memory":
            return "memory:?orphan_grace=0s"
        case "sqlite":
            return f"sqlite:///{tmp_path_factory.mktemp('dashboard')}/shop.db?orphan_grace=0s"
        case _:
            return f"{shared_server().dsn}&schema={new_schema()}&orphan_grace=0s"


@pytest.fixture(scope="module", params=STORES)
def shop_runtime(request: Any, tmp_path_factory: Any) -> Any:
    with running_shop(store_of(request.param, tmp_path_factory)) as found:
        yield found


@pytest.fixture
def client(shop_runtime: Any) -> TestClient:
    loop, runtime = shop_runtime
    return make_client(loop, runtime)


def make_client(loop: Loop, runtime: Runtime, **options: Any) -> TestClient:
    return TestClient(OnLoop(dashboard(runtime, **options), loop), base_url="http://localhost")


WRITE = {"X-Perdure-Write": "1"}


# --- the browser: one for a module, and one tab for each store


@pytest.fixture(scope="module")
def browser() -> Any:
    with launched() as found:
        yield found


@pytest.fixture(scope="module", params=STORES)
def served(request: Any, tmp_path_factory: Any, browser: Any) -> Any:
    """A server on each store, under a prefix as in a larger application, and a tab."""
    place = store_of(request.param, tmp_path_factory)
    with running_shop(place) as (loop, runtime):
        app = Starlette()
        app.mount("/ops", dashboard(runtime, hosts=["127.0.0.1"]))
        with serving(app, loop) as address, Tab(browser, f"{address}/ops") as tab:
            yield Served(tab, loop, runtime)


@pytest.fixture
def tab(served: Any, request: Any) -> Any:
    """The tab of the store. The page may log no error and may ask no other server."""
    found: Tab = served.tab
    request.node.tabs = [found]
    found.forget()
    yield found
    assert found.troubles == []


@pytest.fixture
def new_tab(browser: Any, request: Any) -> Any:
    """Open further tabs, each with its own session: ``new_tab(address, **options)``."""
    request.node.tabs = opened = []

    def open_tab(address: str, **options: Any) -> Tab:
        opened.append(Tab(browser, address, **options))
        return opened[-1]

    yield open_tab
    for each in opened:
        each.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Print what the page showed when a test of it fails."""
    report = yield
    if report.when == "call" and report.failed:
        for number, each in enumerate(getattr(item, "tabs", ()), 1):
            report.sections.append((f"tab {number}", each.describe()))
    return report
