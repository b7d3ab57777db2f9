"""A SQLite store that says which point each of its commits has reached."""

from __future__ import annotations

from typing import Any

from perdure.providers.sqlite import SqliteProvider
from perdure.providers.sqlite.database import FileTransaction


class ObservedProvider(SqliteProvider):
    """Calls ``reached`` with "begun", "before commit" and "after commit", where it commits."""

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, **options)
        provider = self

        class ObservedTransaction(FileTransaction):
            def begin(self, now_ms: Any) -> None:
                super().begin(now_ms)
                provider.reached("begun")

            def commit(self) -> None:
                provider.reached("before commit")
                super().commit()
                provider.reached("after commit")

        self._database.transaction_type = ObservedTransaction

    def reached(self, point: str) -> None:
        """For subclasses."""
