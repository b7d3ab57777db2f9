"""``perdure worker``: runs orchestrations and activities until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.command import command
from perdure.cli.options import duration_option, log_option
from perdure.cli.session import current_settings
from perdure.cli.settings import shown_store

if TYPE_CHECKING:
    from perdure.runtime.options import RuntimeOptions

logger = logging.getLogger("perdure")


@command(
    "worker",
    short_help="Run orchestrations and activities on the store.",
    examples=[
        "perdure worker shop.flows",
        "perdure worker flows.py --store shop.db --slots 50",
        "perdure worker shop.flows shop.mail --tag gpu --drain 1m",
    ],
)
@click.argument("modules", metavar="[MODULE]...", nargs=-1)
@click.option(
    "--slots", metavar="N", type=click.IntRange(min=1), help="Activities at once. Default: 1000."
)
@click.option(
    "--threads", metavar="N", type=click.IntRange(min=1), help="For sync activities. Default: 32."
)
@click.option("--tag", "tags", multiple=True, help="Also run activities with this tag; up to 5.")
@click.option("--only-tags", is_flag=True, help="With --tag: no untagged activities.")
@click.option(
    "--name",
    "worker_id",
    help="A stable name, of one worker at a time: sessions survive a restart.",
)
@duration_option("--drain", "drain_ms", "Time to finish when stopped. Default: 10s.")
@duration_option(
    "--lock",
    "lock_ms",
    "How long its work stays locked if this process dies; renewed while it lives.",
)
@log_option()
def worker(modules: tuple[str, ...], log_level: str, **options: Any) -> None:
    """Run the handlers of the modules: shop.flows, flows.py, or shop.flows:HANDLERS.

    A Codec at the top of the module is used for all payloads. SIGTERM or Ctrl-C drains: what runs
    may finish, nothing new is taken. Again: ends at once.
    """
    from perdure.authoring.registry import Registry
    from perdure.cli.logs import start_logging
    from perdure.cli.modules import load_codec, load_handlers
    from perdure.cli.repeating import warnings_of
    from perdure.runtime.runtime import Runtime

    settings = current_settings()
    named = settings.modules(modules)
    handlers = load_handlers(named, "perdure worker")
    codec = load_codec(named)
    chosen = _options(**options)
    start_logging(log_level)
    for warning in warnings_of(Registry(handlers)):
        logger.warning(warning)
    logger.info("serving %s; Ctrl-C or SIGTERM drains", shown_store(settings.store()))

    async def serve() -> None:
        runtime = Runtime(settings.store(), handlers, options=chosen, codec=codec)
        await runtime.serve()
        if runtime.left_behind:
            # Python would wait for their threads. As safe as a crash: no lock is held any more.
            logging.shutdown()
            os._exit(0)

    asyncio.run(serve())


def _options(
    *,
    slots: int | None,
    threads: int | None,
    tags: tuple[str, ...],
    only_tags: bool,
    worker_id: str | None,
    drain_ms: int | None,
    lock_ms: int | None,
) -> RuntimeOptions:
    from perdure.errors import UsageError
    from perdure.providers.items import TagFilter
    from perdure.runtime.options import RuntimeOptions

    given: dict[str, Any] = {"activity_slots": slots, "threads": threads, "worker_id": worker_id}
    if drain_ms is not None:
        given["drain_seconds"] = drain_ms / 1000
    if lock_ms is not None:
        given |= {
            "orchestration_lock_seconds": lock_ms / 1000,
            "activity_lock_seconds": lock_ms / 1000,
        }
    if only_tags and not tags:
        raise UsageError("--only-tags needs at least one --tag")
    if tags:
        given["tags"] = TagFilter.only(*tags) if only_tags else TagFilter.default_and(*tags)
    return RuntimeOptions(**{name: value for name, value in given.items() if value is not None})
