"""The live cache counts the instances that it holds, also when one replaces another."""

import asyncio
from types import SimpleNamespace

import pytest

from perdure.runtime.instances import LiveCache, LockReleaser


def instance(instance_id, events):
    return SimpleNamespace(
        instance_id=instance_id,
        execution=SimpleNamespace(event_count=events),
        counted_events=0,
        used_at_ms=0,
        busy=False,
        inbox=[],
        close=lambda _ending: None,
    )


@pytest.fixture
def cache():
    async def make():
        return LiveCache(instances_max=10, events_max=100, enqueue_completion=print)

    return asyncio.run(make())


def test_an_instance_that_replaces_another_is_counted_alone(cache):
    stale, fresh = instance("a", 90), instance("a", 95)
    cache.add(stale)
    cache.add(fresh)
    cache.used(stale, 5, 50)
    cache.forget(stale)

    assert cache.get("a") is fresh
    assert cache.room == 9
    cache.used(fresh, 6, 5)
    assert cache.room == 0
    cache.forget(fresh)
    assert cache.room == 10


def test_events_of_a_failed_turn_are_not_subtracted(cache):
    for number in range(30):
        live = instance("a", 60)
        cache.add(live)
        live.execution.event_count += 10  # the turn failed after it had recorded these
        cache.forget(live)
        assert cache.room == 10, number
    cache.add(instance("b", 100))
    assert cache.room == 0


def test_an_instance_that_is_not_in_the_cache_changes_nothing(cache):
    cache.add(instance("a", 40))
    other = instance("b", 40)
    cache.used(other, 1, 100)
    cache.forget(other)

    assert cache.room == 9


def test_the_events_of_turns_are_given_back_when_the_instance_leaves(cache):
    live = instance("a", 40)
    cache.add(live)
    cache.used(live, 1, 60)
    assert cache.room == 0
    cache.forget(live)
    cache.add(instance("b", 99))

    assert cache.room == 9


def test_an_instance_is_idle_since_its_last_turn(cache):
    for number, name in enumerate("abc"):
        live = instance(name, 1)
        cache.add(live)
        cache.used(live, number, 1)
    cache.used(cache.get("a"), 5, 1)

    assert [live.instance_id for live in cache.idle_since(1)] == ["b"]
    assert [live.instance_id for live in cache.idle_since(5)] == ["b", "c", "a"]
    assert cache.oldest_idle() is cache.get("b")


def test_the_errors_of_the_last_instances_are_remembered_and_no_more():
    async def forgotten(*_: object, **__: object) -> None: ...

    worker = SimpleNamespace(
        provider=SimpleNamespace(abandon_orchestration_item=forgotten),
        codec=None,
        clock=None,
        observer=None,
    )
    background = SimpleNamespace(spawn_logged=lambda coroutine: coroutine.close())
    releaser = LockReleaser(worker, background)
    for number in range(1000):
        releaser.fail(str(number), "token", ValueError(number))

    assert list(releaser._errors) == [str(number) for number in range(1000 - 256, 1000)]
