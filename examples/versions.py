"""Versions side by side: a running instance keeps its code; continue_as_new takes the newest."""

import asyncio

from perdure import Runtime, continue_as_new, orchestration, wait_for_event


@orchestration(name="service", version="1.0.0")
async def service_1(rounds: list[str]) -> list[str]:
    await wait_for_event("next", None)
    continue_as_new([*rounds, "1.0.0"])


@orchestration(name="service", version="2.0.0")
async def service_2(rounds: list[str]) -> list[str]:
    await wait_for_event("next", None)
    return [*rounds, "2.0.0"]


async def main() -> None:
    async with Runtime("memory:", [service_1, service_2]) as runtime:
        handle = await runtime.start(service_1, [], id="s", version="1.0.0")
        for _ in range(2):
            await handle.raise_event("next")
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
