"""The SQLite provider under the conformance kit, with one handle and with two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import apsw
import pytest

from perdure.conformance import *  # noqa: F403
from perdure.conformance.harness import ProviderFactory
from perdure.providers.sqlite import SqliteProvider

if TYPE_CHECKING:
    from pathlib import Path

    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider


class SqliteFactory(ProviderFactory):
    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, clock: ManualClock) -> Provider:
        return SqliteProvider(self._path, clock=clock)

    async def corrupt_history(self, instance_id: str) -> None:
        connection = apsw.Connection(str(self._path))
        connection.execute(
            "UPDATE history SET data = CAST(x'7bff' AS TEXT) WHERE instance_key ="
            " (SELECT instance_key FROM instances WHERE instance_id = ?)",
            (instance_id,),
        )
        connection.close()


@pytest.fixture
def provider_factory(tmp_path: Path) -> ProviderFactory:
    return SqliteFactory(tmp_path / "store.db")
