"""Requests to running instances: answered once, in order, late, wrongly and never."""

import asyncio

import pytest

from integration.conditions import until, waiting
from perdure import (
    BlockingClient,
    Client,
    InstanceFinished,
    NotFound,
    RequestRejected,
    Runtime,
    RuntimeOptions,
    Status,
    WaitTimeout,
    continue_as_new,
    instance,
    next_message,
    orchestration,
    requests,
    wait_for_event,
)
from perdure.errors import AlreadyExists, InvalidValue, NotInOrchestration, PayloadError
from perdure.testing import assert_crash_safe, assert_replays


@orchestration
async def cart(items: list[str]) -> list[str]:
    async for request in requests("add", str):
        if request.value == "end":
            request.reply()
            break
        if request.value == "again":
            continue_as_new([*items, "again"])
        items.append(request.value)
        request.reply(len(items))
    return items


@orchestration
async def strict() -> None:
    async for request in requests("check", dict[str, int]):
        request.reject(f"no {sorted(request.value)}")


@orchestration
async def silent() -> str:
    return await wait_for_event("end", str)


@orchestration
async def buyer(cart_id: str, what: str) -> int:
    return await instance(cart_id).ask("add", what, int)


@orchestration
async def careful(cart_id: str) -> str:
    try:
        async with asyncio.timeout(3600):
            await instance(cart_id).ask("add", 5)
    except (RequestRejected, InstanceFinished, NotFound, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "answered"


HANDLERS = [cart, strict, silent, buyer, careful]


async def test_each_request_gets_its_reply_on_every_store(make_every_store):
    async with Runtime(make_every_store(), HANDLERS) as runtime:
        handle = await runtime.start(cart, [], id="cart-1")
        assert await handle.ask("add", "lamp", int) == 1
        assert await handle.ask("add", "desk", timeout=60) == 2
        replies = await asyncio.gather(*(handle.ask("add", f"x{n}", int) for n in range(20)))
        assert sorted(replies) == list(range(3, 23))
        assert await handle.ask("add", "end") is None
        assert len(await handle.result()) == 22
        # A request without an id leaves nothing behind.
        assert [view.id async for view in runtime.admin.instances()] == ["cart-1"]


async def test_a_request_is_asked_once_by_its_id(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(cart, [])
        for _ in range(3):
            assert await handle.ask("add", "lamp", int, id="r-1") == 1
        with pytest.raises(AlreadyExists, match="was started with"):
            await handle.ask("add", "desk", int, id="r-1")
        assert await handle.ask("add", "end") is None
        assert await handle.result() == ["lamp"]
        # The reply is kept, also after the end of the instance that gave it.
        assert await handle.ask("add", "lamp", int, id="r-1") == 1


async def test_a_request_that_timed_out_can_be_asked_for_again(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(cart, [], id="cart-1")
        await handle.pause()
        with pytest.raises(WaitTimeout, match="ask again with id='r-1'"):
            await handle.ask("add", "lamp", int, timeout=0.01, id="r-1")
        await handle.resume()
        assert await handle.ask("add", "lamp", int, id="r-1") == 1
        assert await handle.ask("add", "desk", int) == 2


async def test_an_instance_that_never_answers(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(silent, id="s-1")
        await waiting(runtime, "s-1")
        with pytest.raises(WaitTimeout, match=r"'s-1' has not answered 'add' in time.*event 'end'"):
            await handle.ask("add", "lamp", timeout=0.01)

        async def is_withdrawn():
            views = [view async for view in runtime.admin.instances()]
            return [v.status for v in views if v.name == "perdure.ask"] == [Status.CANCELLED]

        await until(is_withdrawn)


async def test_an_ended_and_a_missing_instance_are_told_at_once(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(silent, id="s-1")
        await handle.raise_event("end", "x")
        await handle.result()
        with pytest.raises(InstanceFinished, match=r"'s-1' has ended \(Completed\)"):
            await handle.ask("add", "lamp")
        with pytest.raises(NotFound, match="nothing"):
            await runtime.get("nothing").ask("add", "lamp")
        assert [view.id async for view in runtime.admin.instances()] == ["s-1"]


async def test_an_instance_that_ends_without_a_reply_on_every_store(make_every_store):
    async with Runtime(make_every_store(), HANDLERS) as runtime:
        for end in ("completes", "is terminated", "is deleted"):
            handle = await runtime.start(silent, id=f"s {end}")
            question = asyncio.create_task(handle.ask("add", "lamp", id=end))
            if end != "is deleted":
                await until(lambda handle=handle: _has_events(handle, "WatcherAdded", 1))
            if end == "completes":
                await handle.raise_event("end", "x")
            elif end == "is terminated":
                await handle.terminate("enough")
            else:
                await runtime.admin.delete(handle.id, force=True)
            expected = NotFound if end == "is deleted" else InstanceFinished
            with pytest.raises(expected, match=f"'s {end}'.*"):
                await question


async def test_a_reply_of_the_last_turn_counts(make_runtime):
    @orchestration
    async def one() -> str:
        request = await anext(requests("only", int))
        await wait_for_event("go", None)
        request.reply(request.value + 1)
        return "over"

    async with make_runtime([one]) as runtime:
        handle = await runtime.start(one)
        question = asyncio.create_task(handle.ask("only", 1, int))
        await until(lambda: _has_events(handle, "WatcherAdded", 1))
        await handle.raise_event("go")
        assert await question == 2
        assert await handle.result() == "over"


async def _has_events(handle, kind, count):
    history = await handle.history()
    return sum(type(event).__name__ == kind for event in history) >= count


async def test_a_value_that_does_not_fit_is_refused_to_the_sender(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(cart, [])
        for wrong in (5, None, ["lamp"], {"a": 1}):
            with pytest.raises(RequestRejected, match="request 'add': Expected `str`"):
                await handle.ask("add", wrong)
        with pytest.raises(PayloadError, match=r"reply of .* to 'add': Expected `str`, got `int`"):
            await handle.ask("add", "lamp", str)
        assert await handle.ask("add", "desk", int) == 2
        other = await runtime.start(strict)
        with pytest.raises(RequestRejected, match=r"^no \['a', 'b'\]$"):
            await other.ask("check", {"b": 1, "a": 2})


async def test_bad_names_ids_and_values_are_refused(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(cart, [], id="ask:taken")
        for name in ("", "n" * 252, 5):
            with pytest.raises(InvalidValue, match="name of a request"):
                await handle.ask(name)
        with pytest.raises(InvalidValue, match="id of a request"):
            await handle.ask("add", "lamp", id="n" * 252)
        with pytest.raises(InvalidValue, match="'ask:taken' is an instance of 'cart'"):
            await handle.ask("add", "lamp", id="taken")
        with pytest.raises(PayloadError, match="request 'ask:add'"):
            await handle.ask("add", object())
    with pytest.raises(NotInOrchestration):
        requests("add")


async def test_a_message_that_is_no_request_is_left_out(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(cart, [], id="cart-1")
        await Client(runtime.provider).send_message("cart-1", "ask:add", "no request")
        assert await handle.ask("add", "lamp", int) == 1


async def test_a_second_reply_is_a_mistake(make_environment):
    @orchestration
    async def twice() -> str:
        request = await anext(requests("only"))
        request.reply(1)
        try:
            request.reply(2)
        except InvalidValue as error:
            return str(error)
        return ""

    async with make_environment([twice]) as env:
        handle = await env.start(twice)
        assert await env.runtime.get(handle.id).ask("only", id="r-1") == 1
        assert await handle.result() == "the request 'r-1' (only) has its reply already"


async def test_unread_requests_go_to_the_next_execution(make_runtime):
    @orchestration
    async def late(items: list[str]) -> None:
        if not items:
            await wait_for_event("go", None)
            continue_as_new([(await anext(requests("add", str))).value])
        async for request in requests("add", str):
            items.append(request.value)
            request.reply(len(items))

    async with make_runtime([late]) as runtime:
        handle = await runtime.start(late, [])
        questions = [asyncio.create_task(handle.ask("add", f"x{n}", int)) for n in range(6)]
        await until(lambda: _has_events(handle, "QueueEventDelivered", 6))
        await handle.raise_event("go")
        # The request that the code read and did not answer is rejected; the others have replies.
        answers = await asyncio.gather(*questions, return_exceptions=True)
        (rejected,) = [each for each in answers if isinstance(each, RequestRejected)]
        assert "continued as new without a reply" in str(rejected)
        assert sorted(each for each in answers if each is not rejected) == [2, 3, 4, 5, 6]


async def test_a_request_that_is_read_and_not_answered_is_rejected_by_continue_as_new(
    make_every_store,
):
    async with Runtime(make_every_store(), [cart]) as runtime:
        handle = await runtime.start(cart, [], id="cart")
        with pytest.raises(RequestRejected, match="continued as new without a reply"):
            await handle.ask("add", "again", int)
        assert await handle.ask("add", "lamp", int) == 2
        await handle.ask("add", "end")
        assert await handle.result() == ["again", "lamp"]


async def test_an_orchestration_asks_another_one(make_environment):
    async with make_environment(HANDLERS) as env:
        shop = await env.start(cart, ["a"], id="cart-1")
        assert await env.run(buyer, "cart-1", "lamp") == 2
        assert "RequestRejected: request 'add': Expected" in await env.run(careful, "cart-1")
        assert (await env.run(careful, "nothing")).startswith("NotFound: 'nothing' did not answer")
        handle = await env.start(buyer, "cart-1", "desk")
        assert await handle.result() == 3
        assert_replays(await handle.history(), buyer)
        assert_replays(await shop.history(), cart)
        await env.start(silent, id="s-1")
        assert (await env.run(careful, "s-1")).startswith("TimeoutError")


async def test_an_instance_cannot_ask_itself(make_environment):
    @orchestration
    async def vain() -> str:
        from perdure import current

        try:
            return str(await instance(current().instance_id).ask("add"))
        except InvalidValue as error:
            return str(error)

    async with make_environment([vain]) as env:
        assert "asks itself" in await env.run(vain)


async def test_crashes_at_every_commit_change_nothing():
    @orchestration
    async def both() -> list[int]:
        from perdure import current, start_detached

        start_detached(cart, ["a"], id=f"{current().instance_id}-cart")
        asked = instance(f"{current().instance_id}-cart")
        return [await asked.ask("add", "lamp", int), await asked.ask("add", "desk", int)]

    assert await assert_crash_safe(both, handlers=[both, cart]) > 6


async def test_requests_beside_mail_and_time(make_environment):
    @orchestration
    async def mixed() -> list[str]:
        seen: list[str] = []
        asked = requests("q", str)
        while len(seen) < 3:
            try:
                async with asyncio.timeout(10):
                    request = await anext(asked)
            except TimeoutError:
                seen.append(f"late, {await next_message('inbox', str)}")
                continue
            seen.append(request.value)
            request.reply(len(seen))
        return seen

    async with make_environment([mixed]) as env:
        handle = await env.start(mixed)
        ask = env.runtime.get(handle.id).ask
        assert await ask("q", "a") == 1
        await env.advance(11)
        await handle.send_message("inbox", "m")
        assert await ask("q", "b") == 3
        assert await handle.result() == ["a", "late, m", "b"]


def test_a_blocking_client_asks(tmp_path):
    options = RuntimeOptions(poll_interval=1)
    with BlockingClient(Runtime(tmp_path / "store.db", HANDLERS, options=options)) as shop:
        handle = shop.start(cart, [])
        assert handle.ask("add", "lamp", int, timeout=60) == 1
        assert handle.ask("add", "lamp", id="r-1") == 2
        assert handle.ask("add", "lamp", id="r-1") == 2


async def test_a_client_without_a_runtime_asks_through_the_store(tmp_path):
    async with Runtime(tmp_path / "store.db", HANDLERS) as runtime:
        await runtime.start(cart, [], id="cart-1")
        async with Client(tmp_path / "store.db") as client:
            assert await client.get("cart-1").ask("add", "lamp", int) == 1
