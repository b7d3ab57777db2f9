"""JSON texts inside JSON documents: shown as JSON, and given back to the letter."""

from __future__ import annotations

import msgspec
import pytest

from perdure.providers.documents import NO_JSON, embed, extract


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


def test_a_text_that_is_too_deep_inside_a_document_stays_a_text():
    limit = next(n for n in range(400, 100_000, 100) if not _can_be_read("[" * n + "]" * n))
    text = "[" * (limit - 110) + "]" * (limit - 110)
    near = "[" * (limit - 10) + "]" * (limit - 10)

    assert embed(text) == (msgspec.Raw(text.encode()), None)
    assert _is_shown(near) is _can_be_read("[" * 64 + near + "]" * 64)


def _is_shown(text):
    return embed(text)[0] != NO_JSON


def _can_be_read(text):
    try:
        msgspec.json.format(text, indent=-1)
    except RecursionError:
        return False
    return True
