"""C: what is refused is refused with its reason, and harms nothing."""

from __future__ import annotations

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    create,
    enqueue,
    event,
    fetch,
    fetch_work,
    raised,
    start,
    started,
    take,
)
from perdure.conformance.harness import Store, checks
from perdure.errors import DuplicateEvent, InvalidValue, LockLost, NotSupported, StoreClosed
from perdure.providers.records import TurnCommit


@checks
class TestErrorHandling:
    verbs = (
        "ack_orchestration_item",
        "append_with_execution",
        "read",
        "read_with_execution",
        "fetch_orchestration_item",
        "open",
        "close",
        "name",
        "version",
        "capabilities",
        "admin",
    )

    async def test_an_unissued_token_is_called_invalid(self, store: Store) -> None:
        with pytest.raises(LockLost, match="invalid lock token") as refusal:
            await store.provider.ack_orchestration_item("never-issued", TurnCommit(execution_id=1))

        assert not refusal.value.retryable
        assert refusal.value.operation == "ack_orchestration_item"

    async def test_an_event_is_never_overwritten(self, store: Store) -> None:
        original = event("a", 1, data="original")
        await store.provider.append_with_execution("a", 1, [original])

        with pytest.raises(DuplicateEvent) as refusal:
            await store.provider.append_with_execution(
                "a", 1, [event("a", 2), event("a", 1, data="other")]
            )

        assert not refusal.value.retryable
        assert await store.reader.read("a") == [original]

    async def test_an_unknown_instance_has_an_empty_history(self, store: Store) -> None:
        assert await store.reader.read("unknown") == []
        assert await store.reader.read_with_execution("unknown", 1) == []

    async def test_fetching_from_an_empty_store_finds_nothing(self, store: Store) -> None:
        assert await fetch(store) is None
        assert await fetch_work(store) is None

    async def test_a_body_that_is_no_json_travels_like_any_other(self, store: Store) -> None:
        broken = start("a")
        broken = type(broken)(
            instance_id="a", kind=broken.kind, body="{not json", start=broken.start
        )

        await enqueue(store, broken)

        assert (await take(store, "a")).item.messages[0].body == "{not json"

    async def test_an_expired_token_cannot_ack(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await store.advance(LOCK_MS)

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                fetched.lock_token, TurnCommit(execution_id=1, history_delta=(started("a"),))
            )

        assert await store.reader.read("a") == []

    async def test_a_token_is_good_until_the_very_moment_it_expires(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await store.advance(LOCK_MS - store.tick_ms)

        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, history_delta=(started("a"),))
        )

        assert await store.reader.read("a") == [started("a")]

    async def test_appending_below_the_first_event_id_is_refused(self, store: Store) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.append_with_execution("a", 1, [event("a", 1), event("a", 0)])

        assert await store.reader.read("a") == []

    async def test_history_can_be_read_in_parts(self, store: Store) -> None:
        events = [event("a", each) for each in (1, 2, 5, 9)]
        await store.provider.append_with_execution("a", 1, events)

        part = await store.reader.read_with_execution("a", 1, after_event_id=1, limit=2)

        assert part == events[1:3]

    async def test_a_closed_handle_says_so(self, store: Store) -> None:
        handle = await store.second()
        await handle.close()
        await handle.close()

        with pytest.raises(StoreClosed):
            await handle.read("a")
        with pytest.raises(StoreClosed):
            await fetch(store, provider=handle)

    async def test_opening_twice_does_nothing(self, store: Store) -> None:
        await create(store, "a")

        await store.provider.open()

        assert await store.provider.read("a") == [started("a")]

    async def test_a_provider_says_who_it_is(self, store: Store) -> None:
        assert store.provider.name
        assert store.provider.version
        assert store.provider.capabilities == store.capabilities
        if store.capabilities.admin:
            assert store.provider.admin is not None
        else:
            with pytest.raises(NotSupported):
                _ = store.provider.admin

    async def test_an_orphaned_message_does_not_stop_others(self, store: Store) -> None:
        await enqueue(store, raised("unknown"), start("a"))

        assert (await take(store, "a")).attempt_count == 1
