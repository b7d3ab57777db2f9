"""The shapes of JSON output: plain dictionaries with stable keys, times in ISO 8601 UTC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from perdure.client.durations import iso_time
from perdure.client.view import failure_of
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.client.insights import Insight
    from perdure.client.steps import StepView
    from perdure.providers.items import InstanceInfo


def instance_document(info: InstanceInfo, insight: Insight | None = None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": info.instance_id,
        "name": info.name,
        "version": info.version,
        "status": shown_status(info),
        "execution": info.execution_id,
        "parent": info.parent_instance_id,
        "created_at": iso_time(info.created_at_ms),
        "updated_at": iso_time(info.updated_at_ms),
        "completed_at": optional_time(info.completed_at_ms),
        "custom_status": raw(info.custom_status),
        "output": raw(info.output) if info.status is Status.COMPLETED else None,
        "failure": failure_of(info),
        "block": info.block,
    }
    if insight is not None:
        document["doing"] = insight.doing
        document["sentence"] = insight.sentence
        document["due_at"] = optional_time(insight.due_ms)
    return document


def step_document(step: StepView) -> dict[str, Any]:
    return {
        "event": step.event_id,
        "op": step.op,
        "kind": step.kind,
        "call": step.call,
        "state": step.state,
        "since": iso_time(step.since_ms),
        "ended_at": optional_time(step.ended_ms),
        "due_at": optional_time(step.due_ms),
        "result": step.result,
        "error": step.error,
        "attempts": step.attempts,
        "child": step.child_id,
        "site": step.site,
    }


def shown_status(info: InstanceInfo) -> str:
    """Between two executions an instance is alive, whatever the store calls the first one."""
    if info.status is Status.CONTINUED_AS_NEW:
        return Status.RUNNING.value
    return info.status.value


def optional_time(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else iso_time(milliseconds)


def raw(text: str | None) -> Any:
    """Stored JSON, as it is; as a text where it is damaged, so that the document stays JSON."""
    if text is None:
        return None
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
    return msgspec.Raw(text)
