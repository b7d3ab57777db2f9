"""Sends statements without the driver's cursor, and limits the wait for a server that stays silent.

The cursor converts parameters and describes the result, which costs up to four times as much. When
a task that waits for an answer is cancelled, the driver asks the server to cancel the statement and
waits for its reply, 10 s if the server is silent; here, the wait ends at once.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
from psycopg.adapt import Loader, Transformer
from psycopg.pq import ExecStatus, Format

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from psycopg.abc import AdaptContext, Buffer
    from psycopg.errors import Diagnostic
    from psycopg.pq.abc import PGresult

Parameters: TypeAlias = "Sequence[str | int | Sequence[str] | None]"
_Answered: TypeAlias = "Callable[[PGresult | None, BaseException | None], None]"
"""Is called once, with the result or with the error."""

_GOOD: Final = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})
_PREPARED_MAX: Final = 100
"""Prepared statements of one connection at most: the server keeps a plan for each."""


def cut(connection: psycopg.AsyncConnection[Any]) -> None:
    """Shut the socket down: a call that waits for an answer fails as if the server had gone."""
    with suppress(psycopg.Error, OSError):  # the socket is closed already
        shared = socket.socket(fileno=connection.fileno())
        try:
            shared.shutdown(socket.SHUT_RDWR)
        finally:
            shared.detach()  # the driver owns the file descriptor


@contextmanager
def answer_within(connection: psycopg.AsyncConnection[Any], seconds: float) -> Generator[None]:
    """Raise TimeoutError if the driver still waits after that time; the connection is lost then.

    Shuts the socket down instead of cancelling the task: on cancellation the driver asks the server
    to cancel the statement and waits for its reply on the same socket.
    """
    is_late = False

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        cut(connection)

    alarm = asyncio.get_running_loop().call_later(seconds, give_up)
    try:
        yield
    except psycopg.Error as error:
        if is_late:
            raise TimeoutError("no answer in time") from error
        raise
    finally:
        alarm.cancel()


class RawConnection:
    """Sends statements on one connection and receives their answers, one at a time.

    Stays registered with the event loop between two answers. Other code that reads from the
    connection must call ``stop`` first.
    A statement has ``$1`` for its first parameter. Its errors are those of the driver, or
    TimeoutError if there is no answer. A commit that no synchronous standby has confirmed counts
    as a lost connection, so it is repeated.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._socket = connection.pgconn.socket
        self._loop = asyncio.get_running_loop()
        self.prepared: dict[bytes, bytes] = {}
        """The names of statements that are prepared on the connection."""
        self._is_reading = False
        self._is_writing = False
        self._results: list[PGresult] = []
        self._is_unconfirmed = False
        connection.add_notice_handler(self._noticed)
        self._answered: _Answered | None = None
        self._give_up_at = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    async def call(
        self, statement: bytes, parameters: Sequence[bytes | None], *, prepare: bool, seconds: float
    ) -> PGresult:
        """Return the result, whose values are texts."""
        return await self._call(
            statement, parameters, prepare=prepare, seconds=seconds, binary=False
        )

    async def call_for_rows(
        self,
        statement: bytes,
        parameters: Parameters,
        *,
        prepare: bool,
        seconds: float,
        escapes: bool = False,
    ) -> list[tuple[Any, ...]]:
        """Call with parameters of any type, and return any number of rows.

        With ``escapes``, damaged texts come as texts that are no JSON. Else UnicodeDecodeError.
        """
        values = [text_of(each) for each in parameters]
        result = await self._call(statement, values, prepare=prepare, seconds=seconds, binary=True)
        try:
            return _rows_of(result, self._connection)
        except UnicodeDecodeError:
            if not escapes:
                raise
        context = self._connection.cursor()
        context.adapters.register_loader("text", _EscapingLoader)
        return _rows_of(result, context)

    async def _call(
        self,
        statement: bytes,
        parameters: Sequence[bytes | None],
        *,
        prepare: bool,
        seconds: float,
        binary: bool,
    ) -> PGresult:
        prepare = prepare and (statement in self.prepared or len(self.prepared) < _PREPARED_MAX)
        if prepare and statement not in self.prepared:
            called = statement.rpartition(b".")[2].partition(b"$")[0]
            name = b"perdure %d %b" % (len(self.prepared), called[:40])
            self._pgconn.send_prepare(name, statement)
            await self._answer(seconds)
            self.prepared[statement] = name
        self._send(statement, parameters, prepare=prepare, binary=binary)
        return await self._answer(seconds)

    def start(
        self,
        statement: bytes,
        parameters: Sequence[bytes],
        *,
        prepare: bool,
        seconds: float,
        answered: _Answered,
    ) -> None:
        """Call without a task; with ``prepare`` the statement is prepared already.

        Raises what the driver raises if the statement cannot be sent.
        """
        self._send(statement, parameters, prepare=prepare, binary=False)
        self._receive(seconds, answered)

    def stop(self) -> None:
        """Stop waiting; a pending ``answered`` is not called any more."""
        self._answered = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        # A broken connection has closed its socket: then the selector has forgotten it already.
        if self._is_reading:
            self._is_reading = False
            with suppress(OSError):
                self._loop.remove_reader(self._socket)
        if self._is_writing:
            self._is_writing = False
            with suppress(OSError):
                self._loop.remove_writer(self._socket)

    def _send(
        self,
        statement: bytes,
        parameters: Sequence[bytes | None],
        *,
        prepare: bool,
        binary: bool,
    ) -> None:
        if prepare:
            name = self.prepared[statement]
            self._pgconn.send_query_prepared(name, parameters, result_format=int(binary))
        else:
            self._pgconn.send_query_params(statement, parameters, result_format=int(binary))

    async def _answer(self, seconds: float) -> PGresult:
        waiter: asyncio.Future[PGresult] = self._loop.create_future()

        def answered(result: PGresult | None, error: BaseException | None) -> None:
            if waiter.done():
                return
            if result is None:
                waiter.set_exception(error or psycopg.OperationalError("no answer"))
            else:
                waiter.set_result(result)

        try:
            self._receive(seconds, answered)
            return await waiter
        except BaseException:
            self.stop()
            raise

    def _receive(self, seconds: float, answered: _Answered) -> None:
        if self._pgconn.flush():
            # The socket did not take the whole statement at once.
            self._is_writing = True
            self._loop.add_writer(self._socket, self._write)
        self._results, self._is_unconfirmed, self._answered = [], False, answered
        self._give_up_at = self._loop.time() + seconds
        if self._alarm is not None and self._alarm.when() > self._give_up_at:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._give_up_at, self._check)
        if not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._socket, self._read)

    def _write(self) -> None:
        try:
            if self._pgconn.flush():
                return
        except psycopg.Error as error:
            self._fail(error)
            return
        self._is_writing = False
        self._loop.remove_writer(self._socket)

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
        try:
            first = _first(self._results)
            if self._is_unconfirmed:
                raise psycopg.OperationalError("the wait for a synchronous standby was cancelled")
        except psycopg.Error as error:
            answered(None, error)
        else:
            answered(first, None)

    def _noticed(self, notice: Diagnostic) -> None:
        # An operator has cancelled a commit that hung. The server only warns, and reports success.
        if notice.source_function == "SyncRepWaitForLSN":
            self._is_unconfirmed = True

    def _check(self) -> None:
        self._alarm = None
        if self._answered is None:
            return
        if self._loop.time() < self._give_up_at:
            self._alarm = self._loop.call_at(self._give_up_at, self._check)
        else:
            self._fail(TimeoutError("no answer in time"))

    def _fail(self, error: BaseException) -> None:
        answered = self._answered
        # Stop first: a broken connection has closed its socket, and the next connection that any
        # code opens can get the same file descriptor.
        self.stop()
        if answered is not None:
            answered(None, error)


