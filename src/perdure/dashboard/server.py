"""A server for the dashboard alone. When it stops, it first ends the streams of open pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    import socket

    from starlette.applications import Starlette

_STOP_SECONDS = 2


class Server(uvicorn.Server):
    """A server of uvicorn that does not wait for pages, which stay open for hours."""

    def __init__(self, app: Starlette, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app, access_log=False, timeout_graceful_shutdown=_STOP_SECONDS, **options
            )
        )
        self._end_streams = app.state.end_streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
        await super().shutdown(sockets)
