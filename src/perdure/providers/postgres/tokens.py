"""Whose lock a token is. Statements are addressed by instance, so that each goes to one server."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from perdure.providers._shared.rules import lock_lost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

_TOKENS_MAX: Final = 200_000


class TokenBook:
    """Remembers the instances of tokens that went through this handle; asks about others."""

    def __init__(self, find: Callable[[Sequence[str]], Awaitable[dict[str, str]]]) -> None:
        self._find = find
        self._instances: OrderedDict[str, str] = OrderedDict()

    def note(self, token: str, instance_id: str) -> None:
        self._instances[token] = instance_id
        if len(self._instances) > _TOKENS_MAX:
            self._instances.popitem(last=False)

    def forget(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            self._instances.pop(token, None)

    def known(self, token: str) -> str | None:
        return self._instances.get(token)

    async def instance_of(self, token: str, operation: str) -> str:
        """Raises LockLost if nothing in the store carries the token."""
        instance_id = (await self.instances_of((token,))).get(token)
        if instance_id is None:
            raise lock_lost(operation, token)
        return instance_id

    async def instances_of(self, tokens: Sequence[str]) -> dict[str, str]:
        """Without the tokens that nothing carries."""
        found = {token: known for token in tokens if (known := self._instances.get(token))}
        unknown = [token for token in tokens if token not in found and _can_be_stored(token)]
        return {**found, **await self._find(unknown)} if unknown else found


def _can_be_stored(token: str) -> bool:
    try:
        return "\0" not in token and bool(token.encode())
    except UnicodeEncodeError:
        return False
