"""JSON texts inside JSON documents: shown as JSON, and given back to the letter."""

from __future__ import annotations

import msgspec
import pytest

from perdure.providers.record_documents import NO_JSON, embed, extract


@pytest.mark.parametrize("text", ['{"a":[1,2]}', '"x"', "null", "1.50", "[" * 60 + "]" * 60])
def test_json_without_spaces_is_shown_as_json(text):
    json, other = embed(text)

    assert (bytes(json).decode(), other) == (text, None)
    assert extract(json, other) == text


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "no json", "", "{", ' "x"'])
def test_a_text_that_would_not_come_back_unchanged_stays_a_text(text):
    json, other = embed(text)

    assert (json, other) == (NO_JSON, text)
    assert extract(json, other) == text


def test_no_text_is_neither():
    assert embed(None) == (NO_JSON, None)
    assert extract(NO_JSON, None) is None


def test_many_brackets_beside_each_other_are_shown():
    text = "[" + ",".join(["[]"] * 200) + "]"

    assert embed(text) == (msgspec.Raw(text.encode()), None)


def test_a_text_that_only_a_document_makes_too_deep_stays_a_text():
    least = next(n for n in range(65, 100_000) if embed(nested(n))[0] == NO_JSON)
    text = nested(least + 10)  # how deep is too deep depends on the calls above

    assert embed(text) == (NO_JSON, text)
    assert _can_be_read(text)


def nested(depth):
    return "[" * depth + "]" * depth


def _can_be_read(text):
    try:
        msgspec.json.format(text, indent=-1)
    except RecursionError:
        return False
    return True
