"""Requests made up from the OpenAPI document, fitting and unfitting: none is answered by a 500."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from dashboard.conftest import OnLoop, running_shop
from perdure.dashboard import dashboard

EXAMPLES = 12
"""For each operation and mode; more are asked for with ``HYPOTHESIS_PROFILE`` or by hand."""


@pytest.fixture(scope="module")
def operations():
    with running_shop("memory:") as (loop, runtime):
        app = OnLoop(dashboard(runtime), loop)
        schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app)
        yield [each.ok() for each in schema.get_all_operations()]


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_is_answered_by_a_server_error(operations, mode):
    assert len(operations) > 30
    for operation in operations:

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            response = case.call(headers={"X-Perdure-Write": "1"})
            assert response.status_code < 500, (case.as_curl_command(), response.text)

        ask()
