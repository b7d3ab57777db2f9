"""Calls a function of the schema that takes texts and returns one, with little ado.

The driver's cursor converts parameters, rows and types, none of which a commit needs, and costs
four times as much.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.pq.abc import PGconn, PGresult

_GOOD: Final = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


async def call(
    connection: psycopg.AsyncConnection[Any],
    statement: bytes,
    parameters: Sequence[bytes],
    *,
    prepared: set[bytes] | None,
    seconds: float,
) -> bytes:
    """The one value of the one row. ``statement`` has ``$1`` for its first parameter.

    ``prepared`` holds the statements that the connection knows; None: it must not know any.
    Raises what the driver raises; TimeoutError if there is no answer.
    """
    pgconn = connection.pgconn
    if prepared is not None:
        name = b"perdure " + statement.rpartition(b".")[2].partition(b"(")[0]
        if statement not in prepared:
            pgconn.send_prepare(name, statement)
            await _answer(connection, seconds)
            prepared.add(statement)
        pgconn.send_query_prepared(name, parameters)
    else:
        pgconn.send_query_params(statement, parameters)
    value = (await _answer(connection, seconds)).get_value(0, 0)
    assert value is not None
    return value


async def _answer(connection: psycopg.AsyncConnection[Any], seconds: float) -> PGresult:
    pgconn = connection.pgconn
    results: list[PGresult]
    if pgconn.flush():
        # More than the socket takes at once.
        async with asyncio.timeout(seconds):
            results = await connection.wait(generators.execute(pgconn))
    else:
        results = await _results(pgconn, seconds)
    if not results:
        raise psycopg.OperationalError("the connection was lost before there was an answer")
    if results[0].status not in _GOOD:
        raise psycopg.errors.error_from_result(results[0], encoding="utf-8")
    return results[0]


async def _results(pgconn: PGconn, seconds: float) -> list[PGresult]:
    loop = asyncio.get_running_loop()
    results: list[PGresult] = []
    waiter: asyncio.Future[None] = loop.create_future()

    socket = pgconn.socket

    def receive() -> None:
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    end(None)
                    return
                results.append(result)
        except psycopg.Error as error:
            end(error)

    def end(error: BaseException | None) -> None:
        # At once: a connection that broke has closed its socket, and the next one to be opened by
        # anybody gets its number.
        loop.remove_reader(socket)
        if waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)

    alarm = loop.call_later(seconds, end, TimeoutError(f"no answer within {seconds} s"))
    loop.add_reader(socket, receive)
    try:
        await waiter
    except asyncio.CancelledError:
        loop.remove_reader(socket)
        raise
    finally:
        alarm.cancel()
    return results
