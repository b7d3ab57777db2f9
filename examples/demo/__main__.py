"""A shop that loses its worker in the middle of the day, and no order with it.

``python -m examples.demo`` starts a worker process, kills it with SIGKILL, starts another one, and
checks that every order ended right and that no activity's result was observed twice.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

FOLDER = Path("perdure-demo")
STORE = FOLDER / "shop.db"
os.environ["DEMO_LEDGER"] = str((FOLDER / "ledger.txt").absolute())

from examples.demo import shop  # noqa: E402
from examples.demo.audit import Audit, audit  # noqa: E402
from examples.demo.plan import Case, make_plan  # noqa: E402
from examples.demo.screen import Screen  # noqa: E402

from perdure import Client  # noqa: E402
from perdure.authoring.definitions import Registry  # noqa: E402
from perdure.errors import InstanceFinished, NotFound  # noqa: E402

_KILL_AFTER = 0.3
"""Share of the plan that has ended when the worker is killed."""
_PATIENCE_SECONDS = 90


def start_worker() -> subprocess.Popen[bytes]:
    """A worker like in production, but quick to lose its locks when it dies."""
    command = [sys.executable, "-m", "perdure", "worker", "examples.demo.shop"]
    options = ["--store", str(STORE), "--slots", "10", "--lock", "2s", "--log", "error"]
    return subprocess.Popen([*command, *options], start_new_session=True)  # noqa: S603


@asynccontextmanager
async def page_of(client: Client) -> AsyncGenerator[str | None]:
    """Serve the dashboard while the shop runs; None where it is not installed or not built."""
    try:
        from perdure.dashboard import dashboard
        from perdure.dashboard.app import STATIC
        from perdure.dashboard.server import Server
    except ImportError:
        yield None
        return
    if not (STATIC / "index.html").is_file():
        yield None
        return
    listener = socket.create_server(("127.0.0.1", 0))
    app = dashboard(client, hosts=["127.0.0.1"], registry=Registry([shop]))
    server = Server(app, log_level="error")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        await serving
        listener.close()


async def run_shop(cases: list[Case], screen: Screen) -> Audit:
    async with Client(STORE) as client, page_of(client) as address:
        if address is not None:
            screen.say(f"watch it in a browser: {address}", "bold")
        for case in cases:
            await client.start(case.orchestration, *case.arguments, id=case.id)
        screen.say(f"{len(cases)} instances started; no worker runs yet")
        worker = start_worker()
        screen.say(f"worker {worker.pid} started")
        try:
            await _until_ended(client, cases, screen, round(len(cases) * _KILL_AFTER))
            depths = await client.admin.queue_depths()
            worker.kill()
            worker.wait()
            running = depths.worker.locked
            screen.say(
                f"worker {worker.pid} killed with SIGKILL, {running} activities running", "bold red"
            )
            await asyncio.sleep(1)
            worker = start_worker()
            screen.say(f"worker {worker.pid} started; it takes over what the dead one held", "bold")
            await _until_ended(client, cases, screen, len(cases))
        finally:
            worker.terminate()
            worker.wait()
        screen.say("all ended; checking every history and the ledger")
        return await audit(client, cases)


async def _until_ended(client: Client, cases: list[Case], screen: Screen, enough: int) -> None:
    open_cases = {case.id: case for case in cases}
    ended: Counter[str] = Counter()
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            statuses: Counter[str] = Counter()
            for case in list(open_cases.values()):
                status = await client.describe(case.id, waits=False)
                if status.status.is_final:
                    ended[case.kind] += 1
                    del open_cases[case.id]
                else:
                    statuses[str(status.custom_status or status.status).lower()] += 1
                if case.approve and status.custom_status == "waiting for approval":
                    await _approve(client, case)
            screen.update(ended, statuses)
            if sum(ended.values()) >= enough:
                return
            await asyncio.sleep(0.1)


async def _approve(client: Client, case: Case) -> None:
    """The manager; says yes more than once if need be, which does no harm."""
    try:
        await client.raise_event(case.id, "approval", value=True)
    except (InstanceFinished, NotFound):
        return


def print_result(found: Audit) -> None:
    print()
    print(f"{found.instances} instances ended as they should (children included)")
    print(f"{found.activities} activity results, each observed exactly once")
    print(f"{found.retried} activities succeeded only when they were retried")
    print(
        f"{found.effects} effects in the ledger; {found.repeated} of them happened again after the"
    )
    print("  crash: they had run, but the worker died before it could commit their result")
    for problem in found.problems:
        print(f"PROBLEM: {problem}")
    print()
    print("The store is still there. Look around:" if not found.problems else "Look into it:")
    for command in (
        f"perdure list parent:none --store {STORE}",
        f"perdure show big-order-approved-1 --store {STORE}",
        f"perdure history card-declined-1 --store {STORE}",
        f"perdure serve --store {STORE} -m examples.demo.shop --open",
    ):
        print(f"  {_runnable()}{command.removeprefix('perdure')}")


def _runnable() -> str:
    """The command as it can be typed here: the script of this environment, if it is not on PATH."""
    if shutil.which("perdure") is not None:
        return "perdure"
    script = Path(sys.executable).with_name("perdure")
    if not script.exists():
        return f"{os.path.relpath(sys.executable)} -m perdure"
    return os.path.relpath(script)


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(mode=0o700)
    (FOLDER / ".gitignore").write_text("*\n", encoding="utf-8")
    cases = make_plan()
    with Screen(cases) as screen:
        found = asyncio.run(run_shop(cases, screen))
    print_result(found)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
