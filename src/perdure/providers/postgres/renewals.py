"""Renewing locks on a connection and a thread of their own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg

from perdure.errors import StoreClosed
from perdure.providers.postgres.backoff import Backoff
from perdure.providers.postgres.connections import Row
from perdure.providers.postgres.faults import Remedy, refusal, remedy_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from perdure.providers.postgres.place import Place


class Renewals:
    """A connection of its own, on a thread of its own, so that no lock is lost for want of one.

    Neither a busy pool nor a blocked event loop keeps it from the server. May be used from any
    event loop.
    """

    def __init__(self, place: Place, *, prepare: bool, retry_seconds: float) -> None:
        self._place = place
        self._prepare = prepare
        self._retry_seconds = retry_seconds
        self._thread: ThreadPoolExecutor | None = None
        self._connection: psycopg.Connection[Row] | None = None

    def open(self) -> None:
        self._thread = ThreadPoolExecutor(1, "perdure-renewals")

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await self._in_thread(thread, self._disconnect)
            thread.shutdown()

    async def run(self, operation: str, statement: bytes, parameters: Sequence[Any]) -> list[Row]:
        """Rows of a statement that may be repeated; it is, for as long as that can help."""
        backoff = Backoff(self._retry_seconds)
        while True:
            thread = self._thread
            if thread is None:
                raise StoreClosed(operation, f"{self._place.location} is not open")
            try:
                return await self._in_thread(thread, lambda: self._ask(statement, parameters))
            except (psycopg.Error, OSError) as error:
                if remedy_for(error) is Remedy.NONE or not await backoff.pause():
                    raise refusal(operation, error, self._place.location) from error

    @staticmethod
    async def _in_thread(thread: ThreadPoolExecutor, call: Callable[[], list[Row]]) -> list[Row]:
        return await asyncio.wrap_future(thread.submit(call))

    def _ask(self, statement: bytes, parameters: Sequence[Any]) -> list[Row]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.Connection[Row].connect(
                self._place.conninfo,
                autocommit=True,
                prepare_threshold=0 if self._prepare else None,
            )
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except psycopg.Error as error:
            if remedy_for(error) is Remedy.RECONNECT:
                self._disconnect()
            raise

    def _disconnect(self) -> list[Row]:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        return []
