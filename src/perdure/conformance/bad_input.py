"""Values that no store should take: refused with a typed error before anything is written."""

from __future__ import annotations

from typing import Any, Final

import msgspec
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
    raised,
    start,
    take,
    take_work,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.key_value import put
from perdure.errors import InvalidValue
from perdure.limits import (
    CUSTOM_STATUS_BYTES_MAX,
    ID_CHARACTERS_MAX,
    KV_VALUE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    TAG_BYTES_MAX,
)
from perdure.providers.records import (
    Claim,
    CustomStatusChange,
    EnqueueCondition,
    HistoryRecord,
    OrchestratorMessage,
    SessionFetch,
    TagFilter,
    TimerIdentity,
    TurnCommit,
)

BAD_IDS: Final[dict[str, Any]] = {
    "empty": "",
    "blank": " \u2003 ",
    "overlong": "x" * (ID_CHARACTERS_MAX + 1),
    "NUL": "a\0b",
    "newline": "a\nb",
    "escape": "a\x1b[31mb",
    "delete": "a\x7fb",
    "C1 control": "a\x9bb",
    "lone surrogate": "a\ud800b",
    "bytes": b"x",
    "number": 1,
    "nothing": None,
}
BAD_TEXTS: Final = {
    "lone surrogate": '"\udfff"',
    "NUL": '"\0"',
    "oversized": '"' + "x" * (4 * PAYLOAD_BYTES_MAX) + '"',
}

bad_ids = pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS)
bad_optional_ids = pytest.mark.parametrize(
    "bad",
    [bad for bad in BAD_IDS.values() if bad is not None],
    ids=[name for name, bad in BAD_IDS.items() if bad is not None],
)
bad_texts = pytest.mark.parametrize("bad", BAD_TEXTS.values(), ids=BAD_TEXTS)


def changed(record: Any, **fields: Any) -> Any:
    """The record with fields that a type checker would not let through."""
    return msgspec.structs.replace(record, **fields)


async def assert_nothing_queued(store: Store) -> None:
    assert await fetch(store) is None
    assert await fetch_work(store, tags=TagFilter.any()) is None


@checks
class TestBadIds:
    verbs = ("enqueue_for_orchestrator", "enqueue_for_worker", "ack_orchestration_item")

    @bad_ids
    async def test_of_an_instance(self, store: Store, bad: Any) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_orchestrator(changed(start("x"), instance_id=bad))

        await assert_nothing_queued(store)

    @bad_ids
    async def test_of_a_kind(self, store: Store, bad: Any) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_orchestrator(changed(start("x"), kind=bad))

        await assert_nothing_queued(store)

    @bad_ids
    async def test_of_an_orchestration(self, store: Store, bad: Any) -> None:
        message = start("x")
        assert message.start is not None

        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_orchestrator(
                changed(message, start=changed(message.start, name=bad))
            )

        await assert_nothing_queued(store)

    @bad_ids
    async def test_of_the_instance_of_a_work_item(self, store: Store, bad: Any) -> None:
        item = activity("x")

        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_worker(
                changed(item, identity=changed(item.identity, instance_id=bad))
            )

        await assert_nothing_queued(store)

    @bad_ids
    async def test_of_an_activity(self, store: Store, bad: Any) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_worker(changed(activity("x"), name=bad))

        await assert_nothing_queued(store)

    @pytest.mark.parametrize("part", ["worker_items", "cancelled_activities"])
    async def test_of_another_instance_in_a_turn(self, store: Store, part: str) -> None:
        await create(store, "victim", worker_items=(activity("victim"),))
        await enqueue(store, start("x"))
        held = await take(store, "x")
        foreign = activity("victim", activity_id=3)
        parts: dict[str, Any] = {
            "worker_items": foreign,
            "cancelled_activities": activity("victim").identity,
        }
        own = TurnCommit(execution_id=1, history_delta=(event("x", 1),))
        commit = changed(own, **{part: (parts[part],)})

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(held.lock_token, commit)

        assert not await store.reader.read("x")
        work = await take_work(store)
        assert work.identity == activity("victim").identity
        assert await fetch_work(store) is None

    @bad_ids
    async def test_of_a_target_in_a_turn(self, store: Store, bad: Any) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        commit = TurnCommit(
            execution_id=1,
            history_delta=(event("x", 1),),
            worker_items=(activity("x"),),
            orchestrator_items=(raised("x"), changed(raised("x"), instance_id=bad)),
        )

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(held.lock_token, commit)

        assert await store.reader.read("x") == []
        assert await fetch_work(store) is None
        good = changed(commit, orchestrator_items=(raised("x"),))
        await store.provider.ack_orchestration_item(held.lock_token, good)

    async def test_the_longest_and_oddest_good_ids_are_taken(self, store: Store) -> None:
        ids = ("x" * ID_CHARACTERS_MAX, "🦀" * ID_CHARACTERS_MAX, "a b", " a", "\u200b", "a\u202eb")

        for instance in ids:
            await create(store, instance)

        for instance in ids:
            assert len(await store.reader.read(instance)) == 1


