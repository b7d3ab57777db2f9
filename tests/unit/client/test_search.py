"""The search text of people, as a query of the store and tests on each instance."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.client.formats import utc_time
from perdure.client.instance import OPEN
from perdure.client.search import count_names, parse_search, parse_statuses
from perdure.clock import ManualClock
from perdure.errors import InvalidValue
from perdure.model.status import Status
from perdure.model.wire import envelope
from perdure.model.work import StartOrchestration
from perdure.providers.records import InstanceQuery
from perdure.providers.sqlite.memory import InMemoryProvider

NOW = 1_700_000_000_000


def test_qualifiers_that_the_store_knows_go_into_its_query():
    selection = parse_search(
        "status:failed name:order version:2.0.0 id:ord-* parent:p-1 text:timeout", NOW
    )

    assert selection.query == InstanceQuery(
        statuses=frozenset({Status.FAILED}),
        name="order",
        version="2.0.0",
        id_prefix="ord-",
        parent_instance_id="p-1",
        text="timeout",
    )
    assert selection.tests == ()


def test_running_includes_an_instance_between_two_executions():
    assert parse_statuses("running") == {Status.RUNNING, Status.CONTINUED_AS_NEW}
    assert parse_statuses("open") == OPEN
    assert parse_statuses("Paused,BLOCKED") == {Status.PAUSED, Status.BLOCKED}


def test_two_statuses_must_both_fit():
    assert parse_search("status:open status:blocked,failed", NOW).query.statuses == {Status.BLOCKED}


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("created:<2h", "created_after", NOW - 7_200_000),
        ("created:>2h", "created_before", NOW - 7_200_000),
        ("completed:>30d", "completed_before", NOW - 30 * 86_400_000),
        ("created:>2023-11-14T22:13:20Z", "created_after", NOW),
        ("created:<2023-11-14T22:13:20Z", "created_before", NOW),
    ],
)
def test_an_age_grows_backwards_and_a_date_does_not(word, field, value):
    assert getattr(parse_search(word, NOW).query, field) == utc_time(value)


def test_words_without_a_qualifier_are_searched_for():
    selection = parse_search("'no answer' bank", NOW)

    assert selection.query.text == "no answer"
    assert len(selection.tests) == 1


def test_a_qualifier_with_an_equals_sign_is_not_searched_for():
    with pytest.raises(InvalidValue, match=r"write name:order\* with a colon.*text:'name=order\*'"):
        parse_search("name=order*", NOW)

    assert parse_search("a=b", NOW).query.text == "a=b"


def test_a_quoted_colon_is_searched_for_with_text():
    assert parse_search("text:'error: 42'", NOW).query.text == "error: 42"


@given(st.text())
def test_any_text_is_understood_or_refused_with_a_reason(text):
    reason = None
    try:
        parse_search(text, NOW)
    except InvalidValue as error:
        reason = str(error)

    assert reason != ""


async def store_of(*names):
    """An instance of each name, the oldest first."""
    clock = ManualClock(NOW)
    provider = InMemoryProvider(clock=clock)
    await provider.open()
    for number, name in enumerate(names):
        start = StartOrchestration(instance_id=f"i-{number}", name=name)
        await provider.enqueue_for_orchestrator(envelope(start))
        clock.advance(1)
    return provider


@given(limit=st.integers(1, 30), count=st.integers(0, 40))
def test_pages_of_a_tested_selection_give_each_instance_once(limit, count):
    async def main():
        provider = await store_of(*("odd" if number % 2 else "even" for number in range(count)))
        selection = parse_search("name:o*", NOW)
        found, cursor = [], None
        while True:
            page, cursor = await selection.page(provider.admin, cursor=cursor, limit=limit)
            assert len(page) <= limit
            found += [info.instance_id for info in page]
            if cursor is None:
                break
        counted = await selection.count(provider.admin)
        await provider.close()
        return found, counted

    found, counted = asyncio.run(main())

    assert sorted(found) == sorted(f"i-{number}" for number in range(1, count, 2))
    assert counted == len(found)


def ask(names, question):
    async def main():
        provider = await store_of(*names)
        answer = await question(provider.admin)
        await provider.close()
        return answer

    return asyncio.run(main())


MANY = ("import_feed",) * 3 + ("order",) * 700


@pytest.mark.parametrize(
    "names", [MANY, MANY[::-1], ("order",) * 700], ids=["old and rare", "new and rare", "one"]
)
def test_names_are_counted_exactly_wherever_they_lie(names):
    counted = ask(names, parse_search("", NOW).count_by_name)

    assert counted == dict(Counter(names).most_common())


def test_a_pattern_finds_what_lies_behind_the_newest_page():
    async def question(admin):
        return await parse_search("name:import_*", NOW).page(admin, limit=2)

    page, cursor = ask(MANY, question)

    assert [info.instance_id for info in page] == ["i-2", "i-1"]
    assert cursor is not None


def test_a_pattern_that_fits_several_names_finds_each_of_them():
    async def question(admin):
        selection = parse_search("name:import_*", NOW)
        return await selection.page(admin, limit=10), await selection.count(admin)

    names = (*("import_mail",) * 2, *("order",) * 700, "import_feed", "import_mail")
    (page, cursor), count = ask(names, question)

    assert [info.instance_id for info in page] == ["i-703", "i-702", "i-1", "i-0"]
    assert (cursor, count) == (None, 4)


def test_a_pattern_that_fits_no_name_finds_nothing():
    async def question(admin):
        selection = parse_search("name:nobody*", NOW)
        return await selection.page(admin, limit=5), await selection.count(admin)

    assert ask(("order",) * 700, question) == (([], None), 0)


def test_known_names_are_counted_without_reading_the_instances():
    async def question(admin):
        return await count_names(admin, InstanceQuery()), await count_names(
            admin, InstanceQuery(text="order")
        )

    assert ask(("order",) * 700, question) == ({"order": 700}, None)
