"""What is waited for from a person: an answer, or input that is typed. Ctrl-C ends the wait."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from perdure.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def interruptible() -> Generator[None]:
    """For code that waits without an await: asyncio's own answer to Ctrl-C would not reach it."""
    found = signal.getsignal(signal.SIGINT)
    if found is signal.SIG_IGN:  # whoever started us does not want it
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, found)


def is_wanted(plan: str) -> bool:
    """Ask whether to go on with ``plan``, such as "purge 3 instances"."""
    if not sys.stdin.isatty():
        raise UsageError(f"this would {plan}; add -y to do it, or --dry-run to look")
    try:
        with interruptible():
            answer = click.confirm(f"{plan}. Go on?", err=True)
    except click.Abort:
        click.echo(err=True)  # the cursor stands behind the question
        raise
    if not answer:
        click.echo("nothing was done", err=True)
    return answer
