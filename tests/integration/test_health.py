"""Probes, metrics and alerts of a runtime."""

import asyncio

import pytest

from integration.conditions import until
from perdure import Retry, Runtime, RuntimeOptions, Status, activity, orchestration, wait_for_event
from perdure.errors import InvalidValue, ProviderError, UsageError
from perdure.runtime.prometheus import PrometheusMetrics

ANYWHERE = "127.0.0.1:0"


@activity(retry=Retry(max_attempts=2, first_delay=0))
async def shaky(name: str) -> str:
    if name == "bad":
        raise ValueError("too bad")
    return name


@activity(tag="gpu")
async def render() -> None: ...


@orchestration
async def flow(name: str) -> str:
    return await shaky(name)


@orchestration
async def parent(name: str) -> str:
    try:
        return await flow(name)
    except Exception:
        return "caught"


@orchestration
async def patient() -> None:
    await asyncio.gather(render(), wait_for_event("never", None))


@orchestration
async def stubborn() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0)


HANDLERS = [flow, parent, patient, shaky]


def health(store="memory:", handlers=HANDLERS, **options):
    return Runtime(store, handlers, options=RuntimeOptions(health=ANYWHERE, **options))


async def get(runtime, path, method="GET", raw=None):
    """Ask the runtime over HTTP; return the status and the body."""
    reader, writer = await asyncio.open_connection(*runtime.health_address)
    writer.write(raw or f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    if not answer:
        return None, ""
    head, _, body = answer.partition("\r\n\r\n")
    assert f"Content-Length: {len(body.encode())}" in head or method == "HEAD"
    return int(head.split()[1]), body


def counted(runtime, name):
    async def condition():
        return runtime.metrics_snapshot().get(name, 0) > 0

    return condition


def samples(text):
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_the_probes_say_ok_while_the_runtime_works():
    async with health() as runtime:
        assert await get(runtime, "/livez") == (200, "ok\n")
        assert await get(runtime, "/readyz?verbose") == (200, "ok\n")
        assert await get(runtime, "/readyz", "HEAD") == (200, "")
        assert (await get(runtime, "/other"))[0] == 404
        assert (await get(runtime, "/livez", "POST"))[0] == 405


@pytest.mark.parametrize("raw", [b"no http\r\n\r\n", b"x" * 100_000, b"\r\n\r\n"])
async def test_what_is_no_request_gets_no_answer(raw):
    async with health() as runtime:
        assert await get(runtime, "", raw=raw) == (None, "")
        assert (await get(runtime, "/livez"))[0] == 200


async def test_a_runtime_is_not_ready_while_it_starts_and_while_it_drains():
    seen = []

    async def lifespan(runtime):
        seen.append(await get(runtime, "/readyz"))
        yield []
        seen.append(await get(runtime, "/readyz"))
        seen.append(await get(runtime, "/livez"))

    module = type(asyncio)("flows")
    vars(module).update(flow=flow, shaky=shaky, lifespan=lifespan)
    async with health(handlers=[module]):
        pass
    assert seen == [(503, "starting\n"), (503, "stopping\n"), (200, "ok\n")]


async def test_a_runtime_is_not_ready_while_the_store_does_not_answer(monkeypatch):
    async with health() as runtime:

        async def broken(self):
            raise ProviderError("get_store_info", "the server is away", retryable=True)

        monkeypatch.setattr(type(runtime.provider.admin), "_get_store_info", broken)
        status, text = await get(runtime, "/readyz")
        assert (status, text) == (
            503,
            "the store does not answer: get_store_info: the server is away\n",
        )
        assert (await get(runtime, "/livez"))[0] == 200
        assert (await get(runtime, "/metrics"))[0] == 200


async def test_metrics_tell_instances_queues_commits_retries_and_turn_times():
    async with health() as runtime:
        await (await runtime.start(flow, "good")).result()
        await (await runtime.start(parent, "bad")).result()
        await runtime.start(patient)
        status, text = await get(runtime, "/metrics")
        found = samples(text)

    assert status == 200
    assert found['perdure_instances{status="Completed"}'] == 2
    assert found['perdure_instances{status="Failed"}'] == 1
    assert found['perdure_instances{status="Running"}'] == 1
    worker = 'name="render",queue="worker"'
    assert found[f'perdure_queue_items{{{worker},state="visible",tag="gpu"}}'] == 1
    assert found[f'perdure_queue_oldest_seconds{{{worker},tag="gpu"}}'] >= 0
    assert found["perdure_dead_letters"] == 0
    assert found["perdure_live_instances"] == 1
    assert found["perdure_activities_running"] == 0
    assert found['perdure_commits_total{kind="turn"}'] >= 5
    assert found['perdure_activity_retries_total{activity_name="shaky"}'] >= 1
    assert found['perdure_turn_duration_seconds_count{orchestration_name="flow"}'] >= 3
    assert "bad" not in text.replace('bad"', "")


async def test_renewed_and_lost_locks_are_counted():
    options = {"orchestration_lock_timeout": 0.1, "activity_lock_timeout": 0.1}
    async with health(**options) as runtime:
        handle = await runtime.start(patient, id="p")
        await until(counted(runtime, "orchestration_locks_renewed"))
        await runtime.provider.admin.lock_instance(handle.id, 60_000)
        await until(counted(runtime, "orchestration_locks_lost"))
        found = samples((await get(runtime, "/metrics"))[1])
    assert found['perdure_locks_lost_total{kind="orchestration"}'] >= 1
    assert found['perdure_locks_renewed_total{kind="orchestration"}'] >= 1


async def test_an_exporter_of_the_default_registry_is_not_counted_twice():
    runtime = health()
    runtime.observe(PrometheusMetrics())
    for _ in range(2):
        async with runtime:
            pass
        assert len(runtime.observer.sinks) == 1


async def test_a_port_that_is_taken_is_an_error_with_the_way_out():
    async with health() as runtime:
        host, port = runtime.health_address
        other = Runtime("memory:", [flow], options=RuntimeOptions(health=f"{host}:{port}"))
        with pytest.raises(UsageError, match=rf"cannot listen on {host}:{port} .* choose another"):
            await other.__aenter__()


@pytest.mark.parametrize("wrong", ["9000", ":9000", "localhost", "localhost:99999", 9000, "::1:90"])
def test_an_address_has_a_host_and_a_port(wrong):
    with pytest.raises(InvalidValue, match="health must be HOST:PORT"):
        RuntimeOptions(health=wrong)


async def test_alerts_tell_failed_roots_and_blocked_instances(caplog):
    told = []

    async def slowly(alert):
        await asyncio.sleep(0)
        told.append(alert)

    async def has_two():
        return len(told) == 2

    def wrong(alert):
        raise OSError("no network")

    options = RuntimeOptions(turn_abort_after=0.2, turn_warn_after=0.1)
    runtime = Runtime("memory:", [*HANDLERS, stubborn], options=options)
    runtime.on_alert(wrong)
    runtime.on_alert(slowly)
    async with runtime:
        assert await (await runtime.start(parent, "bad")).result() == "caught"
        await runtime.start(flow, "bad", id="f-1")
        await runtime.start(stubborn, id="s-1")
        await until(has_two)
    by_id = {alert.instance_id: alert for alert in told}
    assert by_id["f-1"].status is Status.FAILED
    assert (by_id["f-1"].orchestration, by_id["f-1"].version) == ("flow", "1.0.0")
    assert "ValueError: too bad" in by_id["f-1"].reason
    assert by_id["s-1"].status is Status.BLOCKED
    assert by_id["s-1"].reason.startswith("limit: a turn ran for more than")
    assert "an alert callback failed" in caplog.text
