"""How an instance ended, for the commands that wait for it: its output, or why there is none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from perdure.cli.documents import instance_document, raw
from perdure.cli.escape import clean_block
from perdure.cli.exits import Exit
from perdure.cli.render import json_text, print_json, print_json_line, warn
from perdure.cli.session import current_settings
from perdure.client.view import failure_of
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.providers.items import InstanceInfo


def print_outcome(info: InstanceInfo, output: str) -> Exit:
    """The result on standard output; a failure on standard error, and its exit code."""
    if output == "json":
        print_json(instance_document(info))
    elif output == "jsonl":
        print_json_line(instance_document(info))
    elif info.status is Status.COMPLETED:
        sys.stdout.write(json_text(raw(info.output or "null"), indent=2) + "\n")
    if info.status is Status.COMPLETED:
        return Exit.OK
    if output == "table":
        failure = failure_of(info)
        if failure is None:
            said = ""
        else:
            said = str(failure) if info.status is Status.FAILED else failure.message
        tail = f": {said}" if said else ""
        warn(f"{info.name} {info.instance_id} {info.status.lower()}{tail}")
        if failure is not None and failure.traceback and current_settings().traceback:
            sys.stderr.write(clean_block(failure.traceback.rstrip()) + "\n")
    return Exit.FAILED
