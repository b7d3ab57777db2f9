"""The filesystem provider under the conformance kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perdure.conformance import *  # noqa: F403
from perdure.conformance.harness import ProviderFactory
from perdure.providers.filesystem import FileSystemProvider, layout

if TYPE_CHECKING:
    from pathlib import Path

    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider


class FileSystemFactory(ProviderFactory):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._provider: FileSystemProvider | None = None

    def create(self, clock: ManualClock) -> Provider:
        self._provider = FileSystemProvider(self._path, clock=clock)
        return self._provider

    async def corrupt_history(self, instance_id: str) -> None:
        assert self._provider is not None
        await self._provider.checkpoint()
        directory = self._path / layout.instance_directory(instance_id)
        for path in directory.glob("executions/*/history.jsonl"):
            path.write_bytes(path.read_bytes().replace(b'"type"', b'"tepy"'))


@pytest.fixture
def provider_factory(tmp_path: Path) -> ProviderFactory:
    return FileSystemFactory(tmp_path / "store")
