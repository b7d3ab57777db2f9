"""A client for code without an event loop: scripts, Django, Flask.

A thread runs the event loop of a client or runtime. ``call`` runs any coroutine function of the
client or of a handle there, and waits for it. ``start`` is a method of its own because type
checkers cannot follow it through ``call``. Its handles have blocking methods.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    ParamSpec,
    TypeVar,
    TypeVarTuple,
    Unpack,
    cast,
    overload,
)

from perdure.authoring.context import require_scope
from perdure.client.client import Client
from perdure.errors import UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import NoReturn, Self

    from perdure.arguments import Duration
    from perdure.authoring.definitions import Activity, Orchestration
    from perdure.client.instance import Handle, InstanceStatus
    from perdure.client.starting import StartOptions

C = TypeVar("C", bound="Client")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class BlockingHandle(Generic[R]):
    """An instance by its id, for synchronous code. Each method does what ``Handle`` does."""

    __slots__ = ("_client", "handle", "id")

    def __init__(self, client: BlockingClient[Any], handle: Handle[R]) -> None:
        self.handle = handle
        """The handle for code with an event loop."""
        self.id = handle.id
        self._client = client

    def __repr__(self) -> str:
        return f"<BlockingHandle {self.id!r}>"

    def result(self, timeout: Duration | None = None) -> R:
        """Wait for the end and return the result."""
        return self._client.call(self.handle.result, timeout)

    def describe(self, *, waits: bool = True) -> InstanceStatus:
        """Return its status, custom status, times and open steps."""
        return self._client.call(self.handle.describe, waits=waits)

    def raise_event(self, name: str, value: object = None) -> None:
        """Send an event to ``wait_for_event(name, ...)``."""
        self._client.call(self.handle.raise_event, name, value)

    def send_message(self, queue: str, value: object = None) -> None:
        """Put a message into the mailbox that ``next_message(queue, ...)`` reads."""
        self._client.call(self.handle.send_message, queue, value)

    @overload
    def ask(
        self,
        name: str,
        value: object = None,
        *,
        timeout: Duration | None = ...,
        id: str | None = ...,
    ) -> Any: ...
    @overload
    def ask(
        self,
        name: str,
        value: object,
        type: type[T],
        *,
        timeout: Duration | None = ...,
        id: str | None = ...,
    ) -> T: ...
    def ask(
        self,
        name: str,
        value: object = None,
        type: Any = Any,  # noqa: A002
        *,
        timeout: Duration | None = None,
        id: str | None = None,  # noqa: A002
    ) -> Any:
        """Ask it, and return the reply of its ``requests(name)``."""
        ask: Callable[..., Awaitable[Any]] = self.handle.ask
        return self._client.call(ask, name, value, type, timeout=timeout, id=id)

    def peek(self, expression: str) -> Any:
        """Return a copy of a local variable of its code."""
        return self._client.call(self.handle.peek, expression)

    def cancel(self, reason: str = "") -> None:
        """Request its cancellation."""
        self._client.call(self.handle.cancel, reason)

    def terminate(self, reason: str = "") -> None:
        """End it now, without running its code."""
        self._client.call(self.handle.terminate, reason)

    def pause(self) -> None:
        """Stop running its turns until ``resume``."""
        self._client.call(self.handle.pause)

    def resume(self) -> None:
        """Continue after ``pause``, or retry a Blocked instance."""
        self._client.call(self.handle.resume)

    @overload
    def state(self, key: str) -> Any: ...
    @overload
    def state(self, key: str, type: type[T]) -> T | None: ...
    def state(self, key: str, type: Any = Any) -> Any:  # noqa: A002
        """Return the current value of a key of its ``state``, or None."""
        return self._client.call(self.handle.state, key, type)


class BlockingClient(Generic[C]):
    """A client or runtime for synchronous code.

    Every call runs on the event loop of the client and waits for the result:

        with BlockingClient(Client("shop.db")) as shop:
            handle = shop.start(checkout, "o-1", 1200, id="o-1")
            print(handle.result())

    ``call`` runs any other coroutine function: ``shop.call(shop.client.admin.count)``.
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

    if not TYPE_CHECKING:  # a type checker finds this by itself

        async def __aenter__(self) -> NoReturn:
            raise UsageError(
                "a BlockingClient is opened by 'with'; async code uses 'async with' and the Client"
            )

        async def __aexit__(self, *exception: object) -> None: ...

    def __exit__(self, *exception: object) -> None:
        try:
            self.call(self.client.__aexit__, *exception)
        finally:
            self._end()

    @overload
    def start(
        self,
        orchestration: Callable[[*Ts], Awaitable[R]],
        *args: *Ts,
        **options: Unpack[StartOptions],
    ) -> BlockingHandle[R]: ...
    @overload
    def start(
        self,
        orchestration: Orchestration[..., R] | Activity[..., R],
        *args: Any,
        kwargs: Mapping[str, Any],
        **options: Unpack[StartOptions],
    ) -> BlockingHandle[R]: ...
    @overload
    def start(
        self,
        orchestration: str,
        *args: Any,
        **options: Unpack[StartOptions],
    ) -> BlockingHandle[Any]: ...
    def start(  # type: ignore[misc]  # mypy does not accept *args: Any for *args: *Ts
        self, orchestration: Any, *args: Any, **options: Any
    ) -> BlockingHandle[Any]:
        """Start an instance of an orchestration, or of a name, as ``start`` of the client does."""
        handle = self.call(lambda: self.client.start(orchestration, *args, **options))
        return BlockingHandle(self, handle)

    @overload
    def get(self, id: str) -> BlockingHandle[Any]: ...
    @overload
    def get(self, id: str, orchestration: Orchestration[..., R]) -> BlockingHandle[R]: ...
    def get(self, id: str, orchestration: Any = None) -> BlockingHandle[Any]:  # noqa: A002
        """Return the handle of an instance. With its orchestration the result is typed."""
        return BlockingHandle(self, self.client.get(id, orchestration))

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


def blocking_activity_client() -> BlockingClient[Client]:
    """Return a client of the store on which the running activity works, for a plain function.

    As ``activity_client()``, for activities that run in threads:

        blocking_activity_client().start(ship, order, id=f"ship-{order}")
    """
    client, loop, thread = require_scope("blocking_activity_client()").client()
    made = BlockingClient(cast("Client", client))
    made._loop, made._thread = loop, thread  # noqa: SLF001
    return made
