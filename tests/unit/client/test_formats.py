"""Lengths of time, as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.arguments import parse_duration_ms
from perdure.client.formats import (
    counted,
    iso_time,
    parse_moment,
    shown_age,
    shown_duration,
    utc_time,
)
from perdure.errors import InvalidValue

DAY = 86_400_000


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("500ms", 500),
        ("90", 90_000),
        ("1.5", 1500),
        ("30s", 30_000),
        ("5m", 300_000),
        ("2h30m", 9_000_000),
        ("2h 30m", 9_000_000),
        ("1.5d", DAY * 3 // 2),
        ("2W", 14 * DAY),
        ("0s", 0),
    ],
)
def test_a_length_is_read(text, milliseconds):
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-5m", "5 minutes", "5x", "m5", "1e3s", "nan", "9" * 30]
)
def test_what_is_no_length_is_refused(text):
    with pytest.raises(InvalidValue):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (-5, "0s"),
        (0, "0ms"),
        (212, "212ms"),
        (3200, "3.2s"),
        (3000, "3s"),
        (59_999, "60s"),
        (60_000, "1m"),
        (124_000, "2m 04s"),
        (3_600_000, "1h"),
        (8_040_000, "2h 14m"),
        (DAY * 3 + 2 * 3_600_000, "3d 02h"),
        (DAY * 400, "400d"),
    ],
)
def test_a_length_is_shown_with_at_most_two_units(milliseconds, text):
    assert shown_duration(milliseconds) == text


@given(st.integers(min_value=0, max_value=DAY * 10_000))
def test_what_is_shown_can_be_read_and_is_near(milliseconds):
    read = parse_duration_ms(shown_duration(milliseconds))

    assert abs(read - milliseconds) <= max(500, milliseconds * 0.05)


def test_an_age_has_one_unit():
    assert [shown_age(ms) for ms in (10, 50_000, 150_000, 8_040_000, DAY * 3)] == [
        "0s",
        "50s",
        "2m",
        "2h",
        "3d",
    ]


def test_a_moment_is_an_age_or_a_date():
    now_ms = 1_700_000_000_000

    assert parse_moment("2h", now_ms) == utc_time(now_ms - 7_200_000)
    assert parse_moment("2023-11-14T22:13:20Z", now_ms) == utc_time(now_ms)
    with pytest.raises(InvalidValue, match="is no moment"):
        parse_moment("yesterday", now_ms)
    with pytest.raises(InvalidValue, match="no moment"):
        parse_moment("0001-01-01T00:00", now_ms)


def test_a_time_is_written_in_utc_with_milliseconds():
    assert iso_time(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"


def test_a_number_and_its_noun_agree():
    nouns = ("instance", "activity", "key")

    assert [counted(1, noun) for noun in nouns] == ["1 instance", "1 activity", "1 key"]
    assert [counted(2, noun) for noun in nouns] == ["2 instances", "2 activities", "2 keys"]
    assert counted(0, "history") == "0 histories"
