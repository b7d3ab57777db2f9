"""The proof: every instance ended as planned, and no result of an activity was observed twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from examples.demo import shop

from perdure.model import events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from examples.demo.plan import Case

    from perdure import Client


@dataclass
class Audit:
    instances: int = 0
    activities: int = 0
    """Results that orchestrations saw."""
    retried: int = 0
    effects: int = 0
    """Lines in the ledger: what activities did to the outside world."""
    repeated: int = 0
    """Effects that happened again because the first run's result was never committed."""
    problems: list[str] = field(default_factory=list)


async def audit(client: Client, cases: Iterable[Case]) -> Audit:
    found = Audit()
    for case in cases:
        status = await client.describe(case.id)
        if status.output != case.expected:
            found.problems.append(
                f"{case.id}: {status.status} {status.output!r}, expected {case.expected!r}"
            )
    async for status in client.admin.instances():
        found.instances += 1
        _check_history(found, status.id, await client.history(status.id))
    _check_ledger(found)
    return found


def _check_history(found: Audit, instance_id: str, history: list[events.Event]) -> None:
    asked = {e.event_id for e in history if isinstance(e, events.ActivityScheduled)}
    results = [
        e for e in history if isinstance(e, (events.ActivityCompleted, events.ActivityFailed))
    ]
    seen = Counter(event.source_event_id for event in results)
    found.activities += len(results)
    found.retried += sum(
        isinstance(event, events.ActivityCompleted) and event.attempts > 1 for event in results
    )
    twice = [source for source, times in seen.items() if times > 1]
    never = asked - set(seen)
    if twice:
        found.problems.append(f"{instance_id}: results of {twice} were observed twice")
    if never:
        found.problems.append(f"{instance_id}: activities {sorted(never)} have no result")


def _check_ledger(found: Audit) -> None:
    """The outside world: an order that was undone is not charged; what was reserved is released."""
    lines = shop.LEDGER.read_text(encoding="utf-8").splitlines()
    effects = Counter(lines)
    found.effects = len(effects)
    found.repeated = len(lines) - len(effects)
    done: dict[str, set[str]] = {}
    for line in effects:
        verb, order, _, _ = [*line.split(" "), "", ""][:4]
        done.setdefault(order, set()).add(verb)
    for order, verbs in done.items():
        if "released" in verbs and verbs & {"charged", "labelled", "handed-over"}:
            found.problems.append(f"{order} was undone and yet {sorted(verbs)}")
        if "labelled" in verbs and not {"charged", "handed-over"} <= verbs:
            found.problems.append(f"{order} was labelled and only {sorted(verbs)}")
