"""``perdure purge``: delete instances that have ended, each with its children."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure.cli.bulk import Verb, act, target_options
from perdure.cli.command import command
from perdure.client.search import ENDED, OPEN
from perdure.errors import NotARoot, NotFound

if TYPE_CHECKING:
    from perdure.cli.session import Session


@command(
    "purge",
    short_help="Delete instances that have ended.",
    examples=[
        "perdure purge o-1",
        "perdure purge --query 'status:completed completed:>30d' --dry-run",
        "perdure purge --query 'status:ended completed:>90d' -y",
    ],
)
@target_options
@click.option("--force", is_flag=True, help="Also instances that have not ended.")
def purge(force: bool, **targets: Any) -> int:
    """Delete instances that have ended, each with its children and everything about them.

    A query takes roots only: children go with their root. A child whose parent is not in the store
    can be named by its id.
    """

    async def apply(session: Session, instance_id: str) -> None:
        try:
            await session.admin.delete_instance(instance_id, force=force)
        except NotARoot:
            if not await _is_orphan(session, instance_id):
                raise
            tree = await session.admin.get_instance_tree(instance_id)
            await session.admin.delete_instances_atomic(tree.instance_ids, force=force)

    statuses = ENDED | OPEN if force else ENDED
    verb = Verb(word="purge", done="purged", statuses=statuses, apply=apply, roots_only=True)
    return act(verb, **targets)


async def _is_orphan(session: Session, instance_id: str) -> bool:
    """Imported without its parent: no root will ever take it along."""
    parent_id = await session.admin.get_parent_id(instance_id)
    if parent_id is None:
        return False
    try:
        await session.admin.get_instance_info(parent_id)
    except NotFound:
        return True
    return False
