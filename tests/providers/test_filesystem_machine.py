"""Random sequences of every verb on a directory and on the in-memory model side by side."""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING

from perdure.conformance.harness import ProviderFactory
from perdure.conformance.stateful import state_machine
from perdure.providers.filesystem import FileSystemProvider

if TYPE_CHECKING:
    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider


class TemporaryFactory(ProviderFactory):
    def __init__(self) -> None:
        self._path = tempfile.mkdtemp(prefix="perdure-")

    def create(self, clock: ManualClock) -> Provider:
        return FileSystemProvider(self._path, clock=clock)

    async def cleanup(self) -> None:
        shutil.rmtree(self._path)


TestFileSystemMachine = state_machine(TemporaryFactory, examples=60)
