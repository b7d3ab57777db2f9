"""One provider for several clients and runtimes: the last one to leave closes it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from perdure.providers.contract import Provider

_users: WeakKeyDictionary[Provider, int] = WeakKeyDictionary()


async def enter(provider: Provider) -> None:
    await provider.open()
    _users[provider] = _users.get(provider, 0) + 1


async def leave(provider: Provider) -> None:
    others = _users.pop(provider, 1) - 1
    if others > 0:
        _users[provider] = others
    else:
        await provider.close()
