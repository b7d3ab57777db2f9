"""The filters of list, count and the bulk commands, as options and as a query."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, TypeVar

import click

from perdure.client.durations import parse_moment_ms
from perdure.client.search import QUALIFIERS, parse_search
from perdure.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perdure.client.search import Selection

F = TypeVar("F", bound="Callable[..., Any]")

_ONE_WORD = frozenset({"status", "version", "created", "completed"})
"""Qualifiers whose values have no spaces."""

_OPTIONS = (
    click.argument("words", metavar="[QUERY]...", nargs=-1),
    click.option("--query", metavar="QUERY", help="The same as the argument."),
    click.option(
        "--status",
        metavar="S,...",
        multiple=True,
        help="running, failed, blocked, open, ended, ...",
    ),
    click.option(
        "--name", metavar="NAME", multiple=True, help="Of the orchestration; order* fits several."
    ),
    click.option(
        "--search",
        metavar="TEXT",
        multiple=True,
        help="Occurs in id, name, output or custom status.",
    ),
    click.option(
        "--since", metavar="WHEN", help="Started within the last 1h, 7d, or after a date."
    ),
    click.option(
        "--until", metavar="WHEN", help="Started longer ago than 1h, 7d, or before a date."
    ),
    click.option(
        "--parent",
        metavar="ID",
        multiple=True,
        help="Children of that instance; none: no children.",
    ),
)


def filter_options(function: F) -> F:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def selection_of(filters: Mapping[str, Any], now_ms: int) -> Selection:
    """What the options of ``filter_options`` mean together."""
    words = [_query_of(word) for word in filters["words"]]
    words += [filters["query"]] if filters["query"] else []
    if filters["status"]:
        words.append(shlex.quote(f"status:{','.join(filters['status'])}"))
    for qualifier, option in (("name", "name"), ("text", "search"), ("parent", "parent")):
        words += [shlex.quote(f"{qualifier}:{value}") for value in filters[option]]
    selection = parse_search(" ".join(words), now_ms)
    bounds = {}
    for option, field in (("since", "created_after_ms"), ("until", "created_before_ms")):
        if filters[option]:
            if getattr(selection.query, field) is not None:
                raise InvalidValue(f"--{option} and created: say the same twice; put one of them")
            bounds[field] = parse_moment_ms(filters[option], now_ms)
    return selection.with_query(**bounds)


def _query_of(argument: str) -> str:
    """What the shell gave as one: several words of a query, or a phrase with its spaces."""
    first, *others = [word.partition(":") for word in argument.split()] or [("", "", "")]
    is_query = first[0] in _ONE_WORD or any(q in QUALIFIERS and colon for q, colon, _ in others)
    return shlex.quote(argument) if " " in argument and not is_query else argument
