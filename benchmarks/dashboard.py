"""The dashboard: a million runs, a long history, idle pages, and workers beside fifty open pages.

The store is made from three real runs (completed, failed, waiting), whose rows are copied under
other ids; each part of it is read by ``perdure serve`` as any other. Needs Debian's chromium.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw
import click
import psutil

from benchmarks.pages import renew
from perdure import Client, OrchestrationFailed, Runtime, activity, orchestration, wait_for_event

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
EVENTS = 49_600
TABS = ("/home",) * 20 + ("/runs",) * 20 + ("/run?id=chain-0",) * 10
"""The pages that are open beside the workers; each reads again whenever it hears of a change."""
READS = ("/runs", "/runs?q=status:failed", "/runs?q=status:open", "/runs?q=name:report", "/home")
REPEATS = 9
CHAINS, STEPS = 8, 4_000
IDLE_SECONDS = 20


ran: Counter[str] = Counter()
"""Steps that ran in this process."""


@activity
async def step(number: int) -> int:
    ran["step"] += 1
    return number


@orchestration
async def chain(count: int) -> int:
    return sum([await step(number) for number in range(count)])


@orchestration
async def report(city: str) -> str:
    return f"report of {city}"


@orchestration
async def broken(city: str) -> str:
    raise ValueError(f"no report of {city}")


@orchestration
async def waiting(city: str) -> str:
    return city + await wait_for_event("approval", str)


@orchestration
async def long_history(rounds: int) -> int:
    for number in range(rounds):
        await step(number)
    await wait_for_event("approval", str)
    return rounds


HANDLERS = [chain, report, broken, waiting, long_history, step]


# --- stores


async def _seed(store: Path) -> None:
    async with Runtime(store, HANDLERS) as runtime:
        await (await runtime.start(report, "Rome", id="seed-completed")).result()
        with suppress(OrchestrationFailed):
            await (await runtime.start(broken, "Rome", id="seed-failed")).result()
        await _until_waiting(await runtime.start(waiting, "Rome", id="seed-waiting"))


async def _until_waiting(handle: Any) -> None:
    while True:
        if "approval" in str((await handle.describe()).waiting_for):
            return
        await asyncio.sleep(0.2)


def fill(store: Path, number: int) -> None:
    """Copy the rows of the three runs until there are so many: 1 % failed, 1 % waiting."""
    asyncio.run(_seed(store))
    connection = apsw.Connection(str(store))
    tables = {
        "instances": "instance_key, instance_id",
        "executions": "instance_key",
        "history": "instance_key",
    }
    with connection:
        connection.execute(
            "CREATE TEMP TABLE copies AS WITH RECURSIVE n(i) AS "
            "(SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) SELECT 1000 + i AS copy, "
            "'run-' || substr('000000' || i, -7) AS id, CASE i % 100 WHEN 0 THEN 2 WHEN 1 THEN 3 "
            "ELSE 1 END AS source FROM n",
            (number,),
        )
        for table, keys in tables.items():
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            rest = ", ".join(each for each in columns if each not in keys.split(", "))
            own = "copy, id" if "instance_id" in keys else "copy"
            connection.execute(
                f"INSERT INTO {table} ({keys}, {rest}) SELECT {own}, "
                f"{', '.join(f't.{each}' for each in rest.split(', '))} "
                f"FROM copies JOIN {table} t ON t.instance_key = copies.source"
            )
    connection.execute("ANALYZE")
    connection.close()


async def _grow(store: Path) -> None:
    async with Runtime(store, HANDLERS) as runtime:
        handle = await runtime.start(long_history, EVENTS // 2, id="long")
        await _until_waiting(handle)


# --- the server and its pages


@contextmanager
def served(store: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve a store in a process of its own; return its address and the process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "perdure", "serve", str(store), "--listen"]
    server = subprocess.Popen([*command, f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            with suppress(OSError):
                get(f"{address}/livez")
                break
            time.sleep(0.05)
        yield address, psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def get(address: str) -> bytes:
    with urllib.request.urlopen(address) as answer:
        found: bytes = answer.read()
        return found


def milliseconds(act: Any, repeats: int = REPEATS) -> str:
    """Take the first time, which finds nothing prepared, and the median and worst of the rest."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        act()
        times.append((time.perf_counter() - began) * 1000)
    first, *rest = times
    return f"first {first:.0f}, then median {statistics.median(rest):.0f}, at most {max(rest):.0f}"


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"],
        )
        yield found
        found.close()


