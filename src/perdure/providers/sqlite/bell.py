"""Delivers outcomes from threads to an event loop.

Through an ``eventfd`` where the system has it: ``call_soon_threadsafe`` costs a new handle and four
system calls instead of two.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from contextvars import Context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from perdure.providers.sqlite.verb import Delivery

_log = logging.getLogger("perdure.sqlite")


class Bell:
    """Made and closed on the event loop; any thread may ring it in between."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None], name: str
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._name = name
        self._deliveries: deque[Delivery] = deque()
        self._descriptor = self._listen()

    def ring(self, delivery: Delivery) -> None:
        """Have it delivered on the loop, after everything that was given before."""
        self._deliveries.append(delivery)
        try:
            if self._descriptor is None or self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._answer)
            else:
                os.eventfd_write(self._descriptor, 1)
        except RuntimeError:
            _log.warning("the event loop of %s is gone; an answer was dropped", self._name)
            self._deliveries.clear()

    def close(self) -> None:
        """Deliver what is left. Call it when no thread rings any more."""
        is_heard = not self._loop.is_closed()
        if self._descriptor is not None:
            if is_heard:
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
        if is_heard:
            self._answer()

    def _listen(self) -> int | None:
        """None where there is no such descriptor, or the loop cannot wait for it."""
        if not hasattr(os, "eventfd"):
            return None
        descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            # The callback must not see the context variables of the task that opens the store.
            Context().run(self._loop.add_reader, descriptor, self._rung)
        except NotImplementedError:
            os.close(descriptor)
            return None
        return descriptor

    def _rung(self) -> None:
        assert self._descriptor is not None
        os.eventfd_read(self._descriptor)
        self._answer()

    def _answer(self) -> None:
        try:
            while self._deliveries:
                self._deliver(self._deliveries.popleft())
        finally:
            if self._deliveries:
                self._loop.call_soon(self._answer)
