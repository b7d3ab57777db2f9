"""``perdure db check``: read everything and say what is damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import click

from perdure.cli.command import command
from perdure.cli.exits import Exit
from perdure.cli.options import output_option
from perdure.cli.render import Cell, echo, glyph, print_json
from perdure.cli.session import run
from perdure.errors import CorruptData

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from perdure.cli.session import Session


@runtime_checkable
class ChecksItself(Protocol):
    """An administration that can read its whole store below the level of instances."""

    def integrity_check(self) -> Awaitable[None]:
        """Errors: CorruptData."""
        ...


@command(
    "check",
    short_help="Read everything and say what is damaged.",
    examples=["perdure db check", "perdure db check --quick --store shop.db"],
)
@click.option("--quick", is_flag=True, help="Only the store itself, not every history.")
@output_option("table", "json")
def check(quick: bool, output: str) -> int:
    """Read the whole store and say what is damaged. Nothing is changed; exit code 1 if so."""

    async def body(session: Session) -> int:
        from perdure.client.checking import Damage, check_instances

        aside = (await session.admin.get_store_info()).damages
        damages = [Damage(instance_id="", message=f"{path}: {why}") for path, why in aside.items()]
        if isinstance(session.admin, ChecksItself):
            try:
                await session.admin.integrity_check()
            except CorruptData as error:
                damages.append(Damage(instance_id="", message=error.message))
        checked = 0
        if not quick:
            async for damage in check_instances(session.provider, session.admin):
                checked += damage is None
                damages += [] if damage is None else [damage]
        if output == "json":
            print_json({"instances_checked": checked, "damages": damages})
        else:
            for damage in damages:
                place = f"{damage.instance_id}: " if damage.instance_id else ""
                echo(Cell(f"{glyph('failed')} ", "red"), f"{place}{damage.message}")
            sign, style = ("failed", "red") if damages else ("completed", "green")
            said = f"{len(damages)} damaged" if damages else "no damage found"
            echo(Cell(f"{glyph(sign)} ", style), f"{checked} instances read, {said}")
        return Exit.ERROR if damages else Exit.OK

    return run(body)
