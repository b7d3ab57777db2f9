"""Information from a runtime: counters, metrics, spans, and a logger that knows replay."""

import asyncio
import logging

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from integration.conditions import until
from patience import HANG_SECONDS
from perdure import (
    Client,
    InMemoryProvider,
    Retry,
    Runtime,
    RuntimeOptions,
    activity,
    activity_info,
    current,
    orchestration,
)
from perdure.errors import (
    ActivityFailed,
    OrchestrationCancelled,
    OrchestrationFailed,
    UsageError,
)
from perdure.model.failures import Block, BlockReason
from perdure.providers.sqlite.memory import MemoryStore
from perdure.runtime.prometheus import PrometheusMetrics
from perdure.runtime.telemetry import OpenTelemetry

ran: list[int] = []
"""The arguments of each attempt of ``shaky``."""
begun: set[str] = set()
"""Instances whose ``sleeper`` has begun."""


@activity(retry=Retry(max_attempts=2, first_delay=0))
async def shaky(value: int) -> int:
    ran.append(value)
    if value < 0:
        raise ValueError("negative")
    return value


@orchestration
async def flow(value: int) -> int:
    current().logger.info("begins with %d", value)
    first = await shaky(value)
    current().logger.info("has %d", first)
    return first


@activity
async def sleeper() -> None:
    begun.add(activity_info().instance_id)
    await asyncio.Event().wait()


@orchestration
async def sleeps() -> None:
    await sleeper()


async def run(runtime):
    async with runtime:
        await (await runtime.start(flow, 1, id="good")).result(HANG_SECONDS)
        with pytest.raises(OrchestrationFailed):
            await (await runtime.start(flow, -1, id="bad")).result(HANG_SECONDS)


async def test_a_snapshot_counts_what_happened_once():
    runtime = Runtime("memory:", [flow, shaky])
    await run(runtime)

    counts = runtime.metrics_snapshot()
    assert counts["orchestration_starts"] == 2
    assert counts["orchestration_success"] == 1
    assert counts["orchestration_failed"] == 1
    assert counts["activity_success"] == 1
    assert counts["activity_failed"] == 2


async def test_prometheus_gets_counters_and_histograms_without_instance_ids():
    registry = CollectorRegistry()
    runtime = Runtime("memory:", [flow, shaky])
    runtime.observe(PrometheusMetrics(registry))
    await run(runtime)

    labels = {"orchestration_name": "flow", "version": "1.0.0", "status": "success"}
    assert registry.get_sample_value("perdure_orchestration_completions_total", labels) == 1
    retried = {
        "activity_name": "shaky",
        "outcome": "failed",
        "tag": "default",
        "retry_attempt": "1",
    }
    assert registry.get_sample_value("perdure_activity_executions_total", retried) == 1
    for metric in registry.collect():
        assert not any("good" in sample.labels.values() for sample in metric.samples)


async def test_the_runtimes_of_a_process_count_together(caplog):
    registry = CollectorRegistry()
    for _ in range(2):
        runtime = Runtime("memory:", [flow, shaky])
        runtime.observe(PrometheusMetrics(registry))
        await run(runtime)

    labels = {"orchestration_name": "flow", "version": "1.0.0", "status": "success"}
    assert registry.get_sample_value("perdure_orchestration_completions_total", labels) == 2
    assert "a metrics sink failed" not in caplog.text


@pytest.mark.parametrize("wrong", [None, PrometheusMetrics, object(), "prometheus"])
def test_what_is_no_exporter_is_refused(wrong):
    with pytest.raises(UsageError, match="takes an exporter, such as"):
        Runtime("memory:", [flow, shaky]).observe(wrong)


async def test_activities_are_spans_below_the_span_of_the_caller_that_started_the_instance():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    runtime = Runtime("memory:", [flow, shaky], options=RuntimeOptions(always_replay=True))
    runtime.observe(OpenTelemetry(tracer_provider=provider))
    with provider.get_tracer("test").start_as_current_span("request") as request:
        await run(runtime)

    spans = [span for span in exporter.get_finished_spans() if span.name == "activity shaky"]
    assert [span.attributes["perdure.activity.attempt"] for span in spans] == [1, 1, 2]
    assert {span.context.trace_id for span in spans} == {request.get_span_context().trace_id}
    assert [span.status.is_ok for span in spans] == [True, False, False]


