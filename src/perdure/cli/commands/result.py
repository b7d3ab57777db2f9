"""``perdure result``: wait for the end of an instance and print what it returned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.command import command
from perdure.cli.options import duration_option, id_argument, output_option
from perdure.cli.session import run

if TYPE_CHECKING:
    from perdure.cli.session import Session


@command(
    "result",
    short_help="Wait for the end of an instance, print its result.",
    examples=[
        "perdure result o-1",
        'perdure result o-1 --timeout 30s || echo "exit $?"',
        "perdure result o-1 -o json | jq .output",
    ],
)
@id_argument()
@duration_option("--timeout", "timeout_ms", "Give up after that (exit 5).")
@output_option("table", "json", "jsonl")
def result(instance_id: str, timeout_ms: int | None, output: str) -> int:
    """Wait for the end of an instance and print its result as JSON.

    Exit code 4 and the error on standard error when it failed, was cancelled or terminated.
    """

    async def body(session: Session) -> int:
        from perdure.cli.outcome import print_outcome
        from perdure.cli.waiting import wait_for_end

        return print_outcome(await wait_for_end(session, instance_id, timeout_ms), output)

    return run(body)
