"""The entry point: run a command, and turn each error into one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from perdure.cli.command import LazyGroup
from perdure.cli.exits import Exit, code_of, is_expected, line_of
from perdure.cli.settings import Settings
from perdure.errors import UsageError
from perdure.escape import ESCAPED, clean
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

SECTIONS = {
    "Run": {
        "dev": ("workers:dev", "Run a worker and restart it when the code changes."),
        "worker": ("workers:worker", "Run orchestrations and activities on the store."),
        "new": ("setup:new", "Write a small program to start from."),
        "start": ("start:start", "Start an instance of an orchestration."),
    },
    "Look": {
        "serve": ("serve:serve", "Serve the dashboard, the JSON API and health checks."),
        "list": ("list:list_command", "List instances, newest first. Short: ls."),
        "count": ("list:count", "Count instances."),
        "show": ("show:show", "Say what an instance is doing, and show its steps."),
        "history": ("show:history", "Print the events of an instance."),
        "tree": ("show:tree", "Show an instance with its children."),
        "stack": ("show:stack", "Show the line where each branch of the code waits."),
        "peek": ("show:peek", "Print a local variable of the code of an instance."),
        "result": ("start:result", "Wait for the end of an instance, print its result."),
        "watch": ("watch:watch", "Follow one instance, or the whole store, live."),
        "workers": ("workers:workers", "List the workers that serve the store."),
    },
    "Act": {
        "send": ("start:send", "Send an event or a message to an instance."),
        "ask": ("start:ask", "Ask an instance and print its reply."),
        "cancel": ("act:cancel", "Ask instances to stop and clean up."),
        "terminate": ("act:terminate", "End instances now, without running their code."),
        "pause": ("act:pause", "Let no further turn of instances run."),
        "resume": ("act:resume", "Let paused instances go on."),
        "retry": ("act:retry", "Let blocked or failed instances go on where they stand."),
        "rerun": ("act:rerun", "Run an instance again under another id."),
        "promises": ("start:promises", "List the promises without an answer."),
        "resolve": ("start:resolve", "Give a promise its value, or reject it."),
        "schedule": (
            "schedule:schedule",
            "Look at schedules; pause, trigger, backfill or remove them.",
        ),
        "purge": ("act:purge", "Delete instances that have ended."),
    },
    "Check and move": {
        "replay": ("replay:replay", "Replay histories against today's code."),
        "diff": ("replay:diff", "Compare the steps of two instances."),
        "export": ("export:export", "Write instances to a file."),
        "import": ("export:import_command", "Read instances from a file."),
        "db": ("db:db", "Look after the store: info, check, backup, copy, prune."),
        "dead-letters": (
            "dead_letters:dead_letters",
            "Look at undeliverable messages; requeue or delete them.",
        ),
        "doctor": ("doctor:doctor", "Check the machine, the store and its surroundings."),
        "completion": ("setup:completion", "Print the completion script of a shell."),
    },
}


# Click 8.1 has no such error: it prints the help itself.
_NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)])
)


class _Ended(Exception):
    """The command was interrupted; click would turn the cause into exit codes of its own."""

    def __init__(self, code: Exit) -> None:
        super().__init__(code)
        self.code = code


@contextmanager
def _catching_interruptions() -> Generator[None]:
    """Raise ``_Ended`` with the exit code of Ctrl-C, and of a pipe that its reader has closed."""
    try:
        yield
    except BrokenPipeError:
        raise _Ended(Exit.PIPE_CLOSED) from None
    except KeyboardInterrupt:
        raise _Ended(Exit.INTERRUPTED) from None


class Root(LazyGroup):
    """Runs commands with Perdure's messages and exit codes instead of click's."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _catching_interruptions():  # --help and --version print here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _catching_interruptions():
            return super().invoke(ctx)

    def main(self, args: Sequence[str] | None = None, *_ignored: Any, **extra: Any) -> NoReturn:
        settings = Settings()
        prog_name = extra.get("prog_name") or "perdure"
        _stand_in_for_closed_streams()
        try:
            code = self._run(args, prog_name, settings, extra)
            sys.stderr.flush()
            sys.stdout.flush()
        except BrokenPipeError:
            _close_output()
            code = Exit.PIPE_CLOSED
        sys.exit(code)

    def _run(
        self,
        args: Sequence[str] | None,
        prog_name: str,
        settings: Settings,
        extra: dict[str, Any],
    ) -> int:
        _tolerate_encoding()
        known = {
            name: extra[name] for name in ("complete_var", "windows_expand_args") if name in extra
        }
        if "_PERDURE_COMPLETE" in os.environ:
            from perdure.cli.commands.setup import use_quoting

            use_quoting()
        try:
            given = [_in_utf8(arg) for arg in (sys.argv[1:] if args is None else args)]
            outcome = super().main(
                args=given, prog_name=prog_name, standalone_mode=False, obj=settings, **known
            )
        except _Ended as end:
            if end.code is Exit.PIPE_CLOSED:
                _close_output()
            return end.code
        except (click.Abort, KeyboardInterrupt):
            return Exit.INTERRUPTED
        except click.ClickException as error:
            return _usage(error, settings)
        except Exception as error:
            if settings.traceback:
                raise
            return report(error, settings)
        return outcome if isinstance(outcome, int) else Exit.OK


