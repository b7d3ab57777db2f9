"""Spans and metrics for OpenTelemetry: ``runtime.observe(OpenTelemetry())``. Extra ``otel``.

The trace of the code that starts an instance is stored with the instance, so its activities appear
below that span, in each process that runs them. Only code that really runs makes a span; a replay
makes none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"OpenTelemetry() needs {error.name}, which is not installed; pip install 'perdure[otel]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from opentelemetry.metrics import Counter, Histogram, MeterProvider
    from opentelemetry.trace import TracerProvider

    from perdure.model import work
    from perdure.runtime.metrics import SpanNote


class OpenTelemetry:
    """An exporter of metrics and spans."""

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer("perdure", tracer_provider=tracer_provider)
        self._meter = metrics.get_meter("perdure", meter_provider=meter_provider)
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    # --- metrics

    def add(self, name: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = self._meter.create_counter(name)
        counter.add(value, dict(labels))

    def record(self, name: str, labels: Mapping[str, str], value: float) -> None:
        histogram = self._histograms.get(name)
        if histogram is None:
            histogram = self._histograms[name] = self._meter.create_histogram(name)
        histogram.record(value, dict(labels))

    # --- spans

    def carrier(self) -> str | None:
        """Return the current trace, to be stored with a start."""
        found: dict[str, str] = {}
        propagate.inject(found)
        return found.get("traceparent")

    @contextmanager
    def activity(self, item: work.ActivityExecute, note: SpanNote) -> Generator[None]:
        """Cover one attempt with a span."""
        parent = propagate.extract({"traceparent": item.trace}) if item.trace else None
        attributes: dict[str, str | int] = {
            "perdure.instance.id": item.instance_id,
            "perdure.execution.id": item.execution_id,
            "perdure.orchestration.name": item.orchestration_name,
            "perdure.orchestration.version": item.orchestration_version,
            "perdure.activity.name": item.name,
            "perdure.activity.id": item.activity_id,
            "perdure.activity.attempt": item.attempt,
        }
        with self._tracer.start_as_current_span(
            f"activity {item.name}", context=parent, kind=SpanKind.CONSUMER, attributes=attributes
        ) as span:
            yield
            if note.failure is not None:
                span.set_status(Status(StatusCode.ERROR, str(note.failure)))
