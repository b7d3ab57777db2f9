"""``perdure new`` and ``perdure completion``: a program to start from; ids and names in a shell."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from perdure.cli.command import command
from perdure.cli.exits import writing
from perdure.cli.render import Cell, echo, print_done, suggest
from perdure.cli.session import Session, open_session
from perdure.cli.settings import Settings
from perdure.errors import PerdureError
from perdure.providers.records import InstanceQuery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TEMPLATES: Final = {
    "hello": "one orchestration, two activities",
    "approval": "wait for a person, with a time limit",
    "saga": "undo what was done when a later step fails",
    "pipeline": "fan out over many items, a few at a time",
    "agent": "a loop of model calls and tools that survives restarts",
}


@command(
    "new",
    store=False,
    examples=["perdure new", "perdure new saga orders.py", "perdure new --list"],
)
@click.argument("template", type=click.Choice(list(TEMPLATES)), default="hello")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--list", "is_list", is_flag=True, help="Show the templates.")
def new(template: str, file: Path | None, is_list: bool) -> None:
    """Write a small runnable program to FILE (default: TEMPLATE.py). Nothing is overwritten."""
    if is_list:
        for name, purpose in TEMPLATES.items():
            echo(Cell(f"{name:<10}", "bold"), purpose)
        return
    target = file or Path(f"{template}.py")
    shown = shlex.quote(str(target))
    source = resources.files("perdure.cli").joinpath("templates", f"{template}.py.txt")
    program = source.read_text(encoding="utf-8").replace(f" {template}.py\n", f" {shown}\n")
    with writing(target, "new"), target.open("x", encoding="utf-8") as opened:
        opened.write(program)
    print_done(f"wrote {target}")
    suggest(f"python {shown}", f"perdure dev {shown}")


@command(
    "completion",
    store=False,
    examples=[
        "perdure completion bash >> ~/.bashrc",
        "perdure completion zsh > ~/.zfunc/_perdure",
        "perdure completion fish > ~/.config/fish/completions/perdure.fish",
    ],
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell; see the examples for where it goes."""
    use_quoting()
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(
        click.get_current_context().find_root().command, {}, "perdure", "_PERDURE_COMPLETE"
    )
    # Not .source(): for bash it would start a shell to ask for its version.
    sys.stdout.write(script.source_template % script.source_vars())


# --- ids and names, quoted for the shell

_ITEMS_MAX: Final = 50
_SAMPLE: Final = 500
"""The newest instances, whose names are offered beside those of running workers."""


class QuotingBash(BashComplete):
    """Quotes values for bash, which inserts them as they are: an id may hold ``$(...)``."""

    source_template = (
        BashComplete.source_template.replace("($value)", '("$value")')
        # Values with a backslash, a comma at the end or a pattern stay as they are.
        .replace("for completion in $response; do", "while IFS= read -r completion; do")
        .replace(
            "IFS=',' read type value <<< \"$completion\"",
            "local type=${completion%%%%,*} value=${completion#*,}",
        )
        .replace("    done\n", '    done <<< "$response"\n')
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        args = split_arg_string("\n".join(self._words))
        incomplete = args.pop() if self._words[-1] else ""
        return args[1:], incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        items = super().get_completions(args, incomplete)
        return [item for item in items if self._quoted(item.value) is not None]

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{self._quoted(item.value)}"

    @cached_property
    def _words(self) -> list[str]:
        """The words up to the cursor. Bash splits them at ``:`` and ``=``, which ids may hold."""
        place = int(os.environ.get("COMP_CWORD", "0"))
        words = os.environ.get("COMP_WORDS", "").split("\n")[: place + 1]
        return re.sub(r"\n([:=]+)(?:\n(?!$)|$)", r"\1", "\n".join(words)).split("\n")

    def _quoted(self, value: Any) -> str | None:
        """Return the text to insert; None if no text would be safe after an open quote."""
        text, word = str(value), self._words[-1]
        if word[:1] not in {"'", '"'}:
            # Bash replaces what follows the last : or =.
            kept = word[: max(word.rfind(":"), word.rfind("=")) + 1]
            return shlex.quote(text.removeprefix(kept)) if text != kept else ""
        if shlex.quote(text) == text:
            return text
        return text if word[0] == "'" and "'" not in text else None


class EscapingZsh(ZshComplete):
    """Keeps backslashes, which zsh takes away from a value with a description."""

    def format_completion(self, item: CompletionItem) -> str:
        if item.help:
            item.value = str(item.value).replace("\\", r"\\")
        return super().format_completion(item)


class SplittingFish(FishComplete):
    """Keeps commas: fish takes a value up to the first one."""

    source_template = FishComplete.source_template.replace('split ","', 'split --max 1 ","')


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
    """Put our classes in the place of click's own."""
    for each in (QuotingBash, EscapingZsh, SplittingFish):
        add_completion_class(each)
