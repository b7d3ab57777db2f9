"""An end to waiting for a server that says nothing, on a connection that looks alive."""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def answer_within(connection: psycopg.AsyncConnection[Any], seconds: float) -> Generator[None]:
    """TimeoutError if the driver still waits then; the connection is of no use afterwards.

    Its line is cut, and nobody cancelled: the driver would ask the server to cancel as well, and
    wait for its word on the same line.
    """
    is_cut = False

    def cut() -> None:
        nonlocal is_cut
        is_cut = True
        with suppress(psycopg.Error, OSError):  # it is down already
            line = socket.socket(fileno=connection.fileno())
            try:
                line.shutdown(socket.SHUT_RDWR)
            finally:
                line.detach()  # it is the driver's

    alarm = asyncio.get_running_loop().call_later(seconds, cut)
    try:
        yield
    except psycopg.Error as error:
        if is_cut:
            raise TimeoutError("no answer in time") from error
        raise
    finally:
        alarm.cancel()
