"""What a thread has for an event loop gets there, in order, whatever the loop can do."""

from __future__ import annotations

import asyncio
import logging
import os
from contextvars import ContextVar
from pathlib import Path
from threading import Thread

import pytest

from perdure.providers.sqlite.bell import Bell

secret = ContextVar("secret", default="nothing")


class LoopWithoutReaders(asyncio.SelectorEventLoop):
    """As the one that Windows has."""

    def add_reader(self, fd, callback, *args):
        if callback.__name__ == "_rung":
            raise NotImplementedError
        return super().add_reader(fd, callback, *args)


@pytest.fixture(params=["descriptor", "no descriptor", "loop without readers"])
def new_loop(request, monkeypatch):
    if request.param == "no descriptor":
        monkeypatch.delattr(os, "eventfd")
    if request.param == "loop without readers":
        return LoopWithoutReaders
    return asyncio.new_event_loop


def count_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def run(new_loop, function):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(function())


def test_what_threads_ring_with_is_delivered_in_order(new_loop):
    async def listen():
        heard, is_done = [], asyncio.Event()

        def deliver(delivery):
            heard.append((delivery, asyncio.get_running_loop()))
            if len(heard) == 1_000:
                is_done.set()

        bell = Bell(asyncio.get_running_loop(), deliver, "store.db")
        ringing = Thread(target=lambda: [bell.ring(number) for number in range(1_000)])
        ringing.start()
        await asyncio.wait_for(is_done.wait(), 20)
        ringing.join()
        bell.close()
        return heard, asyncio.get_running_loop()

    heard, loop = run(new_loop, listen)

    assert heard == [(number, loop) for number in range(1_000)]


def test_closing_delivers_what_is_left(new_loop):
    async def close():
        heard = []
        bell = Bell(asyncio.get_running_loop(), heard.append, "store.db")
        bell.ring(1)
        bell.ring(2)
        bell.close()
        at_once = list(heard)
        await asyncio.sleep(0)
        return at_once, heard

    assert run(new_loop, close) == ([1, 2], [1, 2])


def test_a_delivery_that_fails_does_not_keep_the_others(new_loop):
    async def listen():
        loop, heard = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        failed = []
        loop.set_exception_handler(lambda _, context: failed.append(context["exception"].args[0]))

        def deliver(delivery):
            if delivery == "last":
                heard.set_result(None)
            else:
                raise RuntimeError(delivery)

        bell = Bell(loop, deliver, "store.db")
        for delivery in ("first", "second", "last"):
            bell.ring(delivery)
        await asyncio.wait_for(heard, 20)
        bell.close()
        return failed

    assert run(new_loop, listen) == ["first", "second"]


def test_a_loop_that_is_gone_is_told_of_in_the_log(new_loop, caplog):
    async def listen():
        return Bell(asyncio.get_running_loop(), heard.append, "store.db")

    heard = []
    bell = run(new_loop, listen)
    with caplog.at_level(logging.WARNING):
        bell.ring(1)
    bell.close()

    assert "store.db is gone" in caplog.text
    assert heard == []


def test_what_is_delivered_does_not_see_the_variables_of_whoever_listens(new_loop):
    async def listen():
        secret.set("of the one who opened the store")
        heard = asyncio.get_running_loop().create_future()
        bell = Bell(heard.get_loop(), lambda _: heard.set_result(secret.get()), "store.db")
        ringing = Thread(target=bell.ring, args=(1,))
        ringing.start()
        said = await asyncio.wait_for(heard, 20)
        ringing.join()
        bell.close()
        return said

    assert run(new_loop, listen) == "nothing"


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="there are no such descriptors here")
def test_a_bell_leaves_no_descriptor_behind():
    async def open_and_close():
        before = count_descriptors()
        for _ in range(10):
            Bell(asyncio.get_running_loop(), print, "store.db").close()
        return before, count_descriptors()

    before, after = asyncio.run(open_and_close())

    assert after <= before  # less, if the garbage of another test was collected
