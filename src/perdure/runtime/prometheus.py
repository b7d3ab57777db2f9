"""Metrics for Prometheus: ``runtime.observe(PrometheusMetrics())``. Needs the extra ``metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

try:
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        REGISTRY,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        generate_latest,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"PrometheusMetrics needs {error.name}, which is not installed; "
        "pip install 'perdure[metrics]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from perdure.runtime import metrics

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS = {
    "perdure_orchestration_duration_seconds": (0.1, 0.5, 1, 5, 10, 60, 300, 900, 3600),
    "perdure_orchestration_turns": (1, 2, 5, 10, 20, 50, 100, 200, 500),
    "perdure_orchestration_history_size": (10, 50, 100, 500, 1000, 5000, 10000),
    "perdure_turn_duration_seconds": (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
    "perdure_activity_duration_seconds": (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300),
}


_metrics_of: WeakKeyDictionary[CollectorRegistry, dict[str, Any]] = WeakKeyDictionary()


class PrometheusMetrics:
    """A sink that keeps counters and histograms in a registry of prometheus_client."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self.is_default = registry is REGISTRY
        # A registry accepts each name once, so all runtimes of a process share their metrics.
        self._metrics = _metrics_of.setdefault(registry, {})

    def add(self, name: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Counter(
                name.removesuffix("_total"), _help(name), sorted(labels), registry=self._registry
            )
        (metric.labels(**labels) if labels else metric).inc(value)

    def record(self, name: str, labels: Mapping[str, str], value: float) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Histogram(
                name,
                _help(name),
                sorted(labels),
                buckets=_BUCKETS[name],
                registry=self._registry,
            )
        metric.labels(**labels).observe(value)


def render(gauges: Iterable[metrics.Gauge]) -> bytes:
    """Return the metrics of the default registry and these gauges, as Prometheus reads them."""
    registry = CollectorRegistry()
    made: dict[str, Gauge] = {}
    for short_name, labels, value in gauges:
        name = f"perdure_{short_name}"
        gauge = made.get(name)
        if gauge is None:
            gauge = made[name] = Gauge(name, _help(name), sorted(labels), registry=registry)
        (gauge.labels(**labels) if labels else gauge).set(value)
    return generate_latest(REGISTRY) + generate_latest(registry)


def _help(name: str) -> str:
    return name.removeprefix("perdure_").removesuffix("_total").replace("_", " ").capitalize()
