"""Calls a function of the schema with texts for its parameters, with little ado.

The driver's cursor converts parameters and describes what comes back, which neither a commit nor a
fetch needs, and costs up to four times as much.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import generators
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus

from perdure.providers.postgres.silence import answer_within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGconn, PGresult

_GOOD: Final = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


class Receiver:
    """Receives the answers on one connection, and stays ready for the next one: whoever else wants
    to read from it says ``stop`` first.
    """

    def __init__(self, pgconn: PGconn) -> None:
        self._pgconn = pgconn
        self._socket = pgconn.socket
        self._loop = asyncio.get_running_loop()
        self._is_reading = False
        self._results: list[PGresult] = []
        self._answered: Callable[[list[PGresult], BaseException | None], None] | None = None
        self._give_up_at = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def receive(
        self, seconds: float, answered: Callable[[list[PGresult], BaseException | None], None]
    ) -> None:
        """Call back once, with the results or with what went wrong."""
        self._results, self._answered = [], answered
        self._give_up_at = self._loop.time() + seconds
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._give_up_at, self._check)
        if not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._socket, self._read)

    def stop(self) -> None:
        """Nobody is called back any more."""
        self._answered = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket)

    def _read(self) -> None:
        if self._answered is None:
            self.stop()  # nobody asked: whoever uses the connection next hears of it
            return
        pgconn = self._pgconn
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    break
                self._results.append(result)
            else:
                return  # there is more to come
        except psycopg.Error as error:
            self._fail(error)
            return
        answered, self._answered = self._answered, None
        answered(self._results, None)

    def _check(self) -> None:
        self._alarm = None
        if self._answered is None:
            return
        if self._loop.time() < self._give_up_at:
            self._alarm = self._loop.call_at(self._give_up_at, self._check)
        else:
            self._fail(TimeoutError("no answer in time"))

    def _fail(self, error: BaseException) -> None:
        answered, results = self._answered, self._results
        # At once: a connection that broke has closed its socket, and the next one to be opened by
        # anybody gets its number.
        self.stop()
        if answered is not None:
            answered(results, error)


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
    return _value_of(
        await _result_of(connection, statement, parameters, prepared, seconds, binary=False)
    )


async def call_for_rows(
    connection: psycopg.AsyncConnection[Any],
    statement: bytes,
    parameters: Sequence[bytes | None],
    *,
    prepared: set[bytes] | None,
    seconds: float,
) -> list[tuple[Any, ...]]:
    """As ``call``, for any number of rows with values of any type."""
    result = await _result_of(connection, statement, parameters, prepared, seconds, binary=True)
    transformer = Transformer(connection)
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)


async def _result_of(
    connection: psycopg.AsyncConnection[Any],
    statement: bytes,
    parameters: Sequence[bytes | None],
    prepared: set[bytes] | None,
    seconds: float,
    *,
    binary: bool,
) -> PGresult:
    pgconn = connection.pgconn
    if prepared is not None and statement not in prepared:
        pgconn.send_prepare(name_of(statement), statement)
        await _answer(connection, seconds)
        prepared.add(statement)
    _send(pgconn, statement, parameters, is_prepared=prepared is not None, binary=binary)
    return await _answer(connection, seconds)


def call_back(
    connection: psycopg.AsyncConnection[Any],
    receiver: Receiver,
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
        receiver.stop()
        answer = asyncio.ensure_future(_results_after_sending(connection, seconds))
        answer.add_done_callback(lambda _: answered(*_outcome_of(answer)))
    else:
        receiver.receive(seconds, answered)


def _send(
    pgconn: PGconn,
    statement: bytes,
    parameters: Sequence[bytes | None],
    *,
    is_prepared: bool,
    binary: bool = False,
) -> None:
    if is_prepared:
        pgconn.send_query_prepared(name_of(statement), parameters, result_format=int(binary))
    else:
        pgconn.send_query_params(statement, parameters, result_format=int(binary))


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
    with answer_within(connection, seconds):
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

    receiver = Receiver(pgconn)
    receiver.receive(seconds, answered)
    try:
        return await waiter
    finally:
        receiver.stop()
