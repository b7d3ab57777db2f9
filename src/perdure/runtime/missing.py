"""Tells, once for each, which handlers the code asks for that this runtime does not have.

That may be meant, because another worker has them; if it is not, everything waits in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.errors import NotRegistered
from perdure.runtime.observe import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.authoring.registry import Registry


class Missing:
    """What one runtime has looked for."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._looked_for: set[tuple[str | None, ...]] = set()

    def activity(self, name: str) -> None:
        self._look(self._registry.resolve_activity, name)

    def orchestration(self, name: str, version: str | None) -> None:
        self._look(self._registry.resolve_orchestration, name, version)

    def _look(self, resolve: Callable[..., Any], *key: str | None) -> None:
        if key in self._looked_for:
            return
        self._looked_for.add(key)
        try:
            resolve(*key)
        except NotRegistered as error:
            log.warning("%s; it waits for a worker that has it", error)
