"""Files that were found damaged. They stay as they are, and their instances are refused."""

from __future__ import annotations

import logging

from perdure.errors import CorruptData
from perdure.providers.directory import layout

_log = logging.getLogger("perdure.directory")


class Damaged(Exception):
    """A file does not hold the bytes that were written into it."""


class DamagedFiles:
    """The damaged files of a store, and the instances that cannot be used because of them."""

    def __init__(self, root_path: str) -> None:
        self._root_path = root_path
        self.reasons: dict[str, str] = {}
        """By the path inside the root."""
        self._barred: dict[str, str] = {}
        """The path, by the name of the instance."""
        self.lost: set[str] = set()
        """Names of the instances whose own files are damaged: they are not written again."""

    def add(self, path: str, reason: object, name: str | None, *, is_lost: bool = False) -> None:
        """Report a file, and refuse its instance from now on."""
        _log.error("%s/%s cannot be read and is left aside: %s", self._root_path, path, reason)
        self.reasons[path] = str(reason)
        if name is not None:
            self._barred[name] = path
            if is_lost:
                self.lost.add(name)

    def bars(self, instance_id: str) -> bool:
        """Return whether the instance cannot be used."""
        return bool(self._barred) and not self._barred.keys().isdisjoint(
            layout.instance_names(instance_id)
        )

    def is_lost(self, instance_id: str) -> bool:
        """Return whether the files of the instance itself are damaged."""
        return bool(self.lost) and not self.lost.isdisjoint(layout.instance_names(instance_id))

    def check(self, operation: str, instance_id: str) -> None:
        """Raise CorruptData for an instance that cannot be used."""
        if self._barred:
            for name in layout.instance_names(instance_id):
                if (path := self._barred.get(name)) is not None:
                    raise CorruptData(
                        operation,
                        f"the files of {instance_id!r} are damaged ({self.reasons[path]}); restore "
                        f"{path} from a backup and open the store again",
                    )
