"""Everything that can be seen of a store, in a form in which two stores can be compared.

Tokens, queue positions and letter numbers are the store's own business and are left out; their
order is kept. Times are compared as they are, or only for presence if the clocks differ.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from msgspec.structs import replace

from perdure.errors import PerdureError, ProviderError
from perdure.providers.records import (
    DeadLetter,
    FetchedOrchestration,
    FetchedWork,
    InstanceSnapshot,
    QueuedMessage,
    QueuedWork,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo, InstanceQuery

_PAGE_LIMIT: Final = 1000


def without_own(value: Any) -> Any:
    """The value without what only means something inside its own store."""
    match value:
        case list():
            return [without_own(item) for item in cast("list[object]", value)]
        case QueuedMessage():
            return replace(value, message_id=0)
        case QueuedWork():
            return replace(value, message_id=0)
        case DeadLetter():
            return replace(value, letter_id=0)
        case FetchedWork():
            return replace(value, lock_token="")
        case FetchedOrchestration():
            messages = tuple(replace(each, message_id=0) for each in value.item.messages)
            return replace(value, lock_token="", item=replace(value.item, messages=messages))
        case InstanceSnapshot():
            # Locks are no part of a snapshot, so a store may fill these in as it likes.
            return replace(
                value,
                messages=tuple(
                    replace(each, message_id=0, locked=False) for each in value.messages
                ),
                work=tuple(
                    replace(each, message_id=0, locked_until_ms=None) for each in value.work
                ),
            )
        case _:
            return value


def comparable(value: object, *, exact_times: bool = True) -> Any:
    """Equal for two stores that answer alike."""
    own = without_own(value)
    return own if exact_times else _without_times(plain(own))


def plain(value: object) -> Any:
    """The value as plain data, for showing and for looking inside."""
    return msgspec.to_builtins(value, str_keys=True)


def raised(error: PerdureError) -> tuple[str, str, str]:
    """Return the part of an error that a caller sees."""
    retryable = isinstance(error, ProviderError) and error.retryable
    return ("raised", type(error).__name__, "retryable" if retryable else "permanent")


def totals(admin: ProviderAdmin) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return calls, by name, that show the store as a whole."""
    return {
        "instances": lambda: list_whole(admin),
        "queue depths": admin.get_queue_depths,
        "dead letters": admin.list_dead_letters,
        "metrics": admin.get_system_metrics,
        "workers": admin.list_workers,
    }


def details(
    provider: Provider, admin: ProviderAdmin, instance_ids: Sequence[str]
) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return calls, by name, that show these instances."""
    calls: dict[str, Callable[[], Awaitable[Any]]] = {}
    for each in instance_ids:
        calls[f"export of {each}"] = partial(admin.export_instance, each)
        calls[f"messages of {each}"] = partial(admin.list_messages, each)
        calls[f"work of {each}"] = partial(admin.list_work, each)
        calls[f"state of {each}"] = partial(provider.get_kv_all_values, each)
    return calls


async def look(call: Callable[[], Awaitable[object]], *, exact_times: bool) -> Any:
    """Return the answer that the caller sees, ready to be compared."""
    try:
        return comparable(await call(), exact_times=exact_times)
    except PerdureError as error:
        return raised(error)


async def list_whole(
    admin: ProviderAdmin, query: InstanceQuery | None = None, *, page_size: int = _PAGE_LIMIT
) -> list[InstanceInfo]:
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
    return sorted(infos, key=lambda info: info.instance_id)


def difference(expected: Any, actual: Any, path: str = "") -> str:
    """Return the differences of two observations, one a line; empty if they are equal."""
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


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: (item is not None) if key.endswith("_ms") else _without_times(item)
            for key, item in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list | tuple):
        return [_without_times(item) for item in cast("Sequence[Any]", value)]
    return value
