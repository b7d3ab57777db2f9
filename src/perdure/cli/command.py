"""Commands with examples in their help, the options that they share, and lazy groups."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from perdure.errors import InvalidValue, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from click.shell_completion import CompletionItem

SETTINGS: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def store_option() -> click.Option:
    return _setting(
        "--store",
        "store_flag",
        metavar="URL",
        help="The store: shop.db, sqlite:///shop.db, file:./dir, postgresql://... "
        "Default: $PERDURE_STORE, pyproject.toml [tool.perdure] store, ./perdure.db.",
    )


def traceback_option() -> click.Option:
    return _setting(
        "--traceback", "traceback", is_flag=True, help="Show the Python traceback of an error."
    )


def _setting(flag: str, field: str, **extra: Any) -> click.Option:
    """Return an option whose value, if it is given, becomes a field of the ``Settings``."""

    def keep(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value not in {None, False}:
            setattr(context.find_root().obj, field, value)

    return click.Option([flag], expose_value=False, callback=keep, **extra)


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
    """Return the decorator that makes a ``Command``: ``@command("list", examples=[...])``.

    An async function gets the open store, a ``Session``, as its first argument.
    """

    def decorate(function: Callable[..., Any]) -> Command:
        callback = _with_session(function) if iscoroutinefunction(function) else function
        made = click.command(name, cls=Command, examples=examples, store=store, **kwargs)
        return made(callback)

    return decorate


def _with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def callback(**given: Any) -> Any:
        from perdure.cli.session import run

        return run(lambda session: function(session, **given))

    return callback


class Group(click.Group):
    """A group of commands in the order of their definition; it names similar ones."""

    def __init__(self, name: str, *, help: str) -> None:  # noqa: A002
        super().__init__(
            name,
            help=help,
            no_args_is_help=True,
            params=[store_option(), traceback_option()],
            context_settings=SETTINGS,
        )

    def add(self, name: str, **options: Any) -> Callable[[Callable[..., Any]], Command]:
        """Return the decorator that makes a command of this group, as ``command`` does."""

        def decorate(function: Callable[..., Any]) -> Command:
            made = command(name, **options)(function)
            self.add_command(made)
            return made

        return decorate

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        wanted = args[0]
        if self.get_command(ctx, wanted) is None and not wanted.startswith("-"):
            meant = did_you_mean(wanted, self.list_commands(ctx), most=3)
            ctx.fail(f"there is no command '{wanted}'{meant}")
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group that imports a command's module only when the command is invoked.

    ``sections`` maps a heading to its commands: name to (``module:attribute``, short help). The
    modules are in ``perdure.cli.commands``.
    """

    def __init__(
        self,
        name: str,
        *,
        help: str,  # noqa: A002
        sections: Mapping[str, Mapping[str, tuple[str, str]]],
        aliases: Mapping[str, str],
    ) -> None:
        super().__init__(name, help=help)
        self.sections = sections
        self._aliases = aliases
        self._entries = {
            name: entry for group in sections.values() for name, entry in group.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries.get(self._aliases.get(cmd_name, cmd_name))
        if entry is None:
            return None
        home, short_help = entry
        module, _, attribute = home.partition(":")
        found: click.Command = getattr(import_module(f"perdure.cli.commands.{module}"), attribute)
        found.short_help = short_help
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, help_text) for name, (_, help_text) in commands.items()])


F = TypeVar("F", bound="Callable[..., Any]")


def combined(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return one decorator that adds several options and arguments, in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def output_option(*formats: str) -> Callable[[F], F]:
    """Return the option ``-o``; the first format is its default."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help="Form of the output.",
    )


LIMIT_MAX: Final = 10_000


def limit_option(default: int) -> Callable[[F], F]:
    return click.option(
        "--limit",
        metavar="N",
        type=click.IntRange(1, LIMIT_MAX),
        default=default,
        show_default=True,
        help="At most this many; the last line says if there are more.",
    )


def data_option() -> Callable[[F], F]:
    """Return the option ``--data``. It is read before the store is opened."""

    def read(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Any:
        from perdure.cli.inputs import read_json

        return None if text is None else read_json(text, "--data")

    return click.option(
        "--data",
        metavar="JSON",
        callback=read,
        help="The value. Default: null. @file, or - for standard input.",
    )


yes_option: Final = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
query_option: Final = click.option(
    "--query", metavar="QUERY", help="All instances that fit; see perdure list --help."
)
module_option: Final = click.option(
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


def ids_argument() -> Callable[[F], F]:
    """Return the argument ``[ID]...``, joined with the ids of the option ``--ids-from``."""

    def decorate(function: F) -> F:
        @wraps(function)
        def joined(
            *args: Any, ids_from: str | None, instance_ids: Sequence[str], **given: Any
        ) -> Any:
            from perdure.cli.inputs import read_ids
            from perdure.cli.render import warn

            ids = (*instance_ids, *(() if ids_from is None else read_ids(ids_from)))
            if ids_from is not None and not ids:
                warn(f"--ids-from {ids_from} names no instance: nothing is done")
                return 0
            return function(*args, instance_ids=ids, **given)

        return combined(
            click.argument(
                "instance_ids", metavar="[ID]...", nargs=-1, shell_complete=complete_ids
            ),
            click.option(
                "--ids-from",
                metavar="FILE",
                help="Also the ids in this file, one a line; - for a pipe.",
            ),
        )(joined)  # type: ignore[return-value]

    return decorate


log_option: Final = click.option(
    "--log",
    "log_level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The lowest level of messages to print.",
)


def duration_option(flag: str, name: str, help: str) -> Callable[[F], F]:  # noqa: A002
    """Return an option that takes ``500ms``, ``30s``, ``2h30m`` or ``7d``, in milliseconds."""
    return click.option(flag, name, metavar="TIME", callback=_milliseconds, help=help)


def _milliseconds(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    from perdure.arguments import parse_duration_ms

    if value is None:
        return None
    try:
        return parse_duration_ms(value)
    except InvalidValue as error:
        raise click.BadParameter(str(error), context, parameter) from None


def complete_ids(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from perdure.cli.commands import setup

    return setup.complete_ids(context, incomplete)


def complete_names(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from perdure.cli.commands import setup

    return setup.complete_names(context, incomplete)
