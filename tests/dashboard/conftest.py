"""A runtime with one run of each kind, and the dashboard on it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from dashboard import shop
from patience import HANG_SECONDS
from perdure import OrchestrationFailed, Runtime
from perdure.dashboard import dashboard

if TYPE_CHECKING:
    from collections.abc import Generator


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

    async def begin() -> Runtime:
        runtime = Runtime(store, [shop])
        await runtime.__aenter__()
        done = await runtime.start(shop.checkout, "o-1", ["lamp"], id="o-1")
        await runtime.start(shop.checkout, "big-1", ["lamp", "desk"], id="big-1")
        await runtime.start(shop.checkout, "retry-1", ["lamp"], id="retry-1")
        bad = await runtime.start(shop.checkout, "bad-1", ["lamp", "anvil"], id="bad-1")
        many = await runtime.start(shop.fan_out, 30, id="fan-1")
        await asyncio.wait_for(asyncio.gather(done.result(), many.result()), HANG_SECONDS)
        with suppress(OrchestrationFailed):
            await bad.result(HANG_SECONDS)
        for instance_id, word in (("big-1", "approval"), ("retry-1", "charge")):
            await asyncio.wait_for(_until_it_waits_for(runtime, instance_id, word), HANG_SECONDS)
        return runtime

    runtime = loop.run(begin())
    try:
        yield loop, runtime
    finally:
        loop.run(runtime.__aexit__(None, None, None))
        loop.close()


async def _until_it_waits_for(runtime: Runtime, instance_id: str, word: str) -> None:
    with runtime.provider.watch(instance_id) as watch:
        while word not in str((await runtime.get(instance_id).describe()).waiting_for):
            await watch.wait(HANG_SECONDS * 1000)


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


@pytest.fixture(scope="module", params=["memory:", "sqlite"])
def shop_runtime(request: Any, tmp_path_factory: Any) -> Any:
    store = request.param
    if store == "sqlite":
        store = str(tmp_path_factory.mktemp("dashboard") / "shop.db")
    with running_shop(store) as found:
        yield found


@pytest.fixture
def client(shop_runtime: Any) -> TestClient:
    loop, runtime = shop_runtime
    return make_client(loop, runtime)


def make_client(loop: Loop, runtime: Runtime, **options: Any) -> TestClient:
    return TestClient(OnLoop(dashboard(runtime, **options), loop), base_url="http://localhost")


WRITE = {"X-Perdure-Write": "1"}
