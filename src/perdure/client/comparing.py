"""Two executions side by side: their steps aligned by operation key, and where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.client.steps import StepView, steps_of
from perdure.model import events

if TYPE_CHECKING:
    from collections.abc import Sequence


class ComparedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One operation key: what each side did under it; None: it never came there."""

    op: str
    left: str | None
    right: str | None

    @property
    def is_same(self) -> bool:
        return self.left == self.right


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that both sides did, in the order of the left one, then the rest of the right."""

    steps: tuple[ComparedStep, ...]
    ends: ComparedStep

    @property
    def first_difference(self) -> ComparedStep | None:
        different = (step for step in (*self.steps, self.ends) if not step.is_same)
        return next(different, None)


def compare(left: Sequence[events.Event], right: Sequence[events.Event]) -> Comparison:
    """Times and event ids are not compared: they always differ."""
    left_steps = {step.op: _line(step) for step in steps_of(left)}
    right_steps = {step.op: _line(step) for step in steps_of(right)}
    keys = [*left_steps, *(key for key in right_steps if key not in left_steps)]
    beginnings = ComparedStep(op="input", left=_beginning(left), right=_beginning(right))
    steps = (
        ComparedStep(op=key, left=left_steps.get(key), right=right_steps.get(key)) for key in keys
    )
    return Comparison(
        steps=(beginnings, *steps),
        ends=ComparedStep(op="end", left=_end(left), right=_end(right)),
    )


def _line(step: StepView) -> str:
    match step.state:
        case "done":
            outcome = "" if step.result is None else f" -> {step.result}"
        case "failed":
            outcome = f" -> raised {step.error}"
        case "dropped":
            outcome = " (not needed)"
        case "open":
            outcome = " (open)"
    return step.call + outcome


def _beginning(history: Sequence[events.Event]) -> str | None:
    first = history[0] if history else None
    if not isinstance(first, events.OrchestrationStarted):
        return None
    return f"{first.name}@{first.version} {bytes(first.input).decode()}"


def _end(history: Sequence[events.Event]) -> str | None:
    match history[-1] if history else None:
        case events.OrchestrationCompleted(output=output):
            return f"return {bytes(output).decode()}"
        case events.OrchestrationFailed(failure=failure):
            return f"raise {failure}"
        case events.OrchestrationContinuedAsNew(input=input):
            return f"continue_as_new {bytes(input).decode()}"
        case events.OrchestrationCancelled() | events.OrchestrationTerminated() as event:
            return type(event).__name__.removeprefix("Orchestration").lower()
        case _:
            return None
