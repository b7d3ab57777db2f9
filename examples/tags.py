"""Tags: an activity goes only to workers that serve its tag."""

import asyncio

from perdure import (
    Handler,
    Runtime,
    RuntimeOptions,
    TagFilter,
    activity,
    activity_info,
    orchestration,
)
from perdure.providers.sqlite.memory import InMemoryProvider, MemoryStore


@activity(tag="gpu")
async def render(scene: str) -> str:
    return f"{scene} rendered by {activity_info().worker_id}"


@activity
async def announce(text: str) -> str:
    return f"{text}, announced by {activity_info().worker_id}"


@orchestration
async def film(scene: str) -> str:
    return await announce(await render(scene))


async def main() -> None:
    store = MemoryStore()
    plain = RuntimeOptions(worker_id="plain")
    gpu = RuntimeOptions(worker_id="gpu", tags=TagFilter.only("gpu"), run_orchestrations=False)
    handlers: list[Handler] = [film, render, announce]
    async with (
        Runtime(InMemoryProvider(store=store), handlers, options=plain) as runtime,
        Runtime(InMemoryProvider(store=store), handlers, options=gpu),
    ):
        handle = await runtime.start(film, "scene 1")
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
