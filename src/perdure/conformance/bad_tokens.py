"""Lock tokens that are not live: refused by every verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from perdure.conformance.factories import (
    activity,
    completion,
    create,
    enqueue,
    enqueue_work,
    event,
    fetch,
    fetch_work,
    identity,
    raised,
    start,
    take,
    take_work,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import InvalidValue, LockLost
from perdure.providers.records import TurnCommit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


TOKENS: Final = {
    "empty": "",
    "never issued": "never issued",
    "NUL": "a\0b",
    "SQL": "'; --",
    "overlong": "x" * 10_000,
    "lone surrogate": "\ud800",
}


@checks
class TestBadTokens:
    verbs = (
        "ack_orchestration_item",
        "abandon_orchestration_item",
        "renew_orchestration_item_lock",
        "ack_work_item",
        "abandon_work_item",
        "renew_work_item_lock",
    )

    @pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
    async def test_an_unknown_token_is_refused_by_every_verb(
        self, store: Store, token: str
    ) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        commit = TurnCommit(
            execution_id=1, history_delta=(event("x", 2),), orchestrator_items=(start("y"),)
        )
        provider = store.provider

        calls: tuple[Callable[[], Awaitable[None]], ...] = (
            lambda: provider.ack_orchestration_item(token, commit),
            lambda: provider.abandon_orchestration_item(token),
            lambda: provider.renew_orchestration_item_lock(token, 5_000),
            lambda: provider.ack_work_item(token, completion("x")),
            lambda: provider.abandon_work_item(token),
            lambda: provider.renew_work_item_lock(token, 5_000),
        )
        for call in calls:
            with pytest.raises(LockLost) as refusal:
                await call()
            assert not refusal.value.retryable

        assert len(await store.reader.read("x")) == 1
        assert await fetch(store) is None
        assert (await take_work(store)).attempt_count == 1

    async def test_a_token_of_one_queue_is_unknown_to_the_other(self, store: Store) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        await enqueue(store, raised("x"))
        held = await take(store, "x")
        work = await take_work(store)

        with pytest.raises(LockLost):
            await store.provider.ack_work_item(held.lock_token, completion("x"))
        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(work.lock_token, TurnCommit(execution_id=1))

        await store.provider.renew_orchestration_item_lock(held.lock_token, 5_000)
        await store.provider.renew_work_item_lock(work.lock_token, 5_000)

    async def test_many_tokens_are_renewed_at_once_and_the_lost_are_named(
        self, store: Store
    ) -> None:
        for instance in ("x", "y"):
            await create(store, instance, worker_items=(activity(instance),))
            await enqueue(store, raised(instance))
        held = [(await take(store)).lock_token for _ in range(2)]
        work = [(await take_work(store)).lock_token for _ in range(2)]
        await store.advance(4_000)

        assert await store.provider.renew_orchestration_item_locks([*held, "lost"], 5_000) == {
            "lost"
        }
        assert await store.provider.renew_work_item_locks([*work, "lost"], 5_000) == {"lost"}
        await store.advance(4_000)

        assert await fetch(store) is None
        assert await fetch_work(store) is None

    @requires("admin")
    async def test_a_completion_goes_to_the_instance_of_its_item(self, store: Store) -> None:
        for instance in ("x", "y"):
            await create(store, instance)
        await enqueue_work(store, activity("x"))
        work = await take_work(store)

        with pytest.raises(InvalidValue):
            await store.provider.ack_work_item(work.lock_token, completion("y"))

        assert await store.admin.list_messages("y") == []
        (kept,) = await store.admin.list_work("x")
        assert kept.message.identity == identity("x")
