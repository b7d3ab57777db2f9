"""A message in the queue of one instance that speaks for another one is not believed."""

import pytest

from perdure.conformance.factories import raised
from perdure.errors import CorruptData
from perdure.providers.records import Delivery, OrchestrationItem
from perdure.runtime.instances import arrivals_of


def test_a_message_that_names_another_instance_inside_is_corrupt():
    item = OrchestrationItem(
        instance_id="x",
        name="flow",
        version=None,
        execution_id=1,
        history=(),
        messages=(Delivery(message_id=1, body=raised("victim").body, attempt_count=1),),
        kv_snapshot={},
    )

    with pytest.raises(CorruptData, match="'victim'"):
        arrivals_of(item)
