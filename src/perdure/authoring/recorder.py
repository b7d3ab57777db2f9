"""The narrow port between what an author calls and what records it.

The engine notes which thread runs whose code, so no context object has to be passed around.
Authoring knows only this protocol.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from perdure.errors import NotInOrchestration

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    import msgspec

    from perdure.authoring.definitions import Activity, Orchestration
    from perdure.authoring.steps import Step
    from perdure.codec import Codec
    from perdure.model.work import ParentLink


class Recorder(Protocol):
    """What an orchestration may ask for. Every call is answered at once; steps resolve later."""

    @property
    def instance_id(self) -> str: ...
    @property
    def execution_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def parent(self) -> ParentLink | None: ...
    @property
    def turn(self) -> int: ...
    @property
    def is_replaying(self) -> bool: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def now_ms(self) -> int:
        """Time of the turn: the same on every replay."""
        ...

    @property
    def custom_status(self) -> str | None:
        """JSON text of the last status that was set."""
        ...

    def decode(self, raw: msgspec.Raw, type_: Any = ..., *, where: str) -> Any: ...

    def schedule_activity(
        self, activity: Activity[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Step[Any]: ...

    def schedule_child(
        self, child: Orchestration[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Step[Any]: ...

    def start_detached(
        self,
        orchestration: Orchestration[Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        delay_seconds: float,
    ) -> str: ...

    def wait_for_event(self, name: str, type_: Any) -> Step[Any]: ...

    def next_message(self, queue: str, type_: Any) -> Step[Any]: ...

    def rng(self) -> random.Random:
        """The seeded generator of the branch that asks."""
        ...

    def side_effect(self, fn: Callable[[], Any], type_: Any) -> Any: ...

    def is_patched(self, name: str) -> bool: ...

    def continue_as_new(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], version: str | None
    ) -> NoReturn: ...

    def set_status(self, text: str | None) -> None: ...

    def state_values(self) -> Mapping[str, str]:
        """The instance's state: JSON text by key."""
        ...

    def state_set(self, key: str, text: str) -> None: ...

    def state_delete(self, key: str) -> None: ...

    def state_clear(self) -> None: ...


running: dict[int, Recorder] = {}
"""Threads that run orchestration code at this moment, and whose. Kept by the engine."""


def find_recorder() -> Recorder | None:
    """The recorder of the orchestration that is running here, if one is."""
    return running.get(get_ident())


def require_recorder(what: str) -> Recorder:
    recorder = find_recorder()
    if recorder is None:
        raise NotInOrchestration(f"{what} works only inside an orchestration")
    return recorder
