"""Calls functions of the schema without the driver's cursor.

The cursor converts parameters and describes the result. A commit or a fetch needs neither, and the
cursor costs up to four times as much. Also limits the wait for a server that stays silent.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import generators
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from psycopg.pq.abc import PGconn, PGresult

_GOOD: Final = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


@contextmanager
def answer_within(connection: psycopg.AsyncConnection[Any], seconds: float) -> Generator[None]:
    """Raise TimeoutError if the driver still waits after that time; the connection is lost then.

    Shuts the socket down instead of cancelling the task: on cancellation the driver asks the server
    to cancel the statement and waits for its reply on the same socket.
    """
    is_cut = False

    def cut() -> None:
        nonlocal is_cut
        is_cut = True
        with suppress(psycopg.Error, OSError):  # the socket is closed already
            shared = socket.socket(fileno=connection.fileno())
            try:
                shared.shutdown(socket.SHUT_RDWR)
            finally:
                shared.detach()  # the driver owns the file descriptor

    alarm = asyncio.get_running_loop().call_later(seconds, cut)
    try:
        yield
    except psycopg.Error as error:
        if is_cut:
            raise TimeoutError("no answer in time") from error
        raise
    finally:
        alarm.cancel()


class Receiver:
    """Receives answers on one connection and stays registered with the event loop between them.

    Other code that reads from the connection must call ``stop`` first.
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
        """Call ``answered`` once, with the results or with the error."""
        self._results, self._answered = [], answered
        self._give_up_at = self._loop.time() + seconds
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._give_up_at, self._check)
        if not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._socket, self._read)

    def stop(self) -> None:
        """Stop reading; a pending ``answered`` is not called any more."""
        self._answered = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket)

    def _read(self) -> None:
        if self._answered is None:
            self.stop()  # an unexpected message: the next user of the connection reads it
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
                return  # the answer is not complete yet
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
        # Stop first: a broken connection has closed its socket, and the next connection that any
        # code opens can get the same file descriptor.
        self.stop()
        if answered is not None:
            answered(results, error)


def name_of(statement: bytes) -> bytes:
    """Return the name under which a connection prepares the statement."""
    return b"perdure " + statement.rpartition(b".")[2].partition(b"(")[0]


async def call(
    connection: psycopg.AsyncConnection[Any],
    statement: bytes,
    parameters: Sequence[bytes],
    *,
    prepared: set[bytes] | None,
    seconds: float,
) -> bytes:
    """Return the one value of the one row. ``statement`` has ``$1`` for its first parameter.

    ``prepared`` holds the statements that are prepared on the connection, and gets this one. With
    None the statement is sent unprepared.
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
    """As ``call``, without a task, for a statement that needs no preparing.

    ``done`` is called with the value or with the error. Raises what the driver raises if the
    statement cannot be sent.
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
        # The socket did not take the whole statement at once.
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
    """Send the rest of a statement, then return its results."""
    with answer_within(connection, seconds):
        return list(await connection.wait(generators.execute(connection.pgconn)))


def _outcome_of(
    answer: asyncio.Future[list[PGresult]],
) -> tuple[list[PGresult], BaseException | None]:
    if answer.cancelled():
        # Code that cancels every task did this; the operation must still get an outcome.
        return [], psycopg.OperationalError("the wait for the answer was cancelled")
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
