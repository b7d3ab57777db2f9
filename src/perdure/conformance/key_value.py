"""State of an instance: writing, reading, and how long it lives."""

from __future__ import annotations

from perdure.conformance.factories import create, finish, next_execution, turn
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.limits import KV_VALUE_BYTES_MAX
from perdure.providers.records import KvClear, KvClearAll, KvEntry, KvSet, PruneOptions


def put(key: str, value: str, at_ms: int = 1) -> KvSet:
    return KvSet(key=key, value=value, updated_at_ms=at_ms)


def clear(key: str) -> KvClear:
    return KvClear(key=key)


CLEAR_ALL = KvClearAll()


async def values(store: Store, instance: str) -> dict[str, str]:
    entries = await store.reader.get_kv_all_values(instance)
    for key, entry in entries.items():
        assert await store.reader.get_kv_value(instance, key) == entry.value
    return {key: entry.value for key, entry in entries.items()}


@checks
class TestKeyValue:
    verbs = ("get_kv_value", "get_kv_all_values", "ack_orchestration_item")

    async def test_a_value_is_read_by_its_key(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "v"),))

        assert await store.reader.get_kv_value("x", "k") == "v"

    async def test_setting_again_overwrites(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))

        await turn(store, "x", kv_changes=(put("k", "2"), put("k", "3")))

        assert await values(store, "x") == {"k": "3"}

    async def test_clearing_a_key_removes_it(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "2")))

        await turn(store, "x", kv_changes=(clear("a"),))

        assert await store.reader.get_kv_value("x", "a") is None
        assert await values(store, "x") == {"b": "2"}

    async def test_clearing_all_removes_every_key(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"), put("b", "2")))

        await turn(store, "x", kv_changes=(CLEAR_ALL,))

        assert await values(store, "x") == {}

    async def test_a_missing_key_reads_as_none(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("a", "1"),))

        assert await store.reader.get_kv_value("x", "b") is None

    async def test_the_same_key_of_two_instances_is_two_keys(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "of x"),))
        await create(store, "y", kv_changes=(put("k", "of y"),))

        assert await values(store, "x") == {"k": "of x"}
        assert await values(store, "y") == {"k": "of y"}

    async def test_clearing_a_key_that_never_was_is_fine(self, store: Store) -> None:
        await create(store, "x", kv_changes=(clear("k"), CLEAR_ALL))

        assert await values(store, "x") == {}

    async def test_an_unknown_instance_has_no_state(self, store: Store) -> None:
        assert await store.reader.get_kv_value("unknown", "k") is None
        assert await store.reader.get_kv_all_values("unknown") == {}

    async def test_what_is_set_after_clearing_all_stays(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("old", "1"),))

        await turn(store, "x", kv_changes=(put("older", "2"), CLEAR_ALL, put("new", "3")))

        assert await values(store, "x") == {"new": "3"}

    async def test_an_empty_text_is_a_value(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", ""),))

        assert await store.reader.get_kv_value("x", "k") == ""

    async def test_the_greatest_value_comes_back_whole(self, store: Store) -> None:
        value = "x" * KV_VALUE_BYTES_MAX

        await create(store, "x", kv_changes=(put("k", value),))

        assert await store.reader.get_kv_value("x", "k") == value

    async def test_any_text_is_a_key(self, store: Store) -> None:
        keys = ("with space", "ключ-鍵-🔑", "a.b.c", "a/b/../c", "%_", "'; --", "A", "a", "")

        await create(store, "x", kv_changes=tuple(put(key, f"of {key}") for key in keys))

        assert await values(store, "x") == {key: f"of {key}" for key in keys}

    async def test_clearing_all_stays_within_its_instance(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "of x"),))
        await create(store, "y", kv_changes=(put("k", "of y"),))

        await turn(store, "x", kv_changes=(CLEAR_ALL,))

        assert await values(store, "y") == {"k": "of y"}

    async def test_the_time_of_a_value_is_kept(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "v", 1_234),))
        entry = KvEntry(value="v", updated_at_ms=1_234)
        assert await store.reader.get_kv_all_values("x") == {"k": entry}

        await next_execution(store, "x", 2)

        fetched = await turn(store, "x")
        assert fetched.item.kv_snapshot == {"k": entry}

    async def test_keys_come_sorted(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("b", "1"), put("a", "2"), put("c", "3")))
        await next_execution(store, "x", 2)
        await turn(store, "x", kv_changes=(put("aa", "4"),))

        assert list(await store.reader.get_kv_all_values("x")) == ["a", "aa", "b", "c"]


@checks
@requires("admin")
class TestLifeOfState:
    """State belongs to the instance: it outlives executions and ends with the instance."""

    verbs = ("get_kv_value", "prune_executions", "delete_instance")

    async def test_an_overwritten_key_survives_pruning(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))
        await next_execution(store, "x", 2, kv_changes=(put("k", "2"),))
        await finish(store, "x")

        await store.admin.prune_executions("x", PruneOptions(keep_last=1))

        assert await values(store, "x") == {"k": "2"}

    async def test_a_key_overwritten_by_a_running_execution_survives(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))
        await next_execution(store, "x", 2, kv_changes=(put("k", "2"),))

        await store.admin.prune_executions("x", PruneOptions(keep_last=1))

        assert await values(store, "x") == {"k": "2"}

    async def test_a_key_of_a_pruned_execution_survives(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))
        await next_execution(store, "x", 2)

        await store.admin.prune_executions("x", PruneOptions(keep_last=1))

        assert await store.admin.list_executions("x") == [2]
        assert await values(store, "x") == {"k": "1"}

    async def test_deleting_the_instance_removes_its_state(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))
        await finish(store, "x")

        await store.admin.delete_instance("x")

        assert await values(store, "x") == {}
        assert await store.reader.get_kv_value("x", "k") is None

    async def test_pruning_a_single_execution_keeps_its_state(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))
        await finish(store, "x")

        await store.admin.prune_executions("x", PruneOptions(keep_last=1))

        assert await values(store, "x") == {"k": "1"}

    async def test_deleting_a_parent_removes_the_state_of_its_children(self, store: Store) -> None:
        for instance, parent in (("root", None), ("child", "root"), ("grandchild", "child")):
            await create(store, instance, parent=parent, kv_changes=(put("k", "1"),))
            await finish(store, instance)

        await store.admin.delete_instance("root")

        for instance in ("root", "child", "grandchild"):
            assert await values(store, instance) == {}

    async def test_a_forced_deletion_removes_state_of_the_current_execution(
        self, store: Store
    ) -> None:
        await create(store, "x", kv_changes=(put("old", "1"),))
        await next_execution(store, "x", 2, kv_changes=(put("new", "2"),))

        await store.admin.delete_instance("x", force=True)

        assert await values(store, "x") == {}
        await create(store, "x")
        assert await values(store, "x") == {}

    async def test_an_untouched_key_survives_every_pruning(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "1"),))
        await next_execution(store, "x", 2)
        await next_execution(store, "x", 3)

        result = await store.admin.prune_executions("x", PruneOptions(keep_last=1))

        assert result.executions == 2
        assert await values(store, "x") == {"k": "1"}
        fetched = await turn(store, "x")
        assert fetched.item.execution_id == 3
        assert {key: entry.value for key, entry in fetched.item.kv_snapshot.items()} == {"k": "1"}
