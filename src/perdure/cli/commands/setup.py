"""``perdure new`` and ``perdure completion``: a program to start from, and shell completion."""

from __future__ import annotations

import shlex
import sys
from importlib import resources
from pathlib import Path
from typing import Final

import click
from click.shell_completion import get_completion_class

from perdure.cli.command import command
from perdure.cli.render import Cell, echo, print_done, suggest
from perdure.errors import AlreadyExists, StoreUnavailable

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
    try:
        with target.open("x", encoding="utf-8") as opened:
            opened.write(program)
    except FileExistsError:
        raise AlreadyExists(f"{str(target)!r} exists already; name another file") from None
    except OSError as error:
        raise StoreUnavailable("new", f"cannot write {str(target)!r}: {error.strerror}") from error
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
    from perdure.cli.completion import use_quoting

    use_quoting()
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(
        click.get_current_context().find_root().command, {}, "perdure", "_PERDURE_COMPLETE"
    )
    # Not .source(): for bash it would start a shell to ask for its version.
    sys.stdout.write(script.source_template % script.source_vars())
