"""Everything in one SQLite file: the default store."""

from perdure.providers.sqlite.provider import SqliteProvider

__all__ = ["SqliteProvider"]
