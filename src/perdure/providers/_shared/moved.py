"""The mark on a store whose content is somewhere else, or only partly so yet."""

from __future__ import annotations

from typing import Final

from perdure.errors import StoreMoved

_UNFINISHED: Final = "unfinished move to "


def unfinished(location: str) -> str:
    """The mark while a move to that place goes on, and after one that was cut off."""
    return _UNFINISHED + location


def is_unfinished(mark: str) -> bool:
    return mark.startswith(_UNFINISHED)


def refusal(place: str, mark: str) -> StoreMoved:
    """Why a marked store is not opened, and what to do: a part must not pass for everything."""
    if is_unfinished(mark):
        return StoreMoved(
            "open",
            f"a move of {place} to {mark.removeprefix(_UNFINISHED)} is under way or was "
            "interrupted, and only a part is there; repeat 'perdure db copy --move' with the same "
            "two stores to go on where it was",
        )
    return StoreMoved("open", f"the content of {place} was moved to {mark}; use that")
