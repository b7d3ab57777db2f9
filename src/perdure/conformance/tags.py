"""Tags and names route work items to the workers that can run them."""

from __future__ import annotations

from perdure.conformance.factories import (
    activity,
    create,
    enqueue_work,
    fetch_work,
    take_work,
)
from perdure.conformance.harness import Store, checks
from perdure.providers.records import TagFilter


async def enqueue_tagged(store: Store, *tags: str | None) -> None:
    """One item for each, in order; activity ids from 1 tell them apart."""
    for number, tag in enumerate(tags, start=1):
        await enqueue_work(store, activity("x", activity_id=number, tag=tag))


async def drained(store: Store, tags: TagFilter | None) -> list[int]:
    """Activity ids of everything that the filter takes now, in order; they stay locked."""
    taken: list[int] = []
    while (item := await fetch_work(store, tags=tags)) is not None:
        taken.append(item.identity.activity_id)
    return taken


@checks
class TestTags:
    verbs = ("fetch_work_item", "enqueue_for_worker")

    async def test_the_default_takes_only_untagged_items(self, store: Store) -> None:
        await enqueue_tagged(store, None, "gpu", None, "cpu", None)

        assert await drained(store, TagFilter.default_only()) == [1, 3, 5]

    async def test_one_tag_takes_only_its_items(self, store: Store) -> None:
        await enqueue_tagged(store, None, "gpu", "cpu", "gpu")

        assert await drained(store, TagFilter.only("gpu")) == [2, 4]

    async def test_the_default_and_a_tag_take_both(self, store: Store) -> None:
        await enqueue_tagged(store, "cpu", None, "gpu", None)

        assert await drained(store, TagFilter.default_and("gpu")) == [2, 3, 4]

    async def test_no_tags_take_nothing(self, store: Store) -> None:
        await enqueue_tagged(store, None, "gpu")

        assert await drained(store, TagFilter.none()) == []

    async def test_several_tags_take_each_of_theirs(self, store: Store) -> None:
        await enqueue_tagged(store, "gpu", None, "cpu", "tpu", "gpu")

        assert await drained(store, TagFilter.only("gpu", "tpu")) == [1, 4, 5]

    async def test_the_tag_comes_back_with_the_item(self, store: Store) -> None:
        await enqueue_tagged(store, "gpu", None)

        assert (await take_work(store, tags=TagFilter.any())).tag == "gpu"
        assert (await take_work(store, tags=TagFilter.any())).tag is None

    async def test_any_takes_everything(self, store: Store) -> None:
        await enqueue_tagged(store, None, "gpu", "cpu")

        assert await drained(store, TagFilter.any()) == [1, 2, 3]

    async def test_the_tag_survives_an_abandoned_attempt(self, store: Store) -> None:
        await enqueue_tagged(store, "gpu")
        first = await take_work(store, tags=TagFilter.only("gpu"))
        await store.provider.abandon_work_item(first.lock_token)

        assert await fetch_work(store) is None
        again = await take_work(store, tags=TagFilter.only("gpu"))
        assert (again.tag, again.attempt_count) == ("gpu", 2)
        assert again.lock_token != first.lock_token

    async def test_workers_with_different_tags_share_a_queue(self, store: Store) -> None:
        await enqueue_tagged(store, None, "gpu", "cpu", "gpu", None, "tpu")

        taken = [
            (await take_work(store, tags=tags)).identity.activity_id
            for tags in (
                TagFilter.only("gpu"),
                TagFilter.default_and("gpu"),
                TagFilter.only("gpu", "cpu"),
                TagFilter.any(),
                TagFilter.default_only(),
                TagFilter.any(),
            )
        ]

        assert taken == [2, 1, 3, 4, 5, 6]
        assert await drained(store, TagFilter.any()) == []

    async def test_tags_come_through_a_turn(self, store: Store) -> None:
        await create(
            store,
            "x",
            worker_items=(
                activity("x", activity_id=2, tag="gpu"),
                activity("x", activity_id=3),
            ),
        )

        assert await drained(store, None) == [3]
        assert await drained(store, TagFilter.only("gpu")) == [2]

    async def test_tags_match_exactly(self, store: Store) -> None:
        await enqueue_tagged(store, "GPU", "gpu ", "gp", "gpu%", "g_u", "gpu")

        assert await drained(store, TagFilter.only("gpu")) == [6]
        assert await drained(store, TagFilter.only("g_u", "gpu%")) == [4, 5]

    async def test_five_tags_fit_into_a_filter(self, store: Store) -> None:
        await enqueue_tagged(store, "a", "b", "c", "d", "e", "f")

        assert await drained(store, TagFilter.only("a", "b", "c", "d", "e")) == [1, 2, 3, 4, 5]


@checks
class TestActivityNames:
    """A worker is never given an activity that it has no code for."""

    verbs = ("fetch_work_item",)

    async def test_only_known_names_are_taken(self, store: Store) -> None:
        for number, name in enumerate(("mail", "print", "mail"), start=1):
            await enqueue_work(store, activity("x", activity_id=number, name=name))

        item = await take_work(store, activities=frozenset({"print", "other"}))

        assert (item.identity.activity_id, item.name) == (2, "print")
        assert await fetch_work(store, activities=frozenset({"print"})) is None

    async def test_no_names_at_all_take_nothing(self, store: Store) -> None:
        await enqueue_work(store, activity("x"))

        assert await fetch_work(store, activities=frozenset()) is None

    async def test_a_skipped_item_keeps_its_attempts_and_its_place(self, store: Store) -> None:
        await enqueue_work(store, activity("x", activity_id=1, name="mail"))
        await enqueue_work(store, activity("x", activity_id=2, name="print"))
        await fetch_work(store, activities=frozenset({"other"}))
        await fetch_work(store, tags=TagFilter.only("gpu"))

        item = await take_work(store)

        assert (item.identity.activity_id, item.attempt_count) == (1, 1)

    async def test_hundreds_of_unfit_items_do_not_hide_the_oldest_that_fits(
        self, store: Store
    ) -> None:
        others = tuple(activity("x", activity_id=each, name="other") for each in range(1, 301))
        mine = (
            activity("x", activity_id=301, name="b"),
            activity("x", activity_id=302, name="a", tag="gpu"),
            activity("x", activity_id=303, name="a"),
        )
        await create(store, "x", worker_items=others + mine)
        known = frozenset({"a", "b", "c"})

        taken = [(await take_work(store, activities=known)).identity.activity_id for _ in "12"]

        assert taken == [301, 303]
        assert await fetch_work(store, activities=known) is None

    async def test_hundreds_of_names_are_no_trouble(self, store: Store) -> None:
        await enqueue_work(store, activity("x", name="name-499"))

        item = await take_work(
            store, activities=frozenset(f"name-{number}" for number in range(500))
        )

        assert item.name == "name-499"
