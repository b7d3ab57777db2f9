"""A turn from what it takes in to its way into the store, and whoever waits for it."""

from __future__ import annotations

import asyncio

import msgspec

from perdure.client.view import Finished
from perdure.engine.outcome import TurnOutcome
from perdure.model import work
from perdure.model.status import Status
from perdure.providers.items import Claim, TurnCommit
from perdure.runtime.live import Arrival, LiveInstance
from perdure.runtime.retrying import Backoff


class Created(asyncio.Future[Finished | None]):
    """A start that waits for its first commit; then gives what the instance's end will resolve.

    One object for each, because thousands of them may wait, and the garbage collector walks over
    all of them. None: it did not begin here, and may be enqueued.
    """

    __slots__ = ("item",)

    def __init__(self, item: work.StartOrchestration, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.item = item


class TakenIn:
    """What a turn takes in, by whom it concerns."""

    __slots__ = ("arrivals", "consumed", "items", "settled_work", "starts")

    def __init__(self, arrivals: list[Arrival]) -> None:
        self.arrivals = arrivals
        self.items: list[work.OrchestratorItem] = []
        """For the execution; but for starts, which are what made it."""
        self.starts: list[work.StartOrchestration | work.ContinueAsNew] = []
        self.consumed: list[int] = []
        """Ids of messages in the orchestrator queue."""
        self.settled_work: list[str] = []
        """Tokens of activities that ran here."""
        for arrival in arrivals:
            item = arrival.item
            if isinstance(item, (work.StartOrchestration, work.ContinueAsNew)):
                self.starts.append(item)
            else:
                self.items.append(item)
            if arrival.message_id is not None:
                self.consumed.append(arrival.message_id)
            if arrival.work_token is not None:
                self.settled_work.append(arrival.work_token)


class Turn(msgspec.Struct, gc=False):
    """A turn between its computation and its commit."""

    live: LiveInstance
    taken: TakenIn
    outcome: TurnOutcome
    commit: TurnCommit
    claimed: list[tuple[work.ActivityExecute, Claim]]
    final: tuple[Status, str] | None
    created: Created | None
    """Whoever waits for the first commit of a new instance."""
    computed_at_ms: int
    backoff: Backoff | None = None
    """Set when the commit has to be repeated."""
