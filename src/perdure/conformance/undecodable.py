"""Texts that no runtime can decode: kept as they are, counted, and in the way of no other message.

A provider never looks into a payload, so it has nothing to fail on and nothing to drop.
"""

from __future__ import annotations

from typing import Final

import pytest

from perdure.conformance.factories import (
    activity,
    bodies,
    create,
    enqueue,
    enqueue_work,
    event,
    fetch,
    fetch_work,
    identity,
    raised,
    take,
    take_work,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import CorruptData
from perdure.model import wire
from perdure.providers.records import HistoryRecord, OrchestratorMessage, TurnCommit, WorkerMessage

GARBAGE: Final = (
    "",
    "{",
    "not json at all",
    '{"type":"FromTheFuture","instance_id":"x"}',
    "[" * 300,
    '"\u2028 \u202e \U0001f980 \u00e9 e\u0301"',
    "'; DROP TABLE history; --",
)


def undecodable(instance: str, body: str) -> OrchestratorMessage:
    return OrchestratorMessage(instance_id=instance, kind="Unknown", body=body)


def undecodable_work(instance: str, body: str, activity_id: int = 2) -> WorkerMessage:
    return WorkerMessage(
        identity=identity(instance, activity_id=activity_id), name="act", body=body
    )


@checks
class TestUndecodableMessages:
    verbs = ("enqueue_for_orchestrator", "fetch_orchestration_item", "ack_orchestration_item")

    async def test_they_are_delivered_as_they_are_and_in_their_place(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x", data="before"))
        await enqueue(store, *(undecodable("x", body) for body in GARBAGE))
        await enqueue(store, raised("x", data="after"))

        fetched = await take(store, "x")

        assert bodies(fetched) == [
            raised("x", data="before").body,
            *GARBAGE,
            raised("x", data="after").body,
        ]

    async def test_their_attempts_rise_until_somebody_decides(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, undecodable("x", "{"))

        for attempt in range(1, 12):
            fetched = await take(store, "x")
            assert fetched.attempt_count == attempt
            assert fetched.item.messages[0].attempt_count == attempt
            await store.provider.abandon_orchestration_item(fetched.lock_token)

    async def test_one_that_a_turn_leaves_out_stays_queued(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, undecodable("x", "{"), raised("x"))
        fetched = await take(store, "x")
        bad, good = fetched.item.messages

        await store.provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(
                execution_id=1,
                history_delta=(event("x", 2),),
                consumed=(good.message_id,),
            ),
        )

        again = await take(store, "x")
        assert bodies(again) == ["{"]
        assert again.item.messages[0].message_id == bad.message_id
        assert again.attempt_count == 2

    async def test_they_do_not_hold_up_other_instances(self, store: Store) -> None:
        for instance in ("bad", "good"):
            await create(store, instance)
        await enqueue(store, undecodable("bad", "{"), raised("good"))

        await take(store, "bad")
        await take(store, "good")

    @requires("admin")
    async def test_an_operator_sees_them(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, undecodable("x", "{"))

        (seen,) = await store.admin.list_messages("x")

        assert (seen.message.kind, seen.message.body) == ("Unknown", "{")


@checks
class TestUndecodableWork:
    verbs = ("enqueue_for_worker", "fetch_work_item", "abandon_work_item")

    async def test_it_is_handed_out_as_it_is(self, store: Store) -> None:
        for number, body in enumerate(GARBAGE, start=1):
            await enqueue_work(store, undecodable_work("x", body, number))

        seen = [(await take_work(store)).body for _ in GARBAGE]

        assert seen == list(GARBAGE)

    async def test_its_attempts_rise_and_the_next_item_comes_through(self, store: Store) -> None:
        await enqueue_work(store, undecodable_work("x", "{"), activity("y"))

        bad = await take_work(store)
        good = await take_work(store)
        await store.provider.abandon_work_item(bad.lock_token)

        assert good.identity.instance_id == "y"
        assert (await take_work(store)).attempt_count == 2

    async def test_a_backed_off_item_makes_room(self, store: Store) -> None:
        await enqueue_work(store, undecodable_work("x", "{"), activity("y"))
        bad = await take_work(store)

        await store.provider.abandon_work_item(bad.lock_token, 10_000)

        assert (await take_work(store)).identity.instance_id == "y"
        assert await fetch_work(store) is None
        await store.advance(10_000)
        assert (await take_work(store)).body == "{"


@checks
class TestUndecodableEvents:
    verbs = ("ack_orchestration_item", "append_with_execution", "read", "read_with_execution")

    async def test_an_event_of_any_text_is_kept_as_it_is(self, store: Store) -> None:
        records = [
            HistoryRecord(event_id=number, data=body) for number, body in enumerate(GARBAGE, 2)
        ]
        await create(store, "x", history_delta=tuple(records))

        assert (await store.reader.read("x"))[1:] == records
        fetched = await turn(store, "x")
        assert list(fetched.item.history)[1:] == records

    async def test_an_event_of_an_unknown_kind_is_never_skipped(self, store: Store) -> None:
        await create(store, "x")
        unknown = HistoryRecord(event_id=2, data='{"type":"FromTheFuture","event_id":2}')
        await store.provider.append_with_execution("x", 1, [unknown, event("x", 3)])

        records = await store.reader.read_with_execution("x", 1)

        assert [record.event_id for record in records] == [1, 2, 3]
        with pytest.raises(CorruptData, match="FromTheFuture"):
            wire.decode_history(records)

    async def test_a_payload_that_looks_like_json_is_not_rewritten(self, store: Store) -> None:
        odd = '{ "b":1,\t"a" : 1.0, "a": 12345678901234567890, "e": 1E400 }'
        await create(store, "x", history_delta=(HistoryRecord(event_id=2, data=odd),))
        await enqueue(store, undecodable("x", odd))

        assert (await store.reader.read("x"))[1].data == odd
        assert bodies(await take(store, "x")) == [odd]
        assert await fetch(store) is None
