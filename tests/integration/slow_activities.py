"""Activities that run in child processes must be importable."""

import os
import signal
import time

from perdure import activity, activity_info, heartbeat, is_cancelled, last_heartbeat
from perdure.errors import UsageError


@activity(executor="process", timeout=0.05)
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
def dies_and_leaves_somebody() -> None:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


@activity(executor="process")
def is_told_to_end() -> str:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    return "not my decision"


@activity(executor="process")
def complains() -> None:
    raise LookupError("not here")


@activity(executor="process")
def knows_itself() -> list[str]:
    info = activity_info()
    told = [info.idempotency_key, info.activity_name, str(info.attempt), info.instance_id]
    for ask in (heartbeat, last_heartbeat, is_cancelled):
        try:
            ask()
        except UsageError as error:
            told.append(str(error))
    return told


@activity(executor="process")
def python_path() -> str | None:
    return os.environ.get("PYTHONPATH")


def plain(number: int) -> int:
    return number + 1


class Declined(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("declined")
        self.code = code


@activity(executor="process", raises=[Declined])
def declines() -> None:
    raise Declined(7)
