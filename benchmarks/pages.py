"""Renews the measured part of a page of the documentation, between two marks."""

from __future__ import annotations


def renew(page: str, name: str, text: str) -> str:
    """The page with ``text`` between ``<!-- name -->`` and ``<!-- end of name -->``."""
    return between(page, f"<!-- {name} -->", f"<!-- end of {name} -->", text)


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page with ``text`` between its two marks, and nothing else changed."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the page has no {begin} and {end}")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
