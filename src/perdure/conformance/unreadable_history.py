"""Damaged history is handed out with its lock and its attempts counted, so that it can be parked.

A provider keeps texts without looking inside, so damage shows in one of two ways: the rows cannot
be read (``history_error``), or they come back as they are and decoding them says so.
"""

from __future__ import annotations

import pytest

from perdure.conformance.capability_filtering import ONE, TWO, pinned
from perdure.conformance.factories import (
    LOCK_MS,
    create,
    enqueue,
    event,
    fetch,
    finish,
    raised,
    take,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import CorruptData
from perdure.model import wire
from perdure.model.failures import Block, BlockReason
from perdure.model.status import Status
from perdure.providers.records import ExecutionMetadata, FetchedOrchestration, TurnCommit


def assert_damage_shows(fetched: FetchedOrchestration) -> None:
    """The damage is reported beside the item or lies openly in it; it is never passed over."""
    if fetched.item.history_error is not None:
        assert fetched.item.history_error
        assert fetched.item.history == ()
        return
    with pytest.raises(CorruptData):
        wire.decode_history(fetched.item.history)


@checks
class TestUnreadableHistory:
    verbs = (
        "fetch_orchestration_item",
        "ack_orchestration_item",
        "abandon_orchestration_item",
        "lock_instance",
    )

    async def test_damaged_history_is_handed_out_and_says_so(self, store: Store) -> None:
        await pinned(store, "hurt", (1, 0, 0))
        await store.corrupt_history("hurt")

        assert await fetch(store, filter=TWO) is None
        fetched = await take(store, "hurt")

        assert_damage_shows(fetched)
        assert len(fetched.item.messages) == 1
        assert await fetch(store) is None, "the lock is held"

    async def test_each_fetch_of_damaged_history_counts(self, store: Store) -> None:
        await pinned(store, "hurt", (1, 0, 0))
        await store.corrupt_history("hurt")

        for attempt in (1, 2, 3):
            fetched = await take(store, "hurt")
            assert_damage_shows(fetched)
            assert fetched.attempt_count == attempt
            await store.provider.abandon_orchestration_item(fetched.lock_token)

    async def test_attempts_reach_any_threshold(self, store: Store) -> None:
        await pinned(store, "hurt", (1, 0, 0))
        await store.corrupt_history("hurt")

        for _ in range(4):
            fetched = await take(store, "hurt", lock_ms=1_000)
            await store.advance(2_000)

        fetched = await take(store, "hurt")
        assert fetched.attempt_count == 5

    async def test_the_filter_comes_before_any_reading(self, store: Store) -> None:
        await pinned(store, "hurt", (1, 0, 0))
        await store.corrupt_history("hurt")
        await pinned(store, "well", (2, 0, 0))

        await take(store, "well", filter=TWO)
        assert await fetch(store, filter=TWO) is None
        fetched = await take(store, "hurt", filter=ONE)
        assert_damage_shows(fetched)
        assert fetched.attempt_count == 1

    @requires("admin")
    async def test_a_damaged_instance_can_be_ended(self, store: Store) -> None:
        await pinned(store, "hurt", (1, 0, 0))
        await store.corrupt_history("hurt")
        fetched = await take(store, "hurt")

        await store.provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(
                execution_id=fetched.item.execution_id,
                history_delta=(event("hurt", 2),),
                metadata=ExecutionMetadata(
                    status=Status.FAILED, output='"history cannot be decoded"'
                ),
            ),
        )

        info = await store.admin.get_instance_info("hurt")
        assert (info.status, info.output) == (Status.FAILED, '"history cannot be decoded"')
        assert await fetch(store) is None

    @requires("admin")
    async def test_an_operator_can_end_a_damaged_instance(self, store: Store) -> None:
        await pinned(store, "hurt", None)
        await store.corrupt_history("hurt")

        locked = await store.admin.lock_instance("hurt", LOCK_MS)

        assert_damage_shows(locked)
        await store.provider.ack_orchestration_item(
            locked.lock_token,
            TurnCommit(
                execution_id=locked.item.execution_id,
                history_delta=(event("hurt", 2),),
                metadata=ExecutionMetadata(status=Status.TERMINATED),
                consumed=(),
            ),
        )
        assert (await store.admin.get_instance_info("hurt")).status is Status.TERMINATED

    async def test_others_are_not_held_up(self, store: Store) -> None:
        await pinned(store, "hurt", None)
        await store.corrupt_history("hurt")
        await create(store, "well", history_delta=(event("well", 2),))
        await enqueue(store, raised("well"))

        await take(store, "hurt")
        fetched = await take(store, "well")

        assert fetched.item.history_error is None
        assert len(wire.decode_history(fetched.item.history)) == 2
        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, history_delta=(event("well", 3),))
        )

    @requires("admin")
    async def test_a_damaged_instance_can_be_parked_and_deleted(self, store: Store) -> None:
        await pinned(store, "hurt", None)
        await store.corrupt_history("hurt")
        fetched = await take(store, "hurt")
        block = Block(reason=BlockReason.UNDECODABLE, message="event 1 cannot be read")

        await store.provider.abandon_orchestration_item(fetched.lock_token, block=block)

        info = await store.admin.get_instance_info("hurt")
        assert info.status is Status.BLOCKED
        assert info.block is not None
        assert info.block.message == "event 1 cannot be read"
        await finish(store, "hurt", Status.TERMINATED)
        assert (await store.admin.delete_instance("hurt")).instances == 1

    async def test_reading_damaged_history_never_shows_less_of_it(self, store: Store) -> None:
        await create(store, "hurt", history_delta=(event("hurt", 2), event("hurt", 3)))
        await store.corrupt_history("hurt")

        try:
            records = await store.reader.read("hurt")
        except CorruptData:
            return
        assert [record.event_id for record in records] == [1, 2, 3]
        with pytest.raises(CorruptData):
            wire.decode_history(records)
