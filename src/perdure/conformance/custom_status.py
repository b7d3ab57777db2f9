"""Custom status: one text an instance, and a version by which clients notice changes."""

from __future__ import annotations

from typing import Final

import pytest

from perdure.conformance.factories import create, enqueue, event, next_execution, raised, take, turn
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import LockLost
from perdure.limits import CUSTOM_STATUS_BYTES_MAX
from perdure.providers.records import CustomStatusChange, TurnCommit

CLEAR: Final = CustomStatusChange(value=None)


def change(value: str) -> CustomStatusChange:
    return CustomStatusChange(value=value)


@checks
class TestCustomStatus:
    verbs = ("get_custom_status", "ack_orchestration_item")

    async def test_a_change_sets_it_with_version_one(self, store: Store) -> None:
        await create(store, "x", custom_status=change('"half"'))

        assert await store.reader.get_custom_status("x") == ('"half"', 1)

    async def test_clearing_it_is_a_change_too(self, store: Store) -> None:
        await create(store, "x", custom_status=change('"half"'))

        await turn(store, "x", custom_status=CLEAR)

        assert await store.reader.get_custom_status("x") == (None, 2)

    async def test_a_turn_without_a_change_preserves_it(self, store: Store) -> None:
        await create(store, "x", custom_status=change('"half"'))

        await turn(store, "x", history_delta=(event("x", 2),))

        assert await store.reader.get_custom_status("x") == ('"half"', 1)

    async def test_each_change_adds_one_to_the_version(self, store: Store) -> None:
        await create(store, "x", custom_status=change("1"))
        versions: list[int] = []
        for each in (None, change("2"), CLEAR):
            if each is not None:
                await turn(store, "x", custom_status=each)
            seen = await store.reader.get_custom_status("x")
            assert seen is not None
            versions.append(seen[1])

        assert versions == [1, 2, 3]

    async def test_who_has_seen_the_version_gets_nothing(self, store: Store) -> None:
        await create(store, "x", custom_status=change("1"))
        await turn(store, "x", custom_status=change("2"))

        assert await store.reader.get_custom_status("x", 2) is None
        assert await store.reader.get_custom_status("x", 3) is None
        assert await store.reader.get_custom_status("x", 1) == ("2", 2)
        assert await store.reader.get_custom_status("x", 0) == ("2", 2)

    async def test_an_unknown_instance_has_none(self, store: Store) -> None:
        assert await store.reader.get_custom_status("unknown") is None

    async def test_a_new_instance_has_none(self, store: Store) -> None:
        await create(store, "x")

        assert await store.reader.get_custom_status("x") is None

    async def test_setting_the_same_text_again_is_a_change(self, store: Store) -> None:
        await create(store, "x", custom_status=change("1"))

        await turn(store, "x", custom_status=change("1"))

        assert await store.reader.get_custom_status("x") == ("1", 2)

    async def test_it_lives_on_in_the_next_execution(self, store: Store) -> None:
        await create(store, "x", custom_status=change("1"))
        await next_execution(store, "x", 2)

        assert await store.reader.get_custom_status("x") == ("1", 1)
        await turn(store, "x", custom_status=change("2"))
        assert await store.reader.get_custom_status("x") == ("2", 2)

    async def test_a_refused_turn_changes_nothing(self, store: Store) -> None:
        await create(store, "x", custom_status=change("1"))
        await enqueue(store, raised("x"))
        held = await take(store, "x", lock_ms=1_000)
        await store.advance(1_000)
        commit = TurnCommit(execution_id=1, custom_status=change("2"))

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(held.lock_token, commit)

        assert await store.reader.get_custom_status("x") == ("1", 1)

    async def test_a_text_of_the_greatest_size_comes_back_whole(self, store: Store) -> None:
        text = '"' + "ü" * ((CUSTOM_STATUS_BYTES_MAX - 2) // 2) + '"'

        await create(store, "x", custom_status=change(text))

        assert await store.reader.get_custom_status("x") == (text, 1)

    @requires("admin")
    async def test_administration_shows_it(self, store: Store) -> None:
        await create(store, "x", custom_status=change("1"))

        info = await store.admin.get_instance_info("x")

        assert (info.custom_status, info.custom_status_version) == ("1", 1)
