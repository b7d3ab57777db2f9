"""``state``: the small key-value store of the instance, for orchestration code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from perdure.authoring.recorder import require_recorder
from perdure.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.authoring.recorder import Recorder

T = TypeVar("T")
D = TypeVar("D")

_VALUES = (bool, int, float, str, bytes, list, dict, tuple, set)


class State:
    """A mapping of strings to JSON values that survives restarts and continue-as-new.

    Reading returns a new copy: write a changed value back. Keys are sorted.
    """

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        recorder = _recorder()
        return _decode(recorder, key, recorder.state_values()[key], Any)

    def __setitem__(self, key: str, value: object) -> None:
        recorder = _recorder()
        raw = recorder.codec.encode(value, where=f"state[{key!r}]")
        recorder.state_set(key, bytes(raw).decode())

    def __delitem__(self, key: str) -> None:
        recorder = _recorder()
        if key not in recorder.state_values():
            raise KeyError(key)
        recorder.state_delete(key)

    def __contains__(self, key: object) -> bool:
        return key in _recorder().state_values()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(_recorder().state_values())

    @overload
    def get(self, key: str) -> Any | None: ...
    @overload
    def get(self, key: str, type: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, type: type[T], default: D) -> T | D: ...
    @overload
    def get(self, key: str, *, default: D) -> Any | D: ...
    def get(self, key: str, type: Any = Any, default: Any = None) -> Any:  # noqa: A002
        """Return the value, checked against the type, or the default."""
        if isinstance(type, _VALUES):
            raise UsageError(
                f"state.get({key!r}, {type!r}): the second argument is a type; write "
                f"state.get({key!r}, default={type!r})"
            )
        recorder = _recorder()
        text = recorder.state_values().get(key)
        return default if text is None else _decode(recorder, key, text, type)

    def set(self, key: str, value: object) -> None:
        self[key] = value

    def delete(self, key: str) -> None:
        """Remove the key if it exists."""
        if key in self:
            del self[key]

    def clear(self) -> None:
        _recorder().state_clear()

    def keys(self) -> list[str]:
        return sorted(_recorder().state_values())

    def items(self) -> list[tuple[str, Any]]:
        return [(key, self[key]) for key in self.keys()]

    def __repr__(self) -> str:
        return "<state of the running orchestration>"


def _recorder() -> Recorder:
    return require_recorder("state")


def _decode(recorder: Recorder, key: str, text: str, type_: Any) -> Any:
    return recorder.decode(msgspec.Raw(text.encode()), type_, where=f"state[{key!r}]")


state = State()
"""The state of the orchestration that is running."""