def measure_million(folder: Path, number: int) -> dict[str, str]:
    store = folder / "million.db"
    began = time.perf_counter()
    fill(store, number)
    print(f"{number:,} runs written in {time.perf_counter() - began:.0f} s", flush=True)
    found: dict[str, str] = {}
    with served(store) as (address, _), browser() as chromium:
        for path in READS:
            found[f"`{path}` of {number:,} runs, ms"] = milliseconds(
                lambda path=path: get(f"{address}/api/v1{path}")
            )
        tab = chromium.new_page()

        def open_list() -> None:
            tab.goto(f"{address}/runs")
            tab.locator("table.runs tbody tr").nth(49).wait_for()

        found[f"the page of runs in Chromium, {number:,} runs, ms"] = milliseconds(open_list)
    store.unlink()
    return found


def measure_long(folder: Path) -> dict[str, str]:
    store = folder / "long.db"
    asyncio.run(_grow(store))
    with served(store) as (address, _), browser() as chromium:
        number = json.loads(get(f"{address}/api/v1/run?id=long"))["events"]
        found: dict[str, str] = {}
        for tab, words in (("journal", ".line"), ("events", ".event")):
            page = chromium.new_page()

            def open_run(page: Any = page, tab: str = tab, words: str = words) -> None:
                page.goto(f"{address}/run?id=long&tab={tab}")
                if tab == "journal":
                    page.locator(".fan button").click()  # the fold of equal steps
                page.locator(words).nth(20).click(trial=True)  # it is there and takes a click

            what = f"a run of {number:,} events"
            found[f"{what}, {tab}, until a row can be clicked, ms"] = milliseconds(open_run, 3)
            more = page.get_by_role("button", name=re.compile("^More$|show more"))
            while more.count():
                with page.expect_response(re.compile("/run/(events|journal)")):
                    more.click()
                page.evaluate("new Promise(requestAnimationFrame)")
            page.evaluate("scrollTo(0, document.body.scrollHeight)")
            page.evaluate("new Promise(requestAnimationFrame)")
            heap = page.evaluate("performance.memory.usedJSHeapSize") / 2**20
            found[f"{what}, {tab} to its end, memory of the page, MB"] = f"{heap:.0f}"
            page.close()
    return found


# --- idle pages, and workers beside open pages


async def _count_idle(store: Path) -> int:
    """Count the calls of the store while one page is open and nothing happens."""
    from perdure.dashboard.live import Changes, stream
    from perdure.dashboard.service import Service

    async with Client(store) as client:
        calls = 0
        admin = type(client.provider.admin)
        original = admin.get_system_metrics

        async def counted(self: Any) -> Any:
            nonlocal calls
            calls += 1
            return await original(self)

        admin.get_system_metrics = counted  # type: ignore[method-assign]
        service = Service(client, registry=None, read_only=True, redact=None)
        events = stream(Changes(service), "seed-waiting")
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                async for _ in events:
                    pass
        admin.get_system_metrics = original  # type: ignore[method-assign]
        return calls


def work(store: str) -> tuple[float, float]:
    """Run chains to their end; return steps a second, and microseconds of the CPU for a step."""

    async def run() -> tuple[float, float]:
        async with Runtime(store, HANDLERS) as runtime:
            before, began, used = ran["step"], time.perf_counter(), time.process_time()
            handles = [
                await runtime.start(chain, STEPS, id=f"chain-{number}", if_exists="restart")
                for number in range(CHAINS)
            ]
            await asyncio.gather(*(handle.result() for handle in handles))
            if ran["step"] - before != CHAINS * STEPS:
                raise RuntimeError("not every step ran in this round")
            steps = CHAINS * STEPS
            took, used = time.perf_counter() - began, time.process_time() - used
            return steps / took, 1e6 * used / steps

    return asyncio.run(run())


