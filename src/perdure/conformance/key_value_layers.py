"""The two layers of state: what an execution starts from, and what it has changed since.

A turn starts from the state at the end of the previous execution, never from what its own execution
wrote: replaying the code makes those writes again.
"""

from __future__ import annotations

import pytest

from perdure.conformance.factories import (
    create,
    enqueue,
    finish,
    next_execution,
    raised,
    take,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.key_value import CLEAR_ALL, clear, put, values
from perdure.model.status import Status
from perdure.providers.records import ExecutionMetadata


async def snapshot(store: Store, instance: str) -> dict[str, str]:
    """Return the state from which the instance's next turn starts."""
    fetched = await turn(store, instance)
    return {key: entry.value for key, entry in fetched.item.kv_snapshot.items()}


@checks
class TestSnapshots:
    verbs = ("fetch_orchestration_item", "ack_orchestration_item")

    async def test_an_ended_execution_hands_on_all_its_keys(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "2")))
        await finish(store, "x")

        assert await snapshot(store, "x") == {"a": "1", "b": "2"}

    async def test_a_key_cleared_before_the_end_is_not_handed_on(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "2")))
        await finish(store, "x", kv_changes=(clear("a"),))

        assert await snapshot(store, "x") == {"b": "2"}

    async def test_after_clearing_all_nothing_is_handed_on(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "2")))
        await finish(store, "x", kv_changes=(CLEAR_ALL,))

        assert await snapshot(store, "x") == {}

    async def test_a_fresh_instance_starts_from_nothing(self, store: Store) -> None:
        await create(store, "x")

        assert await snapshot(store, "x") == {}

    async def test_the_second_execution_starts_from_the_first_only(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("first", "1"),))
        await next_execution(store, "x", 2, kv_changes=(put("second", "2"),))

        assert await snapshot(store, "x") == {"first": "1"}

    @pytest.mark.parametrize("status", [None, Status.RUNNING])
    async def test_a_key_of_the_running_execution_is_seen_by_clients_only(
        self, store: Store, status: Status | None
    ) -> None:
        await create(store, "x")
        metadata = ExecutionMetadata(status=status)
        await turn(store, "x", kv_changes=(put("k", "1"),), metadata=metadata)

        assert await store.reader.get_kv_value("x", "k") == "1"
        assert await snapshot(store, "x") == {}

    async def test_continuing_as_new_hands_the_value_on(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))

        fetched = await next_execution(store, "x", 2)

        assert {key: entry.value for key, entry in fetched.item.kv_snapshot.items()} == {"k": "1"}
        assert await snapshot(store, "x") == {"k": "1"}

    async def test_the_latest_write_of_several_turns_is_handed_on(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "1")))
        await turn(store, "x", kv_changes=(put("a", "2"), clear("b")))
        await turn(store, "x", kv_changes=(put("b", "3"),))

        await next_execution(store, "x", 2)

        assert await snapshot(store, "x") == {"a": "2", "b": "3"}

    async def test_every_way_to_end_hands_the_state_on(self, store: Store) -> None:
        for status in Status:
            if status.ends_execution:
                await create(store, status, kv_changes=(put("k", status),))
                await finish(store, status, status)

                assert await snapshot(store, status) == {"k": status}

    async def test_an_overwritten_key_still_starts_from_its_old_value(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "old"), put("gone", "old")))
        await next_execution(store, "x", 2, kv_changes=(put("k", "new"), clear("gone")))

        assert await snapshot(store, "x") == {"gone": "old", "k": "old"}

    async def test_the_same_turn_fetched_again_starts_from_the_same_state(
        self, store: Store
    ) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))
        await next_execution(store, "x", 2, kv_changes=(put("k", "2"),))
        await enqueue(store, raised("x"))

        for _ in range(3):
            fetched = await take(store, "x")
            assert fetched.item.kv_snapshot["k"].value == "1"
            await store.provider.abandon_orchestration_item(fetched.lock_token)


@checks
class TestLiveState:
    verbs = ("get_kv_value", "get_kv_all_values")

    async def test_the_second_execution_overwrites_the_first(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))

        await next_execution(store, "x", 2, kv_changes=(put("k", "2"),))

        assert await values(store, "x") == {"k": "2"}

    async def test_set_cleared_and_set_over_three_executions(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))

        await next_execution(store, "x", 2, kv_changes=(clear("k"),))
        assert await values(store, "x") == {}

        await next_execution(store, "x", 3, kv_changes=(put("k", "3"),))
        assert await values(store, "x") == {"k": "3"}

    async def test_clients_see_both_layers_as_one(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("old", "1"), put("both", "1")))

        await next_execution(store, "x", 2, kv_changes=(put("both", "2"), put("new", "2")))

        assert await values(store, "x") == {"both": "2", "new": "2", "old": "1"}

    async def test_a_clear_hides_an_older_value(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "1")))

        await next_execution(store, "x", 2, kv_changes=(clear("a"),))

        assert await values(store, "x") == {"b": "1"}

    async def test_clearing_all_hides_every_older_value(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "1")))
        await next_execution(store, "x", 2, kv_changes=(CLEAR_ALL,))
        assert await values(store, "x") == {}

        await turn(store, "x", kv_changes=(put("b", "2"),))

        assert await values(store, "x") == {"b": "2"}

    async def test_after_the_end_the_value_is_still_there(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))

        await finish(store, "x")

        assert await values(store, "x") == {"k": "1"}

    async def test_a_hidden_key_stays_hidden_in_the_next_execution(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "1")))
        await next_execution(store, "x", 2, kv_changes=(CLEAR_ALL, put("b", "2")))

        await next_execution(store, "x", 3)

        assert await values(store, "x") == {"b": "2"}
        assert await snapshot(store, "x") == {"b": "2"}
