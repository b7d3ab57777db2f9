"""``perdure completion``: the script that makes a shell complete commands, options and ids."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from perdure.cli.command import command


@command(
    "completion",
    store=False,
    short_help="Print the completion script of a shell.",
    examples=[
        "perdure completion bash >> ~/.bashrc",
        "perdure completion zsh > ~/.zfunc/_perdure",
        "perdure completion fish > ~/.config/fish/completions/perdure.fish",
    ],
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell; see the examples for where it goes."""
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(
        click.get_current_context().find_root().command, {}, "perdure", "_PERDURE_COMPLETE"
    )
    # Not .source(): for bash that would start one to ask for its version.
    sys.stdout.write(script.source_template % script.source_vars())