async def test_a_start_by_a_client_carries_the_trace_of_its_caller():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    store = MemoryStore()
    runtime = Runtime(InMemoryProvider(store=store), [flow, shaky])
    runtime.observe(OpenTelemetry(tracer_provider=provider))
    async with Client(InMemoryProvider(store=store)) as client, runtime:
        client.observe(OpenTelemetry(tracer_provider=provider))
        with provider.get_tracer("test").start_as_current_span("request") as request:
            handle = await client.start(flow, 1)
            await client.start_many(flow, [("many", (1,))])
        assert await handle.result(HANG_SECONDS) == 1
        assert await client.get("many").result(HANG_SECONDS) == 1

    spans = [span for span in exporter.get_finished_spans() if span.name == "activity shaky"]
    assert len(spans) == 2
    assert {span.context.trace_id for span in spans} == {request.get_span_context().trace_id}


@pytest.mark.parametrize("gives", [RuntimeError("no tracer"), b"trace", {"trace": 1}])
async def test_a_client_observes_tracers_and_outlives_them(caplog, gives):
    class Broken:
        def carrier(self):
            if isinstance(gives, Exception):
                raise gives
            return gives

    async with Client("memory:") as client:
        for wrong in (None, OpenTelemetry, PrometheusMetrics(CollectorRegistry())):
            with pytest.raises(UsageError, match="observes a tracer"):
                client.observe(wrong)
        client.observe(Broken())
        await client.start(flow, 1, id="f")
        async with Runtime(client.provider, [flow, shaky]) as runtime:
            assert await runtime.get("f").result(HANG_SECONDS) == 1
    assert "a tracer failed" in caplog.text


class BrokenSink:
    def __init__(self, error):
        self.error = error

    def add(self, name, labels, value=1.0):
        raise self.error

    def record(self, name, labels, value):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no exporter"), asyncio.CancelledError()])
async def test_a_broken_exporter_does_no_harm(error, caplog):
    runtime = Runtime("memory:", [flow, shaky])
    runtime.observe(BrokenSink(error))
    block = Block(reason=BlockReason.POISON, message="it kills its worker")
    runtime.observer.blocked(flow, "x", block)
    runtime.observer.activity_poisoned("shaky")
    await run(runtime)

    assert "a metrics sink failed" in caplog.text


class BrokenSpans:
    """A tracer that fails in one place."""

    def __init__(self, place, error):
        self.place = place
        self.error = error

    def carrier(self):
        self.fail_at("carrier")

    def activity(self, item, note):
        self.fail_at("making a span")
        return None if self.place == "no span" else self

    def __enter__(self):
        self.fail_at("begin")

    def __exit__(self, *_):
        self.fail_at("end")
        return self.place == "swallowing"

    def fail_at(self, place):
        if place == self.place:
            raise self.error


BROKEN_SPANS = [
    *((place, RuntimeError("no tracer")) for place in ("carrier", "making a span", "begin", "end")),
    *((place, asyncio.CancelledError()) for place in ("making a span", "begin", "end")),
    ("begin", StopIteration()),
    ("end", StopIteration()),
    ("no span", None),
]


@pytest.mark.parametrize(("place", "error"), BROKEN_SPANS)
async def test_an_exception_of_a_tracer_is_logged_and_loses_nothing(place, error, caplog):
    ran.clear()
    runtime = Runtime("memory:", [flow, shaky])
    runtime.observe(BrokenSpans(place, error))
    await run(runtime)

    assert ran == [1, -1, -1]
    assert caplog.text.count("a tracer failed") == (2 if place == "carrier" else 3)


