"""Sequences after which the name of an instance depends on which of its starts are visible."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from model import ModelFactory
from perdure.conformance._machine.plans import MessagePlan
from perdure.conformance.stateful import machine
from perdure.providers.records import OrchestrationFilter

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.conformance.harness import ProviderFactory

_DELAYED: Final = MessagePlan("x", "start", 1, "Mail", None, None, 1)
_STEPS: Final[dict[str, Callable[[Any], None]]] = {
    "delayed start": lambda made: made.enqueue(_DELAYED, None, None),
    "start": lambda made: made.enqueue(replace(_DELAYED, name="Shop", delay=None), None, None),
    "event": lambda made: made.enqueue(replace(_DELAYED, kind="event", delay=None), None, None),
    "history": lambda made: made.append("x", 1, [1]),
    "time": lambda made: made.let_time_pass(2),
}
SEQUENCES: Final = (
    ("delayed start", "start"),
    ("delayed start", "start", "time"),
    ("start", "delayed start"),
    ("delayed start", "event", "history"),
    ("history", "event", "delayed start"),
    ("history", "delayed start", "event", "time"),
    ("delayed start", "history", "start"),
)
HANDLERS: Final = (None, "Mail", "Shop", "unknown")


def fetch_after(
    factory: Callable[[], ProviderFactory], steps: tuple[str, ...], handler: str | None
) -> None:
    """Do the steps, then fetch for that handler; raise if the store differs from the model."""
    compared: Any = machine(factory, model=ModelFactory)()
    wanted = OrchestrationFilter(handlers=frozenset({(handler, "1.0.0")})) if handler else None
    try:
        for step in steps:
            _STEPS[step](compared)
            compared.stores_look_the_same()
        compared.fetch(wanted, "w1", 5)
    finally:
        compared.teardown()
