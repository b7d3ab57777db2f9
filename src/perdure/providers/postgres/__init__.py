"""Postgres: one store for many machines. Needs the extra ``postgres``."""

from perdure.providers.postgres.provider import PostgresProvider

__all__ = ["PostgresProvider"]
