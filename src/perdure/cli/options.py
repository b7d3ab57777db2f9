"""Options and arguments that several commands share, spelled the same everywhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import click

from perdure.errors import InvalidValue, PerdureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

F = TypeVar("F", bound="Callable[..., Any]")

_COMPLETIONS_MAX = 50


def output_option(*formats: str) -> Callable[[F], F]:
    """``-o``: the first format is the default."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help="Form of the output.",
    )


def module_option() -> Callable[[F], F]:
    return click.option(
        "-m",
        "--module",
        "modules",
        metavar="MODULE",
        multiple=True,
        help="Where the orchestrations are: shop.flows, flows.py or shop.flows:HANDLERS. "
        "Default: $PERDURE_MODULE, pyproject.toml [tool.perdure] module.",
    )


def id_argument(name: str = "instance_id", **extra: Any) -> Callable[[F], F]:
    metavar = extra.pop("metavar", "ID")
    return click.argument(name, metavar=metavar, shell_complete=complete_ids, **extra)


def execution_option() -> Callable[[F], F]:
    return click.option(
        "--execution",
        type=click.IntRange(min=1),
        metavar="N",
        help="That execution instead of the latest (they count up with continue-as-new).",
    )


def log_option() -> Callable[[F], F]:
    return click.option(
        "--log",
        "log_level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Messages of at least that weight.",
    )


def duration_option(flag: str, name: str, help: str) -> Callable[[F], F]:  # noqa: A002
    """``500ms``, ``30s``, ``5m``, ``2h30m``, ``7d``; gives milliseconds."""
    return click.option(flag, name, metavar="TIME", callback=_milliseconds, help=help)


def _milliseconds(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    from perdure.client.durations import parse_duration_ms

    if value is None:
        return None
    try:
        return parse_duration_ms(value)
    except InvalidValue as error:
        raise click.BadParameter(str(error), context, parameter) from None


def complete_ids(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Ids that begin like this, from the store; nothing at all when it cannot be read."""
    from click.shell_completion import CompletionItem

    from perdure.cli.session import Session, open_session
    from perdure.cli.settings import Settings
    from perdure.providers.items import InstanceQuery

    settings: Settings = context.find_root().obj or Settings()
    settings.store_flag = context.params.get("store") or settings.store_flag

    async def body(session: Session) -> list[CompletionItem]:
        query = InstanceQuery(id_prefix=incomplete) if incomplete else None
        page = await session.admin.list_instances(query, limit=_COMPLETIONS_MAX)
        return [
            CompletionItem(info.instance_id, help=f"{info.name} {info.status}")
            for info in page.instances
        ]

    try:
        return asyncio.run(open_session(body, settings, settings.existing_store()))
    except (PerdureError, OSError):
        return []
