"""A runtime does not check its built-in handlers when it opens. They are checked here."""

import asyncio

from perdure import InMemoryProvider, Runtime
from perdure.codec import JSON


def built_in():
    async def handlers():
        registry = Runtime(InMemoryProvider(), []).registry
        orchestrations = [
            registry.resolve_orchestration(*key) for key in registry.orchestration_keys
        ]
        return orchestrations + list(map(registry.resolve_activity, registry.activity_names))

    return asyncio.run(handlers())


def test_arguments_and_results_of_built_in_handlers_can_be_read_back():
    handlers = built_in()

    assert len(handlers) >= 5
    for handler in handlers:
        handler.signature.check_annotations(JSON)
