"""The directory provider under the conformance kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perdure.conformance import *  # noqa: F403
from perdure.conformance.harness import ProviderFactory
from perdure.providers.directory import FileSystemProvider, layout
from perdure.providers.directory.histories import IN_FILE
from perdure.providers.sqlite.transaction import Verb

if TYPE_CHECKING:
    from pathlib import Path

    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider
    from perdure.providers.sqlite.transaction import Transaction


class FileSystemFactory(ProviderFactory):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._provider: FileSystemProvider | None = None

    def create(self, clock: ManualClock) -> Provider:
        self._provider = FileSystemProvider(self._path, clock=clock)
        return self._provider

    async def corrupt_history(self, instance_id: str) -> None:
        """Damage the file, after the texts have left memory as those of a long history do."""
        provider = self._provider
        assert provider is not None
        await provider.checkpoint()
        await provider._store.write(Verb("forget", _forget_texts, alone=True), instance_id)
        path = self._path / layout.document_file(layout.instance_names(instance_id)[0])
        assert b'"type"' in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(b'"type"', b'"tepy"'))


def _forget_texts(tx: Transaction, instance_id: str) -> None:
    tx.execute(
        "UPDATE history SET data = ? WHERE instance_key ="
        " (SELECT instance_key FROM instances WHERE instance_id = ?)",
        (IN_FILE, instance_id),
    )
    tx._hook.changes.clear()


@pytest.fixture
def provider_factory(tmp_path: Path) -> ProviderFactory:
    return FileSystemFactory(tmp_path / "store")