def _usage(error: click.ClickException, settings: Settings) -> int:
    if isinstance(error, _NO_ARGUMENTS):
        sys.stdout.write(error.message + "\n")
        return Exit.OK
    hint = ""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        path = error.ctx.command_path
        hint = f" (see {path} --help)"
        if isinstance(error, click.NoSuchOption) and _takes_arguments(error.ctx.command):
            hint = f"; write -- before an argument that begins with -: {path} -- ID{hint}"
    message = clean(settings.conceal(" ".join(error.format_message().rstrip(".").split())))
    sys.stderr.write(f"perdure: {message}{hint}\n")
    return Exit.USAGE if isinstance(error, click.UsageError) else Exit.ERROR


def _takes_arguments(command: click.Command) -> bool:
    return any(each.param_type_name == "argument" for each in command.params)


def report(error: Exception, settings: Settings) -> int:
    """Print the error in one line and return the exit code."""
    text = line_of(error)
    if not is_expected(error):
        text = f"{type(error).__name__}: {text}. {_blame(error)}"
    sys.stderr.write(f"perdure: {clean(settings.conceal(text))}\n")
    return code_of(error)


def _blame(error: Exception) -> str:
    """Say whose code raised the unexpected error: a module of the user, or perdure."""
    from perdure.model.failures import author_line

    line = author_line("".join(traceback.format_tb(error.__traceback__)))
    if line:
        return f"It was raised in {line}; --traceback shows the way there"
    return (
        "This is a defect of perdure: please report it with the output of the same command and "
        "--traceback"
    )


def _tolerate_encoding() -> None:
    """Write characters that the terminal's encoding lacks as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=ESCAPED)


def _in_utf8(arg: str) -> str:
    """Decode an argument of the shell as UTF-8, also if the locale has another encoding."""
    try:
        return os.fsencode(arg).decode() if arg and not arg.isprintable() else arg
    except UnicodeError:
        raise UsageError(f"the argument {arg!r} is not valid UTF-8") from None


def _stand_in_for_closed_streams() -> None:
    """Replace a closed output stream, which Python sets to None, as in ``perdure list >&-``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def _close_output() -> None:
    """Redirect standard output to nothing, so that the flush at exit does not fail."""
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, sys.stdout.fileno())
    except (OSError, ValueError):
        return


root = Root(
    "perdure",
    sections=SECTIONS,
    aliases={"ls": "list"},
    help="Durable async functions: run them, look at them, act on them.\n\n"
    "Exit codes: 0 ok, 1 error, 2 wrong usage, 3 not found, 4 the instance failed, 5 timed out, "
    "6 conflict or refused, 130 interrupted.",
)
click.version_option(VERSION, "--version", prog_name="perdure", message="%(prog)s %(version)s")(
    root
)


def main() -> None:
    root.main()
