"""A client for code without an event loop: scripts, Django, Flask.

A thread runs the event loop of a client or runtime. ``call`` runs any coroutine function of the
client or of a handle there, and waits for it. ``start`` is a method of its own because type
checkers cannot follow it through ``call``.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, TypeVarTuple, overload

from perdure.client.client import Client
from perdure.errors import UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType
    from typing import Self

    from perdure.arguments import Duration
    from perdure.authoring import Orchestration
    from perdure.client.client import IfExists
    from perdure.client.instance import Handle

C = TypeVar("C", bound="Client")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class BlockingClient(Generic[C]):
    """A client or runtime for synchronous code.

    Every call runs on the event loop of the client and waits for the result:

        with BlockingClient(Client("shop.db")) as shop:
            handle = shop.start(checkout, "o-1", 1200, id="o-1")
            print(shop.call(handle.result))
    """

    _loop: asyncio.AbstractEventLoop
    """Created on entering, so that a client that was never entered has nothing to close."""

    def __init__(self, client: C) -> None:
        if not isinstance(client, Client):
            raise UsageError(
                f"BlockingClient takes a Client or a Runtime, as in "
                f"BlockingClient(Client('shop.db')); not {client!r}"
            )
        self.client = client
        self._thread = threading.Thread(target=self._serve, name="perdure-portal", daemon=True)

    def __enter__(self) -> Self:
        if self._thread.ident is not None:
            raise UsageError(
                "this BlockingClient was entered already; make another one for another with-block"
            )
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        try:
            self.call(self.client.__aenter__)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.call(self.client.__aexit__, exc_type, exc, traceback)
        finally:
            self._end()

    @overload
    def start(
        self,
        orchestration: Callable[[*Ts], Awaitable[R]],
        *args: *Ts,
        id: str | None = None,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[R]: ...
    @overload
    def start(
        self,
        orchestration: Orchestration[..., R],
        *args: Any,
        kwargs: Mapping[str, Any],
        id: str | None = None,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[R]: ...
    @overload
    def start(
        self,
        orchestration: str,
        *args: Any,
        id: str | None = None,
        version: str | None = None,
        delay: Duration | None = None,
        if_exists: IfExists = "get",
    ) -> Handle[Any]: ...
    def start(  # type: ignore[misc]  # mypy does not accept *args: Any for *args: *Ts
        self, orchestration: Any, *args: Any, **options: Any
    ) -> Handle[Any]:
        """Start an instance of an orchestration, or of a name, as ``start`` of the client does."""
        return self.call(lambda: self.client.start(orchestration, *args, **options))

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a coroutine function of the client, or of a handle, and wait for its result."""
        _check_function(function)
        if not self._thread.is_alive():
            raise UsageError("use the client inside its with-block")
        if threading.current_thread() is self._thread:
            raise UsageError("this is the client's own event loop: await the call instead")

        async def run() -> T:
            answer = function(*args, **kwargs)
            if not inspect.isawaitable(answer):
                raise UsageError(
                    f"{function!r} gave {shown(answer)}, which cannot be awaited; call it without "
                    "the BlockingClient"
                )
            return await answer

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            # In this thread, because the caller may have a running event loop of its own.
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _check_function(function: object) -> None:
    if inspect.iscoroutine(function):
        name = function.__name__
        function.close()  # it has not begun and never will
        raise UsageError(
            f"call runs {name} itself: write call(client.{name}, ...) without calling it, the "
            "arguments behind it"
        )
    if not callable(function):
        raise UsageError(
            f"call takes a method and its arguments, as in call(client.start, checkout, 'o-1'); "
            f"not {shown(function)}"
        )