async def _tab(address: str, path: str, reads: list[int]) -> None:
    """Behave as an open page: follow the stream, and read again at each change."""
    host, _, port = address.removeprefix("http://").partition(":")
    watched = path.partition("?")[2]
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /api/v1/stream?{watched} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    try:
        while line := await reader.readline():
            if line.startswith(b"data:"):
                with suppress(urllib.error.HTTPError):  # its run is being restarted
                    await asyncio.to_thread(get, f"{address}/api/v1{path}")
                reads[0] += 1
    finally:
        writer.close()


async def _rate(store: str, address: str, tabs: tuple[str, ...]) -> tuple[float, float, float]:
    reads = [0]
    open_tabs = [asyncio.create_task(_tab(address, path, reads)) for path in tabs]
    await asyncio.sleep(1)
    began, reads[0] = time.perf_counter(), 0
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        rate, cpu = await asyncio.get_running_loop().run_in_executor(pool, work, store)
    asked = reads[0] / (time.perf_counter() - began)
    for each in open_tabs:
        each.cancel()
    await asyncio.gather(*open_tabs, return_exceptions=True)
    return rate, cpu, asked


def measure_tabs(folder: Path, rounds: int) -> dict[str, str]:
    store = folder / "busy.db"
    fill(store, 10_000)
    work(str(store))
    rates: dict[int, list[float]] = {0: [], len(TABS): []}
    cpus: dict[int, list[float]] = {0: [], len(TABS): []}
    asked: list[float] = []
    used: list[float] = []
    with served(store) as (address, server):
        for _ in range(rounds):
            for number, found in rates.items():
                began, before = time.perf_counter(), sum(server.cpu_times()[:2])
                rate, cpu, reads = asyncio.run(_rate(str(store), address, TABS[:number]))
                found.append(rate)
                cpus[number].append(cpu)
                if number:
                    asked.append(reads)
                    busy = sum(server.cpu_times()[:2]) - before
                    used.append(100 * busy / (time.perf_counter() - began))
    alone, beside = (statistics.median(each) for each in rates.values())
    cpu_alone, cpu_beside = (statistics.median(each) for each in cpus.values())
    idle = asyncio.run(_count_idle(store))
    return {
        "steps a second without open pages": f"{alone:,.0f} ({_range(rates[0])})",
        f"steps a second beside {len(TABS)} open pages": f"{beside:,.0f} "
        f"({_range(rates[len(TABS)])}), which read {statistics.median(asked):.0f} times a second",
        "CPU of the workers for a step, without and beside them": (
            f"{cpu_alone:.0f} and {cpu_beside:.0f} µs"
        ),
        f"share of a core that the server takes for {len(TABS)} open pages beside busy workers": (
            f"{_range(used)} %"
        ),
        "queries a second of an idle page": f"{idle / IDLE_SECONDS:.2f}",
    }


def _range(values: list[float]) -> str:
    return f"{min(values):,.0f} to {max(values):,.0f}"


@click.command()
@click.option("--runs", default=1_000_000, show_default=True, help="Runs in the large store.")
@click.option("--rounds", default=5, show_default=True, help="With and without open pages.")
@click.option("--only", multiple=True, type=click.Choice(["million", "long", "tabs"]))
@click.option("--into", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(*, runs: int, rounds: int, only: tuple[str, ...], into: Path | None) -> None:
    """Measure the dashboard. --into renews the table of a page between its two marks."""
    parts = only or ("million", "long", "tabs")
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="perdure-dashboard-") as name:
        folder = Path(name)
        if "million" in parts:
            found |= measure_million(folder, runs)
        if "long" in parts:
            found |= measure_long(folder)
        if "tabs" in parts:
            found |= measure_tabs(folder, rounds)
    table = "\n".join(f"| {what} | {value} |" for what, value in found.items())
    print(table)
    if into is not None:
        text = into.read_text(encoding="utf-8")
        into.write_text(renew(text, "dashboard", f"| what | measured |\n|---|---|\n{table}"))


if __name__ == "__main__":
    main()
