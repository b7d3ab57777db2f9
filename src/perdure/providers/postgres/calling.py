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
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGconn, PGresult

_GOOD: Final = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


def name_of(statement: bytes) -> bytes:
    """Under which a connection knows a statement."""
    return b"perdure " + statement.rpartition(b".")[2].partition(b"(")[0]


async def call(
    connection: psycopg.AsyncConnection[Any],
    statement: bytes,
    parameters: Sequence[bytes],
    *,
    prepared: set[bytes] | None,
    seconds: float,
) -> bytes:
    """The one value of the one row. ``statement`` has ``$1`` for its first parameter.

    ``prepared`` holds the statements that have a name on the connection, and gets this one; None:
    it is sent without.
    Raises what the driver raises; TimeoutError if there is no answer.
    """
    pgconn = connection.pgconn
    if prepared is not None and statement not in prepared:
        pgconn.send_prepare(name_of(statement), statement)
        await _answer(connection, seconds)
        prepared.add(statement)
    _send(pgconn, statement, parameters, is_prepared=prepared is not None)
    return _value_of(await _answer(connection, seconds))


def call_back(
    connection: psycopg.AsyncConnection[Any],
    statement: bytes,
    parameters: Sequence[bytes],
    *,
    is_prepared: bool,
    seconds: float,
    done: Callable[[bytes, BaseException | None], None],
) -> None:
    """As ``call`` for a statement that needs no preparing, without a task: ``done`` is called with
    the value, or with what went wrong.

    Raises what the driver raises if it cannot be sent.
    """
    pgconn = connection.pgconn
    _send(pgconn, statement, parameters, is_prepared=is_prepared)

    def answered(results: list[PGresult], error: BaseException | None) -> None:
        value = b""
        if error is None:
            try:
                value = _value_of(_first(results))
            except psycopg.Error as refusal:
                error = refusal
        done(value, error)

    if pgconn.flush():
        # More than the socket takes at once.
        answer = asyncio.ensure_future(_results_after_sending(connection, seconds))
        answer.add_done_callback(lambda _: answered(*_outcome_of(answer)))
    else:
        _receive(pgconn, seconds, answered)


def _send(
    pgconn: PGconn, statement: bytes, parameters: Sequence[bytes], *, is_prepared: bool
) -> None:
    if is_prepared:
        pgconn.send_query_prepared(name_of(statement), parameters)
    else:
        pgconn.send_query_params(statement, parameters)


def _value_of(result: PGresult) -> bytes:
    value = result.get_value(0, 0)
    assert value is not None
    return value


async def _answer(connection: psycopg.AsyncConnection[Any], seconds: float) -> PGresult:
    if connection.pgconn.flush():
        return _first(await _results_after_sending(connection, seconds))
    return _first(await _results(connection.pgconn, seconds))


def _first(results: list[PGresult]) -> PGresult:
    if not results:
        raise psycopg.OperationalError("the connection was lost before there was an answer")
    if results[0].status not in _GOOD:
        raise psycopg.errors.error_from_result(results[0], encoding="utf-8")
    return results[0]


async def _results_after_sending(
    connection: psycopg.AsyncConnection[Any], seconds: float
) -> list[PGresult]:
    """Of a statement that is not sent to its end yet."""
    async with asyncio.timeout(seconds):
        return list(await connection.wait(generators.execute(connection.pgconn)))


def _outcome_of(
    answer: asyncio.Future[list[PGresult]],
) -> tuple[list[PGresult], BaseException | None]:
    if answer.cancelled():
        # By somebody who cancels every task: whoever waits must hear of it all the same.
        return [], psycopg.OperationalError("nobody waited for the answer")
    error = answer.exception()
    return ([], error) if error is not None else (answer.result(), None)


async def _results(pgconn: PGconn, seconds: float) -> list[PGresult]:
    waiter: asyncio.Future[list[PGresult]] = asyncio.get_running_loop().create_future()

    def answered(results: list[PGresult], error: BaseException | None) -> None:
        if waiter.done():
            return
        if error is None:
            waiter.set_result(results)
        else:
            waiter.set_exception(error)

    stop = _receive(pgconn, seconds, answered)
    try:
        return await waiter
    except asyncio.CancelledError:
        stop()
        raise


def _receive(
    pgconn: PGconn,
    seconds: float,
    answered: Callable[[list[PGresult], BaseException | None], None],
) -> Callable[[], None]:
    """Call back once, with the results or with what went wrong, unless the function that is
    returned is called before.
    """
    loop = asyncio.get_running_loop()
    socket = pgconn.socket
    results: list[PGresult] = []

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

    def stop() -> None:
        # At once: a connection that broke has closed its socket, and the next one to be opened by
        # anybody gets its number.
        loop.remove_reader(socket)
        alarm.cancel()

    def end(error: BaseException | None) -> None:
        stop()
        answered(results, error)

    alarm = loop.call_later(seconds, end, TimeoutError(f"no answer within {seconds} s"))
    loop.add_reader(socket, receive)
    return stop
