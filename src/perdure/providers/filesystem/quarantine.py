"""Files that were found damaged. They stay as they are; what they stood for is refused."""

from __future__ import annotations

from perdure.errors import CorruptData
from perdure.providers.filesystem import layout


class Quarantine:
    """Paths inside the root that nobody reads or writes any more, with the reason."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def add(self, path: str, reason: str) -> None:
        self.reasons[path] = reason

    def bars(self, instance_id: str) -> bool:
        """Whether the instance with that id is among them."""
        return bool(self.reasons) and layout.instance_directory(instance_id) in self.reasons

    def check(self, operation: str, instance_id: str) -> None:
        if self.bars(instance_id):
            path = layout.instance_directory(instance_id)
            raise CorruptData(
                operation,
                f"the files of {instance_id!r} are damaged ({self.reasons[path]}); restore {path} "
                "from a backup and open the store again",
            )
