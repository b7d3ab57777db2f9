"""Shell completion: ids of instances and names of orchestrations, quoted for the shell."""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import TYPE_CHECKING, Any, Final

from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from perdure.cli.session import Session, open_session
from perdure.cli.settings import Settings
from perdure.errors import PerdureError
from perdure.providers.records import InstanceQuery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import click

_ITEMS_MAX: Final = 50
_SAMPLE: Final = 500
"""The newest instances, whose names are offered beside those of running workers."""


class QuotingBash(BashComplete):
    """Quotes values for bash, which inserts them as they are: an id may hold ``$(...)``.

    The other shells quote what they insert.
    """

    source_template = BashComplete.source_template.replace("($value)", '("$value")')

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        items = super().get_completions(args, incomplete)
        return [item for item in items if self._quoted(item.value) is not None]

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{self._quoted(item.value)}"

    def _quoted(self, value: Any) -> str | None:
        """Return the text to insert; None if no text would be safe after an open quote."""
        text = str(value)
        quoted = shlex.quote(text)
        words = os.environ.get("COMP_WORDS", "").split("\n")
        place = int(os.environ.get("COMP_CWORD", "0"))
        word = words[place] if place < len(words) else ""
        if quoted == text or word[:1] not in {"'", '"'}:
            return quoted
        return text if word[0] == "'" and "'" not in text else None


def complete_ids(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the stored ids that begin with ``incomplete``."""

    async def body(session: Session) -> list[CompletionItem]:
        query = InstanceQuery(id_prefix=incomplete) if incomplete else None
        page = await session.admin.list_instances(query, limit=_ITEMS_MAX)
        return [
            CompletionItem(info.instance_id, help=f"{info.name} {info.status}")
            for info in page.instances
        ]

    return _ask(context, body)


def complete_names(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the orchestrations of running workers and of the newest instances."""

    async def body(session: Session) -> list[CompletionItem]:
        workers = await session.admin.list_workers()
        served = {name for worker in workers for name, _ in worker.handlers}
        page = await session.admin.list_instances(None, limit=_SAMPLE)
        names = sorted(served | {info.name for info in page.instances})
        return [
            CompletionItem(name, help="a worker has it" if name in served else "no worker has it")
            for name in names
            if name.startswith(incomplete)
        ][:_ITEMS_MAX]

    return _ask(context, body)


def _ask(
    context: click.Context, body: Callable[[Session], Awaitable[list[CompletionItem]]]
) -> list[CompletionItem]:
    """Return what the body finds in the store, or [] if the store is unreadable."""
    settings: Settings = context.find_root().obj or Settings()
    settings.store_flag = context.params.get("store") or settings.store_flag
    try:
        return asyncio.run(open_session(body, settings, settings.existing_store()))
    except (PerdureError, OSError):
        return []


def use_quoting() -> None:
    """Put the quoting class in the place of click's own for bash."""
    add_completion_class(QuotingBash)
