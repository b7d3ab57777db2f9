"""Optional features beside the event loop: renewals from a thread, user transactions."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    OWNER,
    activity,
    bodies,
    completion,
    create,
    enqueue,
    fetch,
    fetch_work,
    raised,
    take,
    take_work,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires, requires_absent
from perdure.errors import InvalidValue, LockLost, NotSupported
from perdure.providers.records import SessionFetch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


JOIN_SECONDS = 20.0


def call_in_thread(call: Callable[[], Awaitable[Any]]) -> Any:
    """Await the call on an event loop of another thread, with this thread's loop blocked."""
    results: list[Any] = []

    async def main() -> None:
        results.append(await call())

    def target() -> None:
        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001
            results.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(JOIN_SECONDS)
    assert not thread.is_alive(), "the call waits for the loop that opened the handle"
    (result,) = results
    return result


@requires("other_loops")
@checks
class TestRenewingFromAThread:
    verbs = (
        "renew_work_item_lock",
        "renew_work_item_locks",
        "renew_orchestration_item_lock",
        "renew_orchestration_item_locks",
        "renew_session_lock",
    )

    async def test_locks_are_renewed_while_the_loop_is_blocked(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        await enqueue(store, raised("a"))
        turn, item = await take(store, "a"), await take_work(store)
        provider = store.provider

        answers = [
            call_in_thread(
                lambda: provider.renew_orchestration_item_lock(turn.lock_token, LOCK_MS * 3)
            ),
            call_in_thread(lambda: provider.renew_work_item_lock(item.lock_token, LOCK_MS * 3)),
        ]

        assert answers == [None, None]
        await store.advance(LOCK_MS * 2)
        assert await fetch(store) is None
        assert await fetch_work(store) is None

    async def test_many_are_renewed_and_the_lost_ones_named(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        await enqueue(store, raised("a"))
        turn, item = await take(store, "a"), await take_work(store)
        provider = store.provider

        turns = call_in_thread(
            lambda: provider.renew_orchestration_item_locks([turn.lock_token, "gone"], LOCK_MS)
        )
        items = call_in_thread(
            lambda: provider.renew_work_item_locks([item.lock_token, "gone"], LOCK_MS)
        )

        assert (turns, items) == ({"gone"}, {"gone"})

    async def test_a_lost_lock_is_told_to_the_thread(self, store: Store) -> None:
        answer = call_in_thread(lambda: store.provider.renew_work_item_lock("unknown", LOCK_MS))

        assert isinstance(answer, LockLost)

    async def test_sessions_are_renewed_while_the_loop_is_blocked(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a", session="s"),))
        await take_work(store, session=SessionFetch(owner_id=OWNER, lock_timeout_ms=LOCK_MS))

        renewed = call_in_thread(
            lambda: store.provider.renew_session_lock([OWNER], LOCK_MS, LOCK_MS)
        )

        assert renewed == 1


@requires("transactions")
@checks
class TestUserTransactions:
    verbs = ("settle_in_transaction",)

    async def test_the_completion_is_what_the_user_code_returned(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        given: list[Any] = []

        def settle(connection: Any) -> Any:
            given.append(connection)
            return completion("a", result="rows written")

        await store.provider.settle_in_transaction(item.lock_token, settle)

        assert len(given) == 1
        assert given[0] is not None
        done = completion("a", result="rows written")
        assert bodies(await take(store, "a", provider=store.reader)) == [done.body]
        await store.advance(LOCK_MS)
        assert await fetch_work(store) is None

    async def test_what_it_raises_is_raised_and_the_item_stays(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)

        def settle(_: Any) -> Any:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await store.provider.settle_in_transaction(item.lock_token, settle)

        assert await fetch(store) is None
        await store.provider.ack_work_item(item.lock_token, completion("a"))

    async def test_a_dead_token_settles_nothing(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        await store.advance(LOCK_MS)

        for token in (item.lock_token, "unknown"):
            with pytest.raises(LockLost):
                await store.provider.settle_in_transaction(token, lambda _: completion("a"))

        assert await fetch(store) is None
        assert (await take_work(store)).attempt_count == 2

    async def test_a_repetition_is_refused(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        await store.provider.settle_in_transaction(item.lock_token, lambda _: completion("a"))

        with pytest.raises(LockLost):
            await store.provider.settle_in_transaction(item.lock_token, lambda _: completion("a"))

        assert len((await take(store, "a")).item.messages) == 1

    async def test_a_completion_that_is_not_valid_is_refused(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        bad = msgspec.structs.replace(completion("a"), kind="")

        with pytest.raises(InvalidValue):
            await store.provider.settle_in_transaction(item.lock_token, lambda _: bad)

        assert await fetch(store) is None
        await store.provider.ack_work_item(item.lock_token, completion("a"))

    async def test_a_completion_for_another_instance_is_refused(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)

        with pytest.raises(InvalidValue):
            await store.provider.settle_in_transaction(item.lock_token, lambda _: completion("b"))

        await store.provider.ack_work_item(item.lock_token, completion("a"))


@requires_absent("transactions")
@checks
class TestNoUserTransactions:
    verbs = ("settle_in_transaction",)

    async def test_a_provider_without_them_says_so(self, store: Store) -> None:
        with pytest.raises(NotSupported):
            await store.provider.settle_in_transaction("token", lambda _: completion("a"))
