"""Commands with examples in their help and the options that all share; groups that load lazily."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from perdure.cli.settings import Settings

SETTINGS: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _keep_store(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        settings: Settings = context.find_root().obj
        settings.store_flag = value


def _keep_traceback(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        settings: Settings = context.find_root().obj
        settings.traceback = True


def store_option() -> click.Option:
    return click.Option(
        ["--store"],
        metavar="URL",
        expose_value=False,
        callback=_keep_store,
        help="The store: shop.db, sqlite:///shop.db, file:./dir, postgresql://... "
        "Default: $PERDURE_STORE, pyproject.toml [tool.perdure] store, ./perdure.db.",
    )


def traceback_option() -> click.Option:
    return click.Option(
        ["--traceback"],
        is_flag=True,
        expose_value=False,
        callback=_keep_traceback,
        help="Show the Python traceback of an error.",
    )


class Command(click.Command):
    """A command whose help ends with examples."""

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), store: bool = True, **kwargs: Any
    ) -> None:
        kwargs["context_settings"] = SETTINGS | (kwargs.get("context_settings") or {})
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        if store:
            self.params.append(store_option())
        self.params.append(traceback_option())

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def command(
    name: str, *, examples: Sequence[str], store: bool = True, **kwargs: Any
) -> Callable[[Callable[..., Any]], Command]:
    """``@command("list", examples=[...])``"""
    return click.command(name, cls=Command, examples=examples, store=store, **kwargs)


class LazyGroup(click.Group):
    """Knows its commands by name and one line of help; imports one when it is invoked.

    ``sections`` maps a heading to its commands: name to (``module:attribute``, short help).
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Mapping[str, tuple[str, str]]],
        aliases: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["context_settings"] = SETTINGS
        super().__init__(*args, **kwargs)
        self.sections = sections
        self.aliases = dict(aliases or {})
        self.homes = {
            name: home for group in sections.values() for name, (home, _) in group.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = self.homes.get(self.aliases.get(cmd_name, cmd_name))
        if home is None:
            return None
        module, _, attribute = home.partition(":")
        found: click.Command = getattr(import_module(module), attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        wanted = args[0]
        if self.get_command(ctx, wanted) is None and not wanted.startswith("-"):
            near = difflib.get_close_matches(wanted, [*self.homes, *self.aliases], n=3)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"there is no command '{wanted}'{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, help_text) for name, (_, help_text) in commands.items()])
