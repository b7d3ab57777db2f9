"""Recorded executions against the code at hand: which of them would go on, which would not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from perdure.engine.execution import Execution
from perdure.engine.matching import key_of
from perdure.errors import CorruptData, Nondeterminism, NotRegistered, PayloadError

if TYPE_CHECKING:
    from perdure.authoring.registry import Registry
    from perdure.client.recorded import Recorded
    from perdure.codec import Codec

Verdict: TypeAlias = Literal["ok", "diverges", "no code", "bad data"]

_THEN = re.compile(r"^history says  (.+)$", re.MULTILINE)
_NOW = re.compile(r"^the code did  (.+)$", re.MULTILINE)
_SITE = re.compile(r"  at (\S+:\d+)$")
_EVENT = re.compile(r"event (\d+)")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay of one execution showed."""

    instance_id: str
    name: str
    version: str
    verdict: Verdict
    event_id: int | None = None
    """The recorded event that the code does not repeat."""
    recorded: str = ""
    performed: str = ""
    site: str = ""
    """Where in today's code, or where it was called then."""
    report: str = ""


def check(recorded: Recorded, registry: Registry, codec: Codec) -> Finding:
    """Replay one execution; nothing is written, no activity runs."""
    try:
        handler = registry.resolve_orchestration(recorded.name, recorded.version)
        execution = Execution.replay(handler, recorded.history, kv=recorded.kv, codec=codec)
    except Nondeterminism as error:
        return _divergence(recorded, error)
    except NotRegistered as error:
        return _finding(recorded, "no code", str(error))
    except (CorruptData, PayloadError) as error:
        return _finding(recorded, "bad data", str(error))
    execution.close()
    return _finding(recorded, "ok")


def _finding(recorded: Recorded, verdict: Verdict, report: str = "") -> Finding:
    return Finding(
        instance_id=recorded.instance_id,
        name=recorded.name,
        version=recorded.version,
        verdict=verdict,
        report=report,
    )


def _divergence(recorded: Recorded, error: Nondeterminism) -> Finding:
    """Both sides, from the report; the event is the one whose operation key it names."""
    then, now = _THEN.search(error.report), _NOW.search(error.report)
    said = "" if then is None else then[1]
    did = "" if now is None else now[1]
    key = said.partition("  ")[0]
    event_id = next((e.event_id for e in recorded.history if key_of(e) == key), None)
    if event_id is None and (named := _EVENT.search(str(error))) is not None:
        event_id = int(named[1])
    site = _SITE.search(did) or _SITE.search(said)
    return Finding(
        instance_id=recorded.instance_id,
        name=recorded.name,
        version=recorded.version,
        verdict="diverges",
        event_id=event_id,
        recorded=said or str(error),
        performed=did,
        site="" if site is None else site[1],
        report=error.report,
    )