NOTHING: Final[dict[str, Any]] = {"worker_items": (), "orchestrator_items": ()}


@checks
class TestBadTexts:
    verbs = ("enqueue_for_orchestrator", "enqueue_for_worker", "ack_orchestration_item")

    @bad_texts
    async def test_in_a_message(self, store: Store, bad: str) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_orchestrator(
                OrchestratorMessage(instance_id="x", kind="Odd", body=bad)
            )

        await assert_nothing_queued(store)

    @bad_texts
    async def test_in_a_work_item(self, store: Store, bad: str) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_worker(changed(activity("x"), body=bad))

        await assert_nothing_queued(store)

    @bad_texts
    async def test_in_an_event(self, store: Store, bad: str) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        records = (event("x", 1), HistoryRecord(event_id=2, data=bad))

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(
                held.lock_token, TurnCommit(execution_id=1, history_delta=records)
            )
        with pytest.raises(InvalidValue):
            await store.provider.append_with_execution("x", 1, records)

        assert await store.reader.read("x") == []

    @bad_texts
    async def test_in_what_a_turn_sends(self, store: Store, bad: str) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")

        sent: dict[str, Any]
        for sent in (
            {"worker_items": (activity("x"), changed(activity("x", 1, 3), body=bad))},
            {"orchestrator_items": (raised("x"), changed(raised("x"), body=bad))},
        ):
            commit = TurnCommit(execution_id=1, history_delta=(event("x", 1),), **sent)
            with pytest.raises(InvalidValue):
                await store.provider.ack_orchestration_item(held.lock_token, commit)

        await store.provider.ack_orchestration_item(held.lock_token, changed(commit, **NOTHING))
        await assert_nothing_queued(store)

    @bad_texts
    async def test_in_a_completion(self, store: Store, bad: str) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        work = await take_work(store)

        with pytest.raises(InvalidValue):
            await store.provider.ack_work_item(work.lock_token, changed(completion("x"), body=bad))

        assert await fetch(store) is None
        await store.provider.ack_work_item(work.lock_token, completion("x"))

    async def test_a_payload_of_the_greatest_size_is_taken(self, store: Store) -> None:
        text = "x" * (PAYLOAD_BYTES_MAX - 2)
        await create(store, "x", history_delta=(event("x", 2, data=text),))
        message = raised("x", data=text)
        await enqueue(store, message)

        fetched = await take(store, "x")

        assert fetched.item.messages[0].body == message.body
        assert fetched.item.history[1] == event("x", 2, data=text)

    async def test_state_and_status_have_their_own_bounds(self, store: Store) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        too_long_value = TurnCommit(
            execution_id=1, kv_changes=(put("k", "x" * (KV_VALUE_BYTES_MAX + 1)),)
        )
        too_long_status = TurnCommit(
            execution_id=1,
            custom_status=CustomStatusChange(value="x" * (CUSTOM_STATUS_BYTES_MAX + 1)),
        )

        for commit in (too_long_value, too_long_status):
            with pytest.raises(InvalidValue):
                await store.provider.ack_orchestration_item(held.lock_token, commit)

        assert await store.reader.get_custom_status("x") is None


