"""The live cache counts what is there, whoever displaces whom."""

import asyncio
from types import SimpleNamespace

import pytest

from perdure.runtime.cache import LiveCache


def instance(instance_id, events):
    return SimpleNamespace(
        instance_id=instance_id,
        execution=SimpleNamespace(event_count=events),
        counted_events=0,
        used_at_ms=0,
        is_idle=True,
    )


@pytest.fixture
def cache():
    async def make():
        return LiveCache(instances_max=10, events_max=100)

    return asyncio.run(make())


def test_one_that_takes_the_place_of_another_is_counted_alone(cache):
    stale, fresh = instance("a", 90), instance("a", 95)
    cache.add(stale)
    cache.add(fresh)
    cache.used(stale, 5, 50)
    cache.remove(stale)

    assert cache.get("a") is fresh
    assert cache.room == 9
    cache.used(fresh, 6, 5)
    assert cache.is_full
    cache.remove(fresh)
    assert cache.room == 10


def test_events_of_a_turn_that_came_to_nothing_are_not_taken_off(cache):
    for number in range(30):
        live = instance("a", 60)
        cache.add(live)
        live.execution.event_count += 10  # the turn broke after it had noted these
        cache.remove(live)
        assert cache.room == 10, number
    cache.add(instance("b", 100))
    assert cache.is_full


def test_a_stranger_changes_nothing(cache):
    cache.add(instance("a", 40))
    stranger = instance("b", 40)
    cache.used(stranger, 1, 100)
    cache.remove(stranger)

    assert cache.room == 9
