"""Starting instances from code without an event loop."""

import pytest

from perdure import BlockingClient, Runtime, orchestration
from perdure.errors import AlreadyExists


@orchestration
async def double(number: int, plus: int = 0) -> int:
    return 2 * number + plus


def test_a_blocking_client_starts_as_its_client_does():
    with BlockingClient(Runtime("memory:", [double])) as portal:
        handle = portal.start(double, 21, id="d-1")
        again = portal.start(double, 5, id="d-1")
        other = portal.start(double, 5, 1, version="1.0.0", delay=0)

        assert portal.call(handle.result, 10) == portal.call(again.result, 10) == 42
        assert portal.call(other.result, 10) == 11
        with pytest.raises(AlreadyExists):
            portal.start(double, 21, id="d-1", if_exists="fail")
