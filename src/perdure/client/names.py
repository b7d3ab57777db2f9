"""Which orchestrations a store has, and how many instances of each: without reading them all.

Stores keep no list of names. They are guessed from workers and from the newest instances, and the
guess is proved by counting: together they must be as many as there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.items import InstanceQuery

_SAMPLE: Final = 500
_NAMES_MAX: Final = 200
_TRIES: Final = 3


async def count_names(admin: ProviderAdmin, query: InstanceQuery) -> dict[str, int] | None:
    """Instances that fit, by name; None where that takes reading every one of them."""
    if query.name is not None or query.text is not None or query.instance_ids is not None:
        return None
    sample = await admin.list_instances(query, limit=_SAMPLE)
    names = {info.name for info in sample.instances}
    if sample.next_cursor is not None:
        names |= {name for worker in await admin.list_workers() for name, _ in worker.handlers}
    if len(names) > _NAMES_MAX:
        return None
    for _ in range(_TRIES):
        before = await admin.count_instances(query)
        counts = {name: await _count(admin, query, name) for name in sorted(names)}
        if sum(counts.values()) == before == await admin.count_instances(query):
            return {name: number for name, number in counts.items() if number}
    return None


async def _count(admin: ProviderAdmin, query: InstanceQuery, name: str) -> int:
    return await admin.count_instances(msgspec.structs.replace(query, name=name))
