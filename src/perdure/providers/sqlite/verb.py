"""Verbs: the operations of a store as objects, so that a search for a verb finds all its users.

A verb is defined beside the function that it runs, for example in ``commit``::

    ACK_TURN = Verb("ack_orchestration_item", run=ack, run_many=ack_many)

- The provider passes it on: ``store.write(ACK_TURN, lock_token, commit)``.
- The store makes an ``Entry`` of the verb and its arguments.
- The committer calls ``verb.run(transaction, *args)`` for an entry by itself, or hands the entries
  of one transaction to ``batch.run``, which calls ``verb.run_many`` for consecutive entries of the
  same verb.
- The outcomes of a commit go back to the event loop in a ``Delivery``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from perdure.providers.waiting import Poll


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
        ``batch.PreconditionChanged`` if the calls have to be run one by one instead.
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
        *,
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
        """``Nothing`` is handed on as it is: the caller is such a wait."""
        self.is_query = is_query
        """It only reads, so it need not fail with a commit that it shares with others."""


Outcome: TypeAlias = tuple[Entry, Any, BaseException | None]
"""An operation with its answer or its error."""


class Delivery:
    """The outcomes of one commit, or of a look at the file, for the event loop."""

    __slots__ = ("changed_instances", "foreign", "outcomes", "turns_changed", "work_changed")

    def __init__(self, *, foreign: bool = False) -> None:
        self.outcomes: list[Outcome] = []
        self.turns_changed = False
        self.work_changed = False
        self.changed_instances: list[str] = []
        self.foreign = foreign
        """Another process has written: anything may have changed."""
