"""Spans and metrics for OpenTelemetry: ``runtime.observe(OpenTelemetry())``. Extra ``otel``.

The trace of the code that starts an instance is stored with the instance, so its activities appear
below that span, in each process that runs them. Only code that really runs makes a span; a replay
makes none.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"OpenTelemetry() needs {error.name}, which is not installed; pip install 'perdure[otel]'",
        name=error.name,
    ) from error

from perdure.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from opentelemetry.metrics import Counter, Histogram, MeterProvider
    from opentelemetry.trace import TracerProvider

    from perdure.model import work
    from perdure.runtime.metrics import SpanNote


def configure_from_environment() -> Callable[[], None]:
    """Set up the SDK of OpenTelemetry by its variables; return the function that flushes it.

    ``OTEL_TRACES_EXPORTER`` and ``OTEL_METRICS_EXPORTER`` name the exporters: ``otlp``, the
    default, ``console`` or ``none``. Exporters read their own variables, such as
    ``OTEL_EXPORTER_OTLP_ENDPOINT``.
    """
    try:
        from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--otel needs {error.name}; pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        ) from error
    traces = SdkTracerProvider()
    for exporter in _exporters("OTEL_TRACES_EXPORTER", "opentelemetry_traces_exporter"):
        traces.add_span_processor(BatchSpanProcessor(exporter()))
    found = _exporters("OTEL_METRICS_EXPORTER", "opentelemetry_metrics_exporter")
    meters = SdkMeterProvider([PeriodicExportingMetricReader(exporter()) for exporter in found])
    trace.set_tracer_provider(traces)
    metrics.set_meter_provider(meters)

    def flush() -> None:
        traces.shutdown()
        meters.shutdown()

    return flush


def _exporters(variable: str, group: str) -> list[Callable[[], Any]]:
    """Return the classes of the exporters that a variable names, as the packages declare them."""
    known = {entry.name: entry for entry in entry_points(group=group)}
    found: list[Callable[[], Any]] = []
    for name in os.environ.get(variable, "otlp").split(","):
        names = [name.strip()]
        if names == ["otlp"]:
            protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
            names.insert(0, f"otlp_proto_{'http' if protocol.startswith('http') else protocol}")
        chosen = next((known[each] for each in names if each in known), None)
        if chosen is not None:
            found.append(chosen.load())
        elif names != ["none"]:
            raise UsageError(
                f"{variable} names the exporter {names[-1]!r}, which is not installed; there are: "
                f"{', '.join(sorted(known)) or 'none'}. pip install opentelemetry-exporter-otlp"
            )
    return found


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