@checks
class TestBadNumbersAndTags:
    verbs = (
        "ack_orchestration_item",
        "append_with_execution",
        "enqueue_for_worker",
        "read_with_execution",
    )

    @pytest.mark.parametrize(
        "page", [{"limit": 0}, {"limit": -1}, {"limit": "5"}, {"after_event_id": -1}], ids=str
    )
    async def test_a_page_of_history_has_room(self, store: Store, page: dict[str, Any]) -> None:
        await create(store, "x")

        with pytest.raises(InvalidValue):
            await store.provider.read_with_execution("x", 1, **page)

    async def test_the_smallest_page_of_history_is_read(self, store: Store) -> None:
        await create(store, "x", history_delta=(event("x", 2),))

        page = await store.provider.read_with_execution("x", 1, after_event_id=0, limit=1)

        assert [record.event_id for record in page] == [1]

    @pytest.mark.parametrize("time", [2**63, -(2**63) - 1, "5", 1.5], ids=str)
    async def test_a_time_that_no_store_can_keep_is_refused(self, store: Store, time: Any) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_orchestrator(changed(raised("x"), visible_at_ms=time))
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_worker(changed(activity("x"), visible_at_ms=time))

        await assert_nothing_queued(store)

    @pytest.mark.parametrize("part", ["execution_id", "timer_id"])
    async def test_numbers_of_timers_begin_with_one(self, store: Store, part: str) -> None:
        identity = changed(TimerIdentity(execution_id=1, timer_id=1), **{part: 0})

        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_orchestrator(changed(raised("x"), timer=identity))

        await assert_nothing_queued(store)

    @pytest.mark.parametrize("time", [2**63, -1, "5", 1.5], ids=str)
    async def test_a_time_of_state_that_no_store_can_keep_is_refused(
        self, store: Store, time: Any
    ) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        change = changed(put("k", "1"), updated_at_ms=time)

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(
                held.lock_token, TurnCommit(execution_id=1, kv_changes=(change,))
            )

        assert await store.reader.get_kv_value("x", "k") is None

    @pytest.mark.parametrize("event_id", [0, -1])
    async def test_event_ids_begin_with_one(self, store: Store, event_id: int) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        records = (event("x", 1), HistoryRecord(event_id=event_id, data="{}"))

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(
                held.lock_token, TurnCommit(execution_id=1, history_delta=records)
            )
        with pytest.raises(InvalidValue):
            await store.provider.append_with_execution("x", 1, records)

        assert await store.reader.read("x") == []

    async def test_a_tag_filter_takes_one_to_five_tags(self, store: Store) -> None:
        await enqueue_work(store, activity("x", tag="t1"))

        for build in (TagFilter.only, TagFilter.default_and):
            for tags in ((), tuple(f"t{number}" for number in range(6))):
                with pytest.raises(InvalidValue):
                    build(*tags)

        five = TagFilter.only(*(f"t{number}" for number in range(5)))
        assert (await take_work(store, tags=five)).tag == "t1"

    async def test_an_overlong_tag_is_refused(self, store: Store) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_worker(activity("x", tag="t" * (TAG_BYTES_MAX + 1)))

        await assert_nothing_queued(store)

    @bad_optional_ids
    async def test_a_bad_session_is_refused(self, store: Store, bad: Any) -> None:
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_worker(changed(activity("x"), session_id=bad))
        with pytest.raises(InvalidValue):
            await store.provider.fetch_work_item(
                5_000, 0, changed(SessionFetch(owner_id="a", lock_timeout_ms=1), owner_id=bad)
            )

        await assert_nothing_queued(store)

    @pytest.mark.parametrize("condition", [EnqueueCondition.ABSENT, EnqueueCondition.REPLACE])
    async def test_only_a_start_can_be_enqueued_for_a_new_instance(
        self, store: Store, condition: EnqueueCondition
    ) -> None:
        await create(store, "x")

        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_orchestrator(raised("x"), None, condition)

        assert len(await store.reader.read("x")) == 1
        await assert_nothing_queued(store)

    async def test_a_session_item_cannot_be_claimed(self, store: Store) -> None:
        claim = Claim(lock_token="claimed", lock_timeout_ms=5_000)  # noqa: S106

        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_worker(activity("x", session="s", claim=claim))

        await assert_nothing_queued(store)

    async def test_a_claim_lasts_at_least_a_millisecond(self, store: Store) -> None:
        claim = Claim(lock_token="claimed", lock_timeout_ms=0)  # noqa: S106

        with pytest.raises(InvalidValue):
            await store.provider.enqueue_for_worker(activity("x", claim=claim))

        await assert_nothing_queued(store)

    async def test_a_work_item_is_retried_as_itself(self, store: Store) -> None:
        await enqueue_work(store, activity("x"))
        work = await take_work(store)

        for other in (activity("y"), activity("x", activity_id=99)):
            with pytest.raises(InvalidValue):
                await store.provider.ack_work_item(work.lock_token, None, other)

        await store.provider.ack_work_item(work.lock_token, None, activity("x"))
        assert (await take_work(store)).identity == activity("x").identity
        assert await fetch_work(store) is None

    async def test_a_work_item_is_completed_or_retried_but_not_both(self, store: Store) -> None:
        await enqueue_work(store, activity("x"))
        work = await take_work(store)

        with pytest.raises(InvalidValue):
            await store.provider.ack_work_item(work.lock_token, completion("x"), activity("x"))

        await store.provider.renew_work_item_lock(work.lock_token, 5_000)
