"""``perdure rerun``: once more under another id, from the beginning or from an event."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.command import command, id_argument, module_option, output_option
from perdure.cli.inputs import read_arguments
from perdure.cli.render import Cell, counted, print_ids, print_outcome
from perdure.cli.session import current_settings, run, suggest_commands
from perdure.client import rerun as rerunning
from perdure.errors import NotRegistered, UsageError
from perdure.providers.sealing import sealed

if TYPE_CHECKING:
    import msgspec

    from perdure.cli.session import Session
    from perdure.client.rerun import Bounds
    from perdure.codec import Codec


@command(
    "rerun",
    examples=[
        "perdure rerun o-1",
        "perdure rerun o-1 --input '[\"o-1\", 900]' --id o-1-cheaper",
        "perdure rerun o-1 --from-event 17",
    ],
)
@id_argument()
@click.option("--id", "new_id", metavar="ID", help="Id of the new instance. Default: a new one.")
@click.option("--input", "input_text", metavar="JSON", help="Other arguments; @file, or -.")
@click.option("--version", metavar="V", help="That version instead of the latest.")
@click.option(
    "--from-event",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the past up to the end of the turn of event N; see perdure history.",
)
@module_option()
@output_option("table", "json", "ids")
def rerun(
    instance_id: str,
    new_id: str | None,
    input_text: str | None,
    version: str | None,
    from_event: int | None,
    modules: tuple[str, ...],
    output: str,
) -> None:
    """Run an instance once more as a new instance; the old one stays as it is.

    All its activities run again, with new idempotency keys: perdure retry goes on instead.

    With --from-event, steps that were open then are asked for again and everything later is
    forgotten. Name the code with -m so that these steps get back their retries and time limits.
    Payloads that a codec seals are copied with the codec at the top of that module.
    """
    if from_event is not None and (input_text is not None or version is not None):
        raise UsageError("--from-event keeps input and version: the past was made with them")
    named = current_settings().modules(modules)
    bounds = None if from_event is None else _bounds(named)
    codec = _codec(named)

    async def body(session: Session) -> None:
        await session.info(instance_id)
        provider = session.provider if codec is None else sealed(session.provider, codec)
        chosen = rerunning.fresh_id(instance_id) if new_id is None else new_id
        if from_event is None:
            changed = _encoded(session, input_text)
            again = await rerunning.rerun(
                provider, instance_id, chosen, input=changed, version=version
            )
            copied = rerunning.Copied(events_kept=0, steps_again=again)
        else:
            copied = await rerunning.rerun_from_event(
                provider,
                instance_id,
                chosen,
                from_event,
                clock=session.client.clock,
                bounds=bounds,
            )
        _print(instance_id, chosen, copied, output)

    run(body)


def _codec(modules: tuple[str, ...]) -> Codec | None:
    if not modules:
        return None
    from perdure.cli.modules import load_codec

    return load_codec(modules)


def _encoded(session: Session, text: str | None) -> msgspec.Raw | None:
    if text is None:
        return None
    return session.client.codec.encode(read_arguments(text, "--input"), where="--input")


def _bounds(modules: tuple[str, ...]) -> Bounds | None:
    if not modules:
        return None
    from perdure.cli.modules import load_registry

    registry = load_registry(modules, "perdure rerun -m")

    def bounds(name: str) -> tuple[Any, ...]:
        try:
            return registry.resolve_activity(name).bounds[:3]
        except NotRegistered:
            return ()

    return bounds


def _print(old_id: str, new_id: str, copied: rerunning.Copied, output: str) -> None:
    if output == "ids":
        print_ids([new_id])
        return
    kept, again = copied.events_kept, copied.steps_again
    document = {
        "id": new_id,
        "rerun_of": old_id,
        "events_kept": kept,
        "steps_again": again,
    }
    past = f", {kept} events kept" if kept else ""
    if again:
        past += f", {counted(again, 'finished step')} run{'s' if again == 1 else ''} again"
    print_outcome(output, document, f"rerun of {old_id} as ", Cell(new_id, "bold"), past)
    if output == "table":
        suggest_commands(f"watch {shlex.quote(new_id)}")