class _EscapingLoader(Loader):
    """Reads texts. One whose bytes are no UTF-8 becomes a text that is no JSON."""

    format = Format.BINARY

    def load(self, data: Buffer) -> str:
        raw = bytes(data)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"not UTF-8: {raw.decode(errors='backslashreplace')}"


def _rows_of(result: PGresult, context: AdaptContext) -> list[tuple[Any, ...]]:
    transformer = Transformer(context)
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)


def value_of(result: PGresult) -> bytes:
    value = result.get_value(0, 0)
    assert value is not None
    return value


def text_of(value: str | int | Sequence[str] | None) -> bytes | None:
    """Return the value as text that the server reads as a parameter."""
    match value:
        case None:
            return None
        case str():
            if "\0" in value:
                raise psycopg.DataError(f"a text with a NUL character cannot be stored: {value!r}")
            return value.encode()
        case bool():
            return b"t" if value else b"f"
        case int():
            return b"%d" % value
        case _:
            return text_of(f"{{{','.join(map(_quoted, value))}}}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _first(results: list[PGresult]) -> PGresult:
    if not results:
        raise psycopg.OperationalError("the connection was lost before there was an answer")
    if results[0].status not in _GOOD:
        raise psycopg.errors.error_from_result(results[0], encoding="utf-8")
    return results[0]