@pytest.mark.parametrize("method", ["on_start", "on_end"])
async def test_a_span_processor_that_raises_loses_nothing(method, caplog):
    def fail(*_, **__):
        raise RuntimeError("the collector is gone")

    provider = TracerProvider()
    provider.add_span_processor(type("Broken", (SpanProcessor,), {method: fail})())
    ran.clear()
    runtime = Runtime("memory:", [flow, shaky])
    runtime.observe(OpenTelemetry(tracer_provider=provider))
    await run(runtime)

    assert ran == [1, -1, -1]
    assert caplog.text.count("a tracer failed") == 3


@pytest.mark.parametrize("place", ["end", "swallowing"])
async def test_a_tracer_cannot_hold_up_a_cancellation(place):
    begun.clear()
    options = RuntimeOptions(drain_timeout=0)
    runtime = Runtime("memory:", [sleeps, sleeper], options=options)
    runtime.observe(BrokenSpans(place, RuntimeError("no tracer")))

    async def start(instance_id):
        async def has_begun():
            return instance_id in begun

        handle = await runtime.start(sleeps, id=instance_id)
        await until(has_begun)
        return handle

    async def is_idle():
        return not runtime.is_busy

    async with runtime:
        handle = await start("cancelled")
        await handle.cancel("enough")
        with pytest.raises(OrchestrationCancelled):
            await handle.result(HANG_SECONDS)
        await until(is_idle)
        await start("stopped")
    assert runtime.metrics_snapshot()["activity_cancelled"] == 1


async def test_the_logger_of_an_orchestration_is_silent_while_it_replays(caplog):
    runtime = Runtime("memory:", [flow, shaky], options=RuntimeOptions(always_replay=True))
    with caplog.at_level(logging.INFO):
        async with runtime:
            await (await runtime.start(flow, 1, id="once")).result(HANG_SECONDS)

    lines = [record.getMessage() for record in caplog.records if "has 1" in record.getMessage()]
    begins = [r for r in caplog.records if "begins with" in r.getMessage()]
    assert len(lines) == 1
    assert len(begins) == 1
    assert begins[0].instance_id == "once"


@activity(retry=Retry(max_attempts=2, first_delay=0.001))
async def decline(cents: int) -> str:
    raise LookupError(f"no {cents}")


@orchestration
async def declining() -> str:
    try:
        await decline(1)
    except ActivityFailed:
        await asyncio.sleep(0.001)
    return await decline(2)


@orchestration
async def declining_parent() -> str:
    try:
        return await declining.options(id="child")()
    except OrchestrationFailed:
        return "caught"


def failures_in(caplog):
    return [record for record in caplog.records if " failed" in record.msg and record.levelno >= 30]


async def test_failures_are_logged_once_with_the_line_and_the_ids(make_runtime, caplog):
    async with make_runtime([decline, declining]) as runtime:
        handle = await runtime.start(declining, id="x")
        with pytest.raises(OrchestrationFailed):
            await handle.result(HANG_SECONDS)

    first, second, end = failures_in(caplog)
    for record in (first, second):
        assert record.levelname == "WARNING"
        assert (record.instance_id, record.execution_id) == ("x", 1)
        assert (record.orchestration_name, record.activity_name) == ("declining", "decline")
        assert (record.attempt, record.error_type) == (2, "LookupError")
        assert record.line == f"{__file__}:{decline.fn.__code__.co_firstlineno + 2}"
        assert f"at {record.line}, attempt 2 of 2: LookupError" in record.getMessage()
    assert end.levelname == "ERROR"
    assert (end.instance_id, end.orchestration_name) == ("x", "declining")
    assert "Traceback" in end.exc_text
    assert "return await decline(2)" in end.exc_text


async def test_the_failure_of_a_child_is_not_the_end(make_runtime, caplog):
    async with make_runtime([decline, declining, declining_parent]) as runtime:
        assert await (await runtime.start(declining_parent)).result(HANG_SECONDS) == "caught"

    *_, end = failures_in(caplog)
    assert (end.levelname, end.instance_id) == ("WARNING", "child")
    assert "Traceback" not in end.getMessage()
