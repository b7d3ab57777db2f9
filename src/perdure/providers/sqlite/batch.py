"""Verbs, the operations that callers ask for, and running those that share a transaction.

A verb is an object, so that a search for it finds all its users. It is defined beside the function
that it runs, for example in ``commit``::

    ACK_TURN = Verb("ack_orchestration_item", run=ack, run_many=ack_many)

- The provider passes it on: ``store.write(ACK_TURN, lock_token, commit)``.
- The store makes an ``Entry`` of the verb and its arguments.
- The writer calls ``verb.run(transaction, *args)`` for an entry by itself. Several entries of one
  transaction go to ``run_together``, which calls ``verb.run_many`` for consecutive entries of the
  same verb.
- The outcomes of a commit go back to the event loop in a ``Delivery``.

``Verb.run`` defines what is right. ``Verb.run_many`` does the same for several calls with fewer
statements, see ``commit`` for turns.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import apsw

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from perdure.providers.sqlite.transaction import Transaction
    from perdure.providers.waiting import Poll

TOGETHER_MIN: Final = 2
"""Run this many consecutive calls of a verb together; fewer one by one."""


class Verb:
    """An operation that runs inside a transaction or, if it only reads, inside a snapshot."""

    __slots__ = ("alone", "name", "run", "run_many")

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        run_many: Callable[[Any, Sequence[Any]], Sequence[Any]] | None = None,
        alone: bool = False,
    ) -> None:
        self.name = name
        """Name of the verb in the contract; errors carry it."""
        self.run = run
        """Takes a transaction (or snapshot) and the arguments of one call, returns its answer."""
        self.run_many = run_many
        """Takes a transaction and the arguments of several calls, each as a tuple, in order.

        Returns the answers of the first of them, as many as could be run together, perhaps none;
        an exception in the place of an answer is the error of that call. Raises
        ``PreconditionChanged`` if the calls have to be run one by one instead.
        """
        self.alone = alone
        """True: each call has a transaction of its own."""

    def __repr__(self) -> str:
        return f"Verb({self.name!r})"


class Entry:
    """An accepted operation and the future that waits for it."""

    __slots__ = ("args", "future", "is_query", "is_small", "poll", "raw", "verb")

    def __init__(
        self,
        future: asyncio.Future[Any],
        verb: Verb,
        args: tuple[Any, ...],
        is_small: bool = False,
        poll: Poll | None = None,
        raw: bool = False,
        is_query: bool = False,
    ) -> None:
        self.future = future
        self.verb = verb
        self.args = args
        self.is_small = is_small
        """Its statements take less time than a hop to another thread."""
        self.poll = poll
        """Waits before the operation is tried again; None: it is tried once."""
        self.raw = raw
        """``NoWork`` is handed on as it is: the caller is such a wait."""
        self.is_query = is_query
        """It only reads, so it need not fail with a commit that it shares with others."""


Outcome: TypeAlias = tuple[Entry, Any, BaseException | None]
"""An operation with its answer or its error."""


class Delivery:
    """The outcomes of one commit, or of a look at the file, for the event loop."""

    __slots__ = (
        "changed_instances",
        "dead_holders",
        "foreign",
        "outcomes",
        "turns_changed",
        "work_changed",
    )

    def __init__(self, *, foreign: bool = False, dead_holders: Sequence[str] = ()) -> None:
        self.outcomes: list[Outcome] = []
        self.turns_changed = False
        self.work_changed = False
        self.changed_instances: list[str] = []
        self.foreign = foreign
        """Another process has written: anything may have changed."""
        self.dead_holders = dead_holders
        """Processes that have died; their locks can be released."""


class PreconditionChanged(Exception):
    """Calls that share a transaction cannot be written: roll back and run them one by one.

    Raised when a statement touches other rows than those that were read before, or when one of the
    calls is refused after the writing began.
    """


def run_together(
    tx: Transaction, entries: Iterable[Entry], run_one: Callable[[Entry], Outcome]
) -> list[Outcome]:
    """Run operations in an order that is as good as theirs, and return their outcomes.

    Errors: PreconditionChanged, apsw.Error; then nothing of it may be committed.
    """
    outcomes: list[Outcome] = []
    for verb, group in groupby(entries, attrgetter("verb")):
        rest = list(group)
        while rest:
            answers: Any = ()
            if verb.run_many is not None and len(rest) >= TOGETHER_MIN:
                answers = _run_many(verb, tx, rest)
            if answers:
                outcomes += map(_outcome, rest, answers)
                del rest[: len(answers)]
            else:
                outcomes.append(run_one(rest.pop(0)))
    return outcomes


def _run_many(verb: Verb, tx: Transaction, entries: Sequence[Entry]) -> Sequence[Any]:
    assert verb.run_many is not None
    try:
        return verb.run_many(tx, [entry.args for entry in entries])
    except Exception as error:
        if isinstance(error, apsw.Error) and not isinstance(error, apsw.ConstraintError):
            raise
        raise PreconditionChanged from error


def _outcome(entry: Entry, answer: Any) -> Outcome:
    if isinstance(answer, Exception):
        return entry, None, answer
    return entry, answer, None
