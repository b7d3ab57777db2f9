"""Activities that run in child processes must be importable."""

import os
import time

from perdure import activity


@activity(executor="process", timeout=0.5)
def never_ends() -> None:
    while True:
        time.sleep(0.01)


@activity(executor="process")
def whoami(value: list[int]) -> dict[str, int]:
    return {"pid": os.getpid(), "sum": sum(value)}


@activity(executor="process")
def dies() -> None:
    os._exit(7)


@activity(executor="process")
def complains() -> None:
    raise LookupError("not here")
