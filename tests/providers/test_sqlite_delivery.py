"""Outcomes of a store's threads get to the event loop, in order, also if one of them fails."""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from threading import Thread

from patience import HANG_SECONDS
from perdure.providers.sqlite import SqliteProvider
from perdure.providers.sqlite.writer import CommitResult

secret = ContextVar("secret", default="nothing")


def deliver_from_thread(store, deliveries):
    thread = Thread(target=lambda: [store._deliver_soon(each) for each in deliveries])
    thread.start()
    thread.join()


def test_what_threads_deliver_arrives_in_order(tmp_path):
    async def listen():
        async with SqliteProvider(tmp_path / "store.db") as provider:
            store, heard, is_done = provider._store, [], asyncio.Event()

            def deliver(delivery):
                heard.append((delivery, asyncio.get_running_loop()))
                if len(heard) == 1_000:
                    is_done.set()

            store._deliver = deliver
            sent = [CommitResult() for _ in range(1_000)]
            deliver_from_thread(store, sent)
            await asyncio.wait_for(is_done.wait(), HANG_SECONDS)
            return heard, sent, asyncio.get_running_loop()

    heard, sent, loop = asyncio.run(listen())

    assert heard == [(each, loop) for each in sent]


def test_closing_delivers_what_is_left(tmp_path):
    async def close():
        provider = SqliteProvider(tmp_path / "store.db")
        await provider.open()
        left = [asyncio.ensure_future(provider.read(f"i-{number}")) for number in range(100)]
        await provider.close()
        return [each.done() and each.result() for each in left]

    assert asyncio.run(close()) == [[]] * 100


def test_a_delivery_that_fails_does_not_keep_the_others(tmp_path):
    async def listen():
        loop = asyncio.get_running_loop()
        heard, failed = loop.create_future(), []
        loop.set_exception_handler(lambda _, context: failed.append(context["exception"].args[0]))
        deliveries = [CommitResult(), CommitResult(), CommitResult()]

        def deliver(delivery):
            if delivery is deliveries[-1]:
                heard.set_result(None)
            else:
                raise RuntimeError(deliveries.index(delivery))

        async with SqliteProvider(tmp_path / "store.db") as provider:
            provider._store._deliver = deliver
            deliver_from_thread(provider._store, deliveries)
            await asyncio.wait_for(heard, HANG_SECONDS)
        return failed

    assert asyncio.run(listen()) == [0, 1]


def test_a_loop_that_is_gone_is_told_of_in_the_log(tmp_path, caplog):
    async def listen():
        provider = SqliteProvider(tmp_path / "store.db")
        async with provider:
            return provider._store

    store, heard = asyncio.run(listen()), []
    store._deliver = heard.append
    with caplog.at_level(logging.WARNING):
        store._deliver_soon(CommitResult())

    assert "store.db' is gone" in caplog.text
    assert heard == []


def test_what_is_delivered_does_not_see_the_variables_of_the_task_that_opened_the_store(tmp_path):
    async def listen():
        secret.set("of the one who opened the store")
        async with SqliteProvider(tmp_path / "store.db") as provider:
            heard = asyncio.get_running_loop().create_future()
            provider._store._deliver = lambda _: heard.set_result(secret.get())
            deliver_from_thread(provider._store, [CommitResult()])
            return await asyncio.wait_for(heard, HANG_SECONDS)

    assert asyncio.run(listen()) == "nothing"
