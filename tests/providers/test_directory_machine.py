"""Random sequences of every verb on a directory and on the in-memory model side by side."""

from __future__ import annotations

import shutil
import tempfile
from datetime import timedelta
from typing import TYPE_CHECKING

from model import ModelFactory
from perdure.conformance.harness import ProviderFactory
from perdure.conformance.stateful import state_machine
from perdure.providers.directory import FileSystemProvider

if TYPE_CHECKING:
    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider
    from perdure.providers.records import OrchestratorMessage, TurnCommit


class RestlessProvider(FileSystemProvider):
    """Writes the files and archives what has ended after every turn; restarts after every third."""

    _turns = 0

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        await super().ack_orchestration_item(lock_token, commit)
        await self._after_turn()

    async def start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> bool:
        is_new = await super().start_orchestration_item(start, commit, lock_token, owner)
        await self._after_turn()
        return is_new

    async def _after_turn(self) -> None:
        self._turns += 1
        await self.checkpoint()
        if self._turns % 3 == 0:
            await self.close()
            await self.open()


class TemporaryFactory(ProviderFactory):
    def __init__(self) -> None:
        self._path = tempfile.mkdtemp(prefix="perdure-")

    def create(self, clock: ManualClock) -> Provider:
        return FileSystemProvider(self._path, clock=clock)

    async def cleanup(self) -> None:
        shutil.rmtree(self._path)


class RestlessFactory(TemporaryFactory):
    def create(self, clock: ManualClock) -> Provider:
        return RestlessProvider(self._path, clock=clock, archive=timedelta(0))


TestFileSystemMachine = state_machine(TemporaryFactory, model=ModelFactory, examples=60)
TestRestlessFileSystemMachine = state_machine(RestlessFactory, model=ModelFactory, examples=20)
