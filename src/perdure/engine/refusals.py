"""What an event loop can do and an orchestration must not: refused with a reason and a way out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from perdure.engine.sites import call_site
from perdure.errors import ForbiddenInOrchestration

if TYPE_CHECKING:
    from collections.abc import Callable

    _AbstractLoop = asyncio.BaseEventLoop  # the standard loop declares what is set below
else:
    _AbstractLoop = asyncio.AbstractEventLoop

_REAL_WORK = "an orchestration must not do real work itself; make it an activity"
_OWN_LOOP = "the event loop of an orchestration is driven by its history"

_REFUSED = {
    _REAL_WORK: (
        "run_in_executor getaddrinfo getnameinfo create_connection create_server "
        "create_unix_connection create_unix_server create_datagram_endpoint start_tls sendfile "
        "connect_accepted_socket connect_read_pipe connect_write_pipe subprocess_exec "
        "subprocess_shell add_reader remove_reader add_writer remove_writer sock_recv "
        "sock_recv_into sock_recvfrom sock_recvfrom_into sock_sendall sock_sendto sock_connect "
        "sock_accept sock_sendfile add_signal_handler remove_signal_handler "
        "set_default_executor shutdown_default_executor call_soon_threadsafe"
    ),
    _OWN_LOOP: (
        "run_forever run_until_complete stop close shutdown_asyncgens set_task_factory "
        "get_task_factory set_debug set_exception_handler get_exception_handler"
    ),
}


class RefusingLoop(_AbstractLoop):
    """An event loop that can do nothing at all; a subclass adds what is allowed."""


def _refused(name: str, advice: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ForbiddenInOrchestration(f"loop.{name}() at {call_site()}: {advice}")

    refuse.__name__ = name
    return refuse


for _advice, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(RefusingLoop, _name, _refused(_name, _advice))
