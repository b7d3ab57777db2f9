"""Everything that can be seen of a store, in a form in which two stores can be compared.

Tokens, queue positions and letter numbers are the store's own business and are left out; their
order is kept. Times are compared as they are, or only for presence if the clocks differ.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from perdure.errors import PerdureError, ProviderError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from perdure.providers.contract import Provider, ProviderAdmin
    from perdure.providers.items import InstanceInfo, InstanceQuery

_OWN: Final = frozenset({"message_id", "letter_id", "lock_token"})
_PAGE_LIMIT: Final = 1000


def plain(value: object, *, exact_times: bool = True) -> Any:
    """The value as plain data without what only means something inside its own store."""
    return _scrub(msgspec.to_builtins(value, str_keys=True), exact_times=exact_times)


async def outcome_of(call: Awaitable[object], *, exact_times: bool = True) -> Any:
    """What a caller sees: the answer, or which error was raised."""
    try:
        return ("returned", plain(await call, exact_times=exact_times))
    except PerdureError as error:
        return raised(error)


def raised(error: PerdureError) -> Any:
    retryable = isinstance(error, ProviderError) and error.retryable
    return ("raised", type(error).__name__, "retryable" if retryable else "permanent")


async def observe(
    provider: Provider, admin: ProviderAdmin, instance_ids: Sequence[str], *, exact_times: bool
) -> dict[str, Any]:
    """The whole store, as far as administration and clients can see it."""
    calls: dict[str, Awaitable[Any]] = {
        "instances": list_whole(admin, exact_times=exact_times),
        "queue depths": _seen(admin.get_queue_depths(), exact_times=exact_times),
        "dead letters": _seen(admin.list_dead_letters(), exact_times=exact_times),
        "metrics": _seen(admin.get_system_metrics(), exact_times=exact_times),
        "workers": _seen(admin.list_workers(), exact_times=exact_times),
    }
    for instance_id in instance_ids:
        calls |= _calls_for(provider, admin, instance_id, exact_times=exact_times)
    answers = await asyncio.gather(*calls.values())
    return dict(zip(calls, answers, strict=True))


async def list_whole(
    admin: ProviderAdmin,
    query: InstanceQuery | None = None,
    *,
    page_size: int = _PAGE_LIMIT,
    exact_times: bool = True,
) -> Any:
    """Every page, put in an order that does not depend on how ties are broken."""
    infos: list[InstanceInfo] = []
    cursor: str | None = None
    while True:
        page = await admin.list_instances(query, cursor=cursor, limit=page_size)
        assert len(page.instances) <= page_size
        infos += page.instances
        if (cursor := page.next_cursor) is None:
            break
    created = [info.created_at_ms for info in infos]
    assert created == sorted(created, reverse=True), "the listing is not newest first"
    return sorted((plain(info, exact_times=exact_times) for info in infos), key=_by_id)


def difference(expected: Any, actual: Any, path: str = "") -> str:
    """Where two observations part, one line each; empty if they are equal."""
    if expected == actual:
        return ""
    if isinstance(expected, dict) and isinstance(actual, dict):
        parts = _parts_of_mappings(
            cast("dict[str, Any]", expected), cast("dict[str, Any]", actual), path
        )
    elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        parts = _parts_of_sequences(
            cast("Sequence[Any]", expected), cast("Sequence[Any]", actual), path
        )
    else:
        return f"{path}: expected {expected!r}, got {actual!r}"
    return "\n".join(part for part in parts if part)


def _parts_of_mappings(expected: dict[str, Any], actual: dict[str, Any], path: str) -> list[str]:
    return [
        difference(expected.get(key, "<absent>"), actual.get(key, "<absent>"), f"{path}.{key}")
        for key in dict.fromkeys([*expected, *actual])
    ]


def _parts_of_sequences(expected: Sequence[Any], actual: Sequence[Any], path: str) -> list[str]:
    if len(expected) != len(actual):
        return [f"{path}: expected {len(expected)} {expected!r}, got {len(actual)} {actual!r}"]
    return [
        difference(one, other, f"{path}[{index}]")
        for index, (one, other) in enumerate(zip(expected, actual, strict=True))
    ]


def _calls_for(
    provider: Provider, admin: ProviderAdmin, instance_id: str, *, exact_times: bool
) -> dict[str, Awaitable[Any]]:
    return {
        f"export of {instance_id}": _exported(admin, instance_id, exact_times=exact_times),
        f"messages of {instance_id}": _seen(
            admin.list_messages(instance_id), exact_times=exact_times
        ),
        f"work of {instance_id}": _seen(admin.list_work(instance_id), exact_times=exact_times),
        f"history of {instance_id}": _seen(provider.read(instance_id), exact_times=exact_times),
        f"state of {instance_id}": _seen(
            provider.get_kv_all_values(instance_id), exact_times=exact_times
        ),
    }


async def _exported(admin: ProviderAdmin, instance_id: str, *, exact_times: bool) -> Any:
    seen = await outcome_of(admin.export_instance(instance_id), exact_times=exact_times)
    if seen[0] == "returned":
        # Locks are no part of a snapshot, so a store may fill these in as it likes.
        for message in seen[1]["messages"]:
            message.pop("locked")
        for item in seen[1]["work"]:
            item.pop("locked_until_ms")
    return seen


async def _seen(call: Awaitable[object], *, exact_times: bool) -> Any:
    return plain(await call, exact_times=exact_times)


def _by_id(info: dict[str, Any]) -> Any:
    return info["instance_id"]


def _scrub(value: Any, *, exact_times: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: (item is not None)
            if key.endswith("_ms") and not exact_times
            else _scrub(item, exact_times=exact_times)
            for key, item in cast("dict[str, Any]", value).items()
            if key not in _OWN
        }
    if isinstance(value, list | tuple):
        return [_scrub(item, exact_times=exact_times) for item in cast("Sequence[Any]", value)]
    return value
