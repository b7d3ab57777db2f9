"""Write the reference page of the command line from the commands' own help.

``PYTHONPATH=tests .venv/bin/python -m cli.reference > docs/reference/commands.md``
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

import click

from perdure.cli.command import Command
from perdure.cli.main import root

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = """\
# Commands

Written by `tests/cli/reference.py` from the commands' own help.

Every command takes `--store URL` and `--traceback`. The store is the one of the flag, else of
`$PERDURE_STORE`, else of `store` in the table `[tool.perdure]` of `pyproject.toml`, else
`./perdure.db`. Output for people goes to a terminal in colour (`NO_COLOR` is respected) and to a
pipe as plain lines; `-o json` and `-o jsonl` print JSON and nothing else.

An id that begins with `-` looks like an option. Write `--` before it: `perdure show -- -x`. To hand
a list of ids to another command, use `--ids-from -` instead of `xargs`:
`perdure list -o ids | perdure purge --ids-from - -y`.

| exit code | meaning |
|---|---|
| 0 | ok |
| 1 | error |
| 2 | wrong usage or bad input |
| 3 | no such instance, execution or store |
| 4 | the instance failed, was cancelled or terminated |
| 5 | timed out |
| 6 | conflict, or refused by the store |
| 130 | interrupted |
| 141 | the reader of the output closed the pipe |
"""
_SHARED = frozenset({"--store", "--traceback", "--help"})


def reference() -> str:
    parts = [_HEAD]
    context = click.Context(root, info_name="perdure")
    for heading, commands in root.sections.items():
        parts.append(f"## {heading}\n")
        for name in commands:
            found = root.get_command(context, name)
            assert found is not None
            parts += _pages(found, f"perdure {name}", context)
    return "\n".join(parts)


def _pages(found: click.Command, path: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(found, info_name=path.rpartition(" ")[2], parent=parent)
    if isinstance(found, click.Group):
        for name in found.list_commands(context):
            member = found.get_command(context, name)
            assert member is not None
            yield from _pages(member, f"{path} {name}", context)
    elif isinstance(found, Command):
        yield _page(found, path, context)


def _page(found: Command, path: str, context: click.Context) -> str:
    usage = " ".join(found.collect_usage_pieces(context))
    lines = [f"### {path}\n", f"```text\n{path} {usage}\n```\n", inspect.cleandoc(found.help or "")]
    rows = [
        row
        for parameter in found.get_params(context)
        if isinstance(parameter, click.Option)
        and not _SHARED & set(parameter.opts)
        and (row := parameter.get_help_record(context)) is not None
    ]
    if rows:
        # No table: a choice like [a|b] needs escapes there, and the page would show them.
        lines.append("")
        lines += [f"- `{option}`: {text}" for option, text in rows]
    examples = "\n".join(found.examples)
    lines.append(f"\n```console\n{examples}\n```\n")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(reference())
