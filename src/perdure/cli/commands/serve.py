"""``perdure serve``: the dashboard, the JSON API and health checks on one port."""

from __future__ import annotations

import ipaddress
import logging
import webbrowser
from typing import Any

import click

from perdure.cli.command import command, module_option
from perdure.cli.render import Cell, echo, note
from perdure.cli.session import Session, current_settings, run
from perdure.errors import UsageError

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@command(
    "serve",
    examples=[
        "perdure serve",
        "perdure serve shop.db -m shop.flows --open",
        "perdure serve --listen 0.0.0.0:7700 --tokens tokens.txt --allow-host ops.example.com",
    ],
)
@click.argument("place", metavar="[STORE]", required=False)
@click.option("--listen", metavar="HOST:PORT", default="127.0.0.1:7700", show_default=True)
@click.option(
    "--tokens", metavar="FILE", help="File with lines of NAME SCOPE TOKEN; read, operate, admin."
)
@click.option("--read-only", is_flag=True, help="Refuse every write.")
@click.option(
    "--allow-host", "hosts", multiple=True, help="Another host name under which the server answers."
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@module_option
def serve(
    place: str | None,
    listen: str,
    tokens: str | None,
    read_only: bool,
    hosts: tuple[str, ...],
    opens: bool,
    modules: tuple[str, ...],
) -> None:
    """Serve a page to look at the store and to act on it, with a JSON API and health checks.

    The page listens on this machine only, unless --listen says otherwise; then --tokens is needed.
    Each action of the page is a line on standard error: who, what, which instances.
    With -m MODULE the page shows source and local variables of running instances, and forms.
    STORE is the same as --store.
    """
    if place is not None:
        settings = current_settings()
        if settings.store_flag not in {None, place}:
            raise UsageError(f"either {place!r} or --store {settings.store_flag!r}, not both")
        settings.store_flag = place
    try:
        from perdure.dashboard import dashboard, read_tokens
        from perdure.dashboard.server import Server
    except ImportError as error:
        raise UsageError(
            f"the dashboard needs the extra ui: pip install 'perdure[ui]' ({error})"
        ) from None
    host, port = _address(listen)
    is_local = host in _LOCAL_NAMES
    if not is_local and tokens is None:
        raise UsageError(
            f"{listen} can be reached by others, so it needs --tokens FILE; or listen on 127.0.0.1"
        )
    known = [] if tokens is None else read_tokens(tokens)
    names = [*_LOCAL_NAMES, host, *hosts]
    registry: Any = None
    if modules:
        from perdure.cli.modules import load_code

        registry, _ = load_code(modules, "perdure serve -m")

    async def body(session: Session) -> None:
        app = dashboard(
            session.client,
            tokens=known,
            read_only=read_only,
            hosts=None if host == "0.0.0.0" and not hosts else names,  # noqa: S104
            registry=registry,
        )
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}/"
        server = Server(app, host=host, port=port, log_level="warning")
        echo("serving ", Cell(address, "bold"), "" if tokens is None else " (with tokens)")
        note("Ctrl-C ends it")
        if opens:
            webbrowser.open(address)
        from perdure.cli.commands.workers import start_logging

        start_logging("warning", "text")
        logging.getLogger("perdure.audit").setLevel("INFO")
        await server.serve()

    run(body)


def _address(listen: str) -> tuple[str, int]:
    from perdure.runtime.health import parse_address

    host, port = parse_address(listen, "--listen")
    if host not in _LOCAL_NAMES:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise UsageError(
                f"--listen {listen!r}: {host!r} is no address; write 127.0.0.1, 0.0.0.0 or [::]"
            ) from None
    return host, port
