"""``perdure ask`` and ``peek``: talk to the code of an instance."""

import asyncio
import threading
from contextlib import contextmanager

from integration.conditions import waiting
from patience import HANG_SECONDS
from perdure import Runtime, orchestration, requests, wait_for_event

SOURCE = """
from perdure import orchestration, wait_for_event

@orchestration
async def order(name: str) -> None:
    lines = [{"name": name, "price": 4}]
    odd = object
    await wait_for_event("end", None)
"""


@orchestration
async def cart() -> None:
    items: list[str] = []
    async for request in requests("add", str):
        items.append(request.value)
        request.reply(items)


@contextmanager
def worker(cli):
    """Run a worker in another thread, as another process would."""
    begun, loop = threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def work():
        async with Runtime(cli.store, [cart]) as runtime:
            await runtime.start(cart, id="cart-1")
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    assert begun.wait(HANG_SECONDS)
    yield
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


def test_an_instance_is_asked(sqlite_cli):
    cli = sqlite_cli
    with worker(cli):
        assert cli("ask", "cart-1", "add", "--data", '"lamp"').json == ["lamp"]
        assert cli("ask", "cart-1", "add", "--data", '"desk"', "--id", "r-1").json[-1] == "desk"
        assert len(cli("ask", "cart-1", "add", "--data", '"desk"', "--id", "r-1").json) == 2
        refused = cli("ask", "cart-1", "add", "--data", "5", code=6)
        assert "Expected `str`" in refused.err
        late = cli("ask", "cart-1", "sub", "--timeout", "50ms", code=5)
        assert "has not answered 'sub' in time" in late.err
        assert "requests" in cli("show", "cart-1").out
        assert "for a request 'add'" in cli("show", "cart-1").out
        assert "did you mean 'cart-1'" in cli("ask", "cart-2", "add", code=3).err
        assert "not JSON" in cli("ask", "cart-1", "add", "--data", "{", code=2).err
    cli("terminate", "cart-1", "--yes")
    assert "has ended" in cli("ask", "cart-1", "add", code=6).err


def test_a_variable_is_printed(sqlite_cli, tmp_path):
    cli = sqlite_cli
    (tmp_path / "peeked.py").write_text(SOURCE)

    @orchestration
    async def order(name: str) -> None:
        await wait_for_event("end", None)

    async def work():
        async with Runtime(cli.store, [order]) as runtime:
            await runtime.start(order, "lamp", id="o-1")
            await waiting(runtime, "o-1")

    asyncio.run(work())
    assert cli("peek", "o-1", "lines", "-m", "peeked.py").json == [{"name": "lamp", "price": 4}]
    assert cli("peek", "o-1", "lines[0]['price']", "-m", "peeked.py").json == 4
    assert cli("peek", "o-1", "odd", "-m", "peeked.py").out == "<class 'object'>\n"
    assert "did you mean 'lines'" in cli("peek", "o-1", "line", "-m", "peeked.py", code=2).err
    assert "names no variable" in cli("peek", "o-1", "print(1)", "-m", "peeked.py", code=2).err
    assert "there is no instance" in cli("peek", "x", "lines", "-m", "peeked.py", code=3).err
    assert "name the module" in cli("peek", "o-1", "lines", code=2).err
    cli("terminate", "o-1", "--yes")
    assert "has ended" in cli("peek", "o-1", "lines", "-m", "peeked.py", code=6).err
