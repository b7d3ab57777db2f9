"""Dispatchers fetch only what they can run: by pinned framework version and by handler."""

from __future__ import annotations

from perdure.conformance.factories import (
    LOCK_MS,
    create,
    enqueue,
    fetch,
    next_execution,
    raised,
    start,
    take,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.providers.records import ExecutionMetadata, OrchestrationFilter, Version, VersionRange


def versions(*ranges: tuple[Version, Version]) -> OrchestrationFilter:
    return OrchestrationFilter(
        framework_versions=tuple(
            VersionRange(minimum=minimum, maximum=maximum) for minimum, maximum in ranges
        )
    )


def handlers(*pairs: tuple[str, str]) -> OrchestrationFilter:
    return OrchestrationFilter(handlers=frozenset(pairs))


MANY = 300
"""More instances than a store looks at before it searches by name."""

ONE = versions(((1, 0, 0), (1, 999, 999)))
TWO = versions(((2, 0, 0), (2, 999, 999)))


async def pinned(store: Store, instance: str, version: Version | None) -> None:
    """A running instance pinned to the version, with a message waiting."""
    await create(store, instance, framework_version=version)
    await enqueue(store, raised(instance))


@checks
class TestFrameworkVersions:
    verbs = ("fetch_orchestration_item", "ack_orchestration_item")

    async def test_no_filter_takes_any_version(self, store: Store) -> None:
        await pinned(store, "x", (9, 9, 9))

        assert await fetch(store) is not None

    async def test_a_range_that_contains_the_version_takes_it(self, store: Store) -> None:
        await pinned(store, "x", (1, 2, 3))

        assert await fetch(store, filter=ONE) is not None

    async def test_a_range_that_does_not_contain_it_takes_nothing(self, store: Store) -> None:
        await pinned(store, "x", (1, 2, 3))

        assert await fetch(store, filter=TWO) is None

    async def test_each_range_takes_its_own_instance(self, store: Store) -> None:
        await pinned(store, "old", (1, 0, 0))
        await pinned(store, "new", (2, 0, 0))

        await take(store, "new", filter=TWO)
        await take(store, "old", filter=ONE)

    async def test_an_instance_that_was_skipped_is_not_locked(self, store: Store) -> None:
        await pinned(store, "x", (1, 0, 0))
        assert await fetch(store, filter=TWO) is None

        fetched = await take(store, "x", filter=ONE)

        assert fetched.attempt_count == 1

    async def test_an_execution_that_is_not_pinned_always_fits(self, store: Store) -> None:
        await pinned(store, "x", None)

        await take(store, "x", filter=TWO)

    async def test_both_ends_of_a_range_are_included(self, store: Store) -> None:
        edges = versions(((1, 2, 0), (1, 4, 7)))
        for number, version in enumerate(((1, 2, 0), (1, 4, 7))):
            await pinned(store, f"in-{number}", version)
            await take(store, f"in-{number}", filter=edges)
        for number, version in enumerate(((1, 1, 999_999), (1, 4, 8))):
            await pinned(store, f"out-{number}", version)
            assert await fetch(store, filter=edges) is None
            await take(store, f"out-{number}")

    async def test_the_version_of_the_metadata_is_stored(self, store: Store) -> None:
        await pinned(store, "x", (3, 1, 4))
        exactly = versions(((3, 1, 4), (3, 1, 4)))

        assert await fetch(store, filter=versions(((3, 1, 5), (9, 0, 0)))) is None
        await take(store, "x", filter=exactly)

    async def test_an_ack_without_a_version_leaves_it_in_force(self, store: Store) -> None:
        await pinned(store, "x", (1, 0, 0))
        await turn(store, "x", metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"))
        await enqueue(store, raised("x"))

        assert await fetch(store, filter=TWO) is None
        await take(store, "x", filter=ONE)

    async def test_the_next_execution_has_its_own_version(self, store: Store) -> None:
        await create(store, "x", framework_version=(1, 0, 0))
        await next_execution(store, "x", 2, framework_version=(2, 0, 0))
        await enqueue(store, raised("x"))

        assert await fetch(store, filter=ONE) is None
        await take(store, "x", filter=TWO)

    async def test_no_range_at_all_takes_nothing(self, store: Store) -> None:
        await pinned(store, "pinned", (1, 0, 0))
        await enqueue(store, start("fresh"))

        assert await fetch(store, filter=versions()) is None

        assert (await take(store)).attempt_count == 1

    async def test_a_filtered_fetch_locks_like_any_other(self, store: Store) -> None:
        await pinned(store, "x", (1, 0, 0))

        await take(store, "x", filter=ONE)

        assert await fetch(store, filter=ONE) is None

    async def test_a_version_may_be_given_later(self, store: Store) -> None:
        await create(store, "x")
        await turn(store, "x", metadata=ExecutionMetadata(framework_version=(1, 0, 0)))
        await enqueue(store, raised("x"))

        assert await fetch(store, filter=TWO) is None
        await take(store, "x", filter=ONE)

    async def test_a_later_version_overwrites(self, store: Store) -> None:
        await create(store, "x", framework_version=(1, 0, 0))
        await turn(store, "x", metadata=ExecutionMetadata(framework_version=(2, 0, 0)))
        await enqueue(store, raised("x"))

        assert await fetch(store, filter=ONE) is None
        await take(store, "x", filter=TWO)

    async def test_every_range_counts(self, store: Store) -> None:
        both = versions(((1, 0, 0), (1, 999, 999)), ((3, 0, 0), (3, 999, 999)))
        for instance, version in (("a", (1, 5, 0)), ("b", (2, 5, 0)), ("c", (3, 5, 0))):
            await pinned(store, instance, version)

        await take(store, "a", filter=both)
        await take(store, "c", filter=both)

        assert await fetch(store, filter=both) is None
        await take(store, "b")

    async def test_versions_compare_by_their_parts(self, store: Store) -> None:
        # Packed into one number with three digits a part, 0.2000.0 would lie past 1.0.0.
        await pinned(store, "x", (0, 2_000, 5_000))

        assert await fetch(store, filter=versions(((1, 0, 0), (9, 0, 0)))) is None
        assert await fetch(store, filter=versions(((0, 2_005, 0), (0, 2_005, 0)))) is None
        await take(store, "x", filter=versions(((0, 1_999, 9_999), (0, 2_001, 0))))

    async def test_an_excluded_instance_does_not_hide_the_next(self, store: Store) -> None:
        for number in range(5):
            await pinned(store, f"old-{number}", (1, 0, 0))
        await pinned(store, "new", (2, 0, 0))

        await take(store, "new", filter=TWO)

    async def test_many_excluded_instances_do_not_hide_the_next(self, store: Store) -> None:
        for number in range(60):
            await create(store, f"old-{number}", framework_version=(1, 0, 0))
        await store.provider.enqueue_many_for_orchestrator(
            [raised(f"old-{number}") for number in range(60)]
        )
        await pinned(store, "new", (2, 0, 0))

        await take(store, "new", filter=TWO)

    @requires("admin")
    async def test_the_version_is_shown_with_its_execution(self, store: Store) -> None:
        await create(store, "x", framework_version=(1, 2, 3))

        assert (await store.admin.get_execution_info("x", 1)).framework_version == (1, 2, 3)


@checks
class TestHandlers:
    """A dispatcher is never given an orchestration that it has no code for."""

    verbs = ("fetch_orchestration_item",)

    async def test_only_registered_pairs_are_taken(self, store: Store) -> None:
        await create(store, "x", name="Shop", version="1.0.0")
        await enqueue(store, raised("x"))

        for pair in (("Shop", "2.0.0"), ("shop", "1.0.0"), ("Mail", "1.0.0")):
            assert await fetch(store, filter=handlers(pair)) is None
        fetched = await take(store, "x", filter=handlers(("Mail", "1.0.0"), ("Shop", "1.0.0")))
        assert fetched.attempt_count == 1

    async def test_no_handlers_at_all_take_nothing(self, store: Store) -> None:
        await enqueue(store, start("x"))

        assert await fetch(store, filter=handlers()) is None

    async def test_a_start_is_matched_by_what_it_asks_for(self, store: Store) -> None:
        await enqueue(store, start("x", "Shop", "2.0.0"))

        assert await fetch(store, filter=handlers(("Shop", "1.0.0"))) is None
        await take(store, "x", filter=handlers(("Shop", "2.0.0")))

    async def test_a_start_without_version_fits_by_name(self, store: Store) -> None:
        await enqueue(store, start("x", "Shop", None))

        assert await fetch(store, filter=handlers(("Mail", "1.0.0"))) is None
        await take(store, "x", filter=handlers(("Shop", "7.0.0")))

    async def test_a_turn_decides_which_version_takes_the_next(self, store: Store) -> None:
        await create(store, "x", name="Shop", version="1.0.0")
        await turn(store, "x", metadata=ExecutionMetadata(name="Shop", version="2.0.0"))
        await enqueue(store, raised("x"))

        assert await fetch(store, filter=handlers(("Shop", "1.0.0"))) is None
        await take(store, "x", filter=handlers(("Shop", "2.0.0")))

    async def test_a_turn_may_leave_the_next_to_any_version(self, store: Store) -> None:
        await create(store, "x", name="Shop", version="1.0.0")
        await turn(store, "x", metadata=ExecutionMetadata(name="Shop"))
        await enqueue(store, raised("x"))

        assert await fetch(store, filter=handlers(("Mail", "1.0.0"))) is None
        await take(store, "x", filter=handlers(("Shop", "7.0.0")))

    async def test_both_parts_of_a_filter_must_fit(self, store: Store) -> None:
        await create(store, "x", name="Shop", version="1.0.0", framework_version=(1, 0, 0))
        await enqueue(store, raised("x"))
        shop = frozenset({("Shop", "1.0.0")})

        wrong_version = OrchestrationFilter(
            handlers=shop, framework_versions=TWO.framework_versions
        )
        assert await fetch(store, filter=wrong_version) is None
        both = OrchestrationFilter(handlers=shop, framework_versions=ONE.framework_versions)
        await take(store, "x", filter=both)

    async def test_names_with_separators_are_not_confused(self, store: Store) -> None:
        # "a@b" version "c" must not look like "a" version "b@c", however a store joins them.
        for number, (joined, name, version) in enumerate(
            (("@", "a@b", "c"), ("/", "a/b", "c"), (":", "a:b", "c"), (" ", "a b", "c"))
        ):
            await create(store, f"x-{number}", name=name, version=version)
            await enqueue(store, raised(f"x-{number}"))
            confused = handlers(("a", f"b{joined}c"))
            assert await fetch(store, filter=confused) is None
            fetched = await take(store, f"x-{number}", filter=handlers((name, version)))
            await store.provider.abandon_orchestration_item(fetched.lock_token, 3_600_000)

    async def test_an_unfit_instance_does_not_hide_the_next(self, store: Store) -> None:
        for number in range(5):
            await enqueue(store, start(f"other-{number}", "Other"))
        await enqueue(store, start("mine", "Mine"))

        await take(store, "mine", filter=handlers(("Mine", "1.0.0")))
        assert await fetch(store, filter=handlers(("Mine", "1.0.0"))) is None

    async def test_hundreds_of_unfit_instances_do_not_hide_the_oldest_that_fits(
        self, store: Store
    ) -> None:
        await store.provider.enqueue_many_for_orchestrator(
            [start(f"other-{number}", "Other") for number in range(MANY)]
        )
        await enqueue(store, start("old", "Mine", "0.9.0"), start("x-2", "Mine"))
        await enqueue(store, start("x-1", "Mine"), start("x-0", "Yours", None))
        mine = handlers(("Mine", "1.0.0"), ("Yours", "2.0.0"), ("Theirs", "1.0.0"))

        for instance in ("x-2", "x-1", "x-0"):
            await take(store, instance, filter=mine)
        assert await fetch(store, filter=mine) is None

    async def test_hundreds_of_unfit_instances_do_not_hide_one_without_a_name(
        self, store: Store
    ) -> None:
        await store.provider.enqueue_many_for_orchestrator(
            [start(f"other-{number}", "Other") for number in range(MANY)]
        )
        # Of two starts of one id, the first that is visible decides.
        await enqueue(store, start("mine", "Mine"))
        await store.provider.enqueue_for_orchestrator(start("mine", "Yours"), delay_ms=LOCK_MS)

        assert await fetch(store, filter=handlers(("Yours", "1.0.0"))) is None
        await take(store, "mine", filter=handlers(("Mine", "1.0.0")))
