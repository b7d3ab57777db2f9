"""Sealed payloads in the rarer records: copies, dead letters, commits without events."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from perdure.clock import ManualClock
from perdure.codec import Codec
from perdure.conformance import factories
from perdure.crypto import AesGcm
from perdure.errors import InternalError
from perdure.limits import ORPHAN_GRACE_MS
from perdure.model.failures import Block, BlockReason
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    InstanceSnapshot,
    KvClear,
    KvEntry,
    KvSet,
    TurnCommit,
)
from perdure.providers.sealing import SealedProvider
from perdure.providers.sqlite.memory import InMemoryProvider

SECRET = '"4111-1111"'


def sealed_memory(clock=None):
    codec = Codec(AesGcm({"old": secrets.token_bytes(32)}))
    return SealedProvider(InMemoryProvider(clock=clock), codec)


def snapshot_of(*, block):
    return InstanceSnapshot(
        instance_id="x",
        name="flow",
        version="1",
        execution_id=1,
        created_at_ms=1,
        updated_at_ms=1,
        parent_instance_id=None,
        custom_status=SECRET if block else None,
        custom_status_version=1,
        block=block,
        suspended=False,
        not_before_ms=None,
        executions=(),
        kv_store={"kept": KvEntry(SECRET, 1)},
        kv_delta={"cleared": None, "set": KvEntry(SECRET, 2)},
        messages=(),
        work=(),
    )


@pytest.mark.parametrize(
    "block", [None, Block(reason=BlockReason.POISON, message=SECRET, detail=SECRET, since_ms=1)]
)
def test_a_copy_is_sealed_and_opened_with_its_block_and_what_was_cleared(block):
    provider = sealed_memory()
    copied = snapshot_of(block=block)

    sealed = provider.sealing.snapshot(copied)

    assert SECRET not in str(sealed)
    assert sealed.kv_delta["cleared"] is None
    assert provider.opening.snapshot(sealed) == copied


@pytest.mark.parametrize(
    "written",
    [
        {"metadata": ExecutionMetadata(output=SECRET)},
        {"custom_status": CustomStatusChange(SECRET)},
        {"kv_changes": (KvClear("a"), KvSet("b", SECRET, 1))},
    ],
)
def test_values_are_not_sealed_for_an_instance_that_is_not_known(written):
    with pytest.raises(InternalError, match="their instance is not known"):
        sealed_memory().sealing.commit(TurnCommit(execution_id=1, **written))


def test_a_commit_that_writes_no_value_needs_no_instance():
    commit = TurnCommit(execution_id=1, kv_changes=(KvClear("a"),))

    assert sealed_memory().sealing.commit(commit) == commit


def test_dead_letters_and_the_first_custom_status_are_opened():
    async def check():
        clock = ManualClock()
        provider = sealed_memory(clock)
        lost = factories.raised("lost", data=SECRET)
        async with provider.inner:
            start = factories.start("x")
            commit = TurnCommit(
                execution_id=1,
                history_delta=(factories.started("x"),),
                metadata=ExecutionMetadata(name=factories.NAME, version=factories.VERSION),
                custom_status=CustomStatusChange(SECRET),
            )
            assert await provider.start_orchestration_item(start, commit, "token", "owner")
            assert (await provider.inner.get_custom_status("x"))[0] != SECRET
            assert await provider.get_custom_status("x") == (SECRET, 1)
            assert await provider.get_custom_status("x", 1) is None
            assert await provider.get_kv_value("x", "missing") is None

            await provider.enqueue_for_orchestrator(lost)
            await provider.fetch_orchestration_item(1_000, 0)
            clock.advance(ORPHAN_GRACE_MS)
            await provider.fetch_orchestration_item(1_000, 0)
            stored = await provider.inner.admin.list_dead_letters()
            assert [each.message for each in stored] != [lost]
            opened = await provider.admin.list_dead_letters()
            assert [each.message for each in opened] == [lost]

    asyncio.run(check())
