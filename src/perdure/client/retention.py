"""Find the instances that have ended and are no longer kept, by the rules of the live workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from perdure.client.admin import read_instances
from perdure.client.formats import utc_time
from perdure.providers.records import InstanceInfo, InstanceQuery, KeepRule, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from perdure.model.status import Status
    from perdure.providers.administration import ProviderAdmin

_PAGE_ITEMS: Final = 20
"""Few at a time: an instance is listed with its output, which may be large."""


def keep_rules(
    keep: Mapping[Status, int | None], own: Mapping[str, Mapping[Status, int | None]]
) -> tuple[KeepRule, ...]:
    """Return the rules of a runtime with this ``keep`` and of its orchestrations, by name."""
    rules = [KeepRule(status=status, kept_ms=kept) for status, kept in keep.items()]
    for name, by_status in own.items():
        rules += [KeepRule(status=each, kept_ms=by_status[each], name=name) for each in by_status]
    return tuple(rules)


class Retention:
    """The rules of one worker, for the orchestrations that are its own to delete."""

    def __init__(self, rules: Iterable[KeepRule], names: frozenset[str] | None = None) -> None:
        self.rules = tuple(rules)
        self._names = names
        """None: every orchestration."""
        self._kept = {(rule.name, rule.status): rule.kept_ms for rule in self.rules}

    def kept_ms(self, name: str, status: Status) -> int | None:
        """Return how long such a root is kept after its end; None if nothing deletes it."""
        if self._names is not None and name not in self._names:
            return None
        if (name, status) in self._kept:
            return self._kept[name, status]
        return self._kept.get((None, status))

    async def due(self, admin: ProviderAdmin, now_ms: int) -> AsyncIterator[InstanceQuery]:
        """Yield a query for each root that has been kept long enough.

        A query does not fit a root that has gone on since.
        """
        for rule in self.rules:
            if rule.kept_ms is None:
                continue
            bound = utc_time(now_ms - rule.kept_ms)
            for name in self._names_under(rule):
                # One that was created later has ended later: a store need not look at it.
                query = InstanceQuery(
                    statuses=frozenset({rule.status}),
                    name=name,
                    roots_only=True,
                    created_before=bound,
                    completed_before=bound,
                )
                async for info in read_instances(admin, query, _PAGE_ITEMS):
                    if name is not None or (info.name, rule.status) not in self._kept:
                        yield InstanceQuery(
                            instance_ids=(info.instance_id,), completed_before=bound
                        )

    async def count_due(self, admin: ProviderAdmin, now_ms: int) -> int:
        """Return the number of roots that have been kept long enough."""
        return sum([1 async for _ in self.due(admin, now_ms)])

    def _names_under(self, rule: KeepRule) -> Sequence[str | None]:
        """Return the names to look for: a store finds a name without reading others' instances."""
        if self._names is None:
            return (rule.name,)
        if rule.name is not None:
            return (rule.name,) if rule.name in self._names else ()
        return sorted(each for each in self._names if (each, rule.status) not in self._kept)


def deleted_at_ms(info: InstanceInfo, retentions: Iterable[Retention]) -> int | None:
    """Return when the rules delete a root that has ended; None if they keep it.

    A child goes with its root.
    """
    ended_ms = info.completed_at_ms
    if not info.status.is_final or ended_ms is None or info.parent_instance_id is not None:
        return None
    for retention in retentions:
        kept_ms = retention.kept_ms(info.name, info.status)
        if kept_ms is not None:
            return ended_ms + kept_ms
    return None


def retention_by_worker(workers: Iterable[WorkerInfo]) -> dict[str, Retention]:
    """Return the rules of each worker that has some, for the orchestrations that it deletes.

    Of several workers with the code of an orchestration, the one whose id comes first deletes its
    instances: the others need not look for them.
    """
    taken: set[str] = set()
    shares: dict[str, Retention] = {}
    for worker in sorted(workers, key=lambda each: each.worker_id):
        if worker.keep:
            names = {name for name, _ in worker.startable} - taken
            taken |= names
            shares[worker.worker_id] = Retention(worker.keep, frozenset(names))
    return shares
