"""Running the operations of one transaction: consecutive calls of one verb together.

``Verb.run`` defines what is right. ``Verb.run_many`` does the same for several calls with fewer
statements, see ``commit`` for turns.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from perdure.providers.sqlite.transaction import Transaction
    from perdure.providers.sqlite.verb import Entry, Outcome, Verb

TOGETHER_MIN = 2
"""Run this many consecutive calls of a verb together; fewer one by one."""


class PreconditionChanged(Exception):
    """Calls that were run together cannot be written: roll back and run them one by one.

    Raised when a statement touches other rows than those that were read before, or when one of the
    calls is refused after the writing began.
    """


def run(
    tx: Transaction, entries: Iterable[Entry], run_one: Callable[[Entry], Outcome]
) -> list[Outcome]:
    """Run operations in an order that is as good as theirs, and return their outcomes.

    Errors: PreconditionChanged; then nothing of it may be committed.
    """
    outcomes: list[Outcome] = []
    for verb, group in groupby(entries, _verb_of):
        rest = list(group)
        while rest:
            answers: Any = ()
            if verb.run_many is not None and len(rest) >= TOGETHER_MIN:
                answers = verb.run_many(tx, [entry.args for entry in rest])
            if answers:
                outcomes += map(_outcome, rest, answers)
                del rest[: len(answers)]
            else:
                outcomes.append(run_one(rest.pop(0)))
    return outcomes


def _verb_of(entry: Entry) -> Verb:
    return entry.verb


def _outcome(entry: Entry, answer: Any) -> Outcome:
    if isinstance(answer, Exception):
        return entry, None, answer
    return entry, answer, None
