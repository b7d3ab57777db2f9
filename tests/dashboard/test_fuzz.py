"""Requests made up from the OpenAPI document, fitting and unfitting: none is answered by a 500."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from dashboard.conftest import OnLoop, running_shop
from perdure.dashboard import dashboard

EXAMPLES = 3
"""For each operation and mode; ``campaigns.dashboard`` takes more."""


def ask_every_operation(examples):
    """Raise for the first answer that is a server error; return the number of requests."""
    asked = 0
    with running_shop("memory:") as (loop, runtime):
        app = OnLoop(dashboard(runtime), loop)
        schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app)
        operations = [each.ok() for each in schema.get_all_operations()]
        assert len(operations) > 30
        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

                @settings(
                    max_examples=examples,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def ask(case):
                    nonlocal asked
                    asked += 1
                    response = case.call(headers={"X-Perdure-Write": "1"})
                    assert response.status_code < 500, (case.as_curl_command(), response.text)

                ask()
    return asked


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
def test_no_request_is_answered_by_a_server_error():
    assert ask_every_operation(EXAMPLES) > 100
