"""Debounce: many changes within a moment are one run of the work, with the last of them."""

import asyncio

from perdure import Runtime, activity, next_message, orchestration

QUIET_SECONDS = 0.3


@activity
async def build(commit: str) -> str:
    return f"built {commit}"


@orchestration
async def build_when_quiet() -> str:
    commit = await next_message("commits", str)
    while True:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                commit = await next_message("commits", str)
        except TimeoutError:
            return await build(commit)


async def main() -> None:
    async with Runtime("memory:", [build_when_quiet, build]) as runtime:
        for commit in ("a1", "b2", "c3"):
            handle = await runtime.start(
                build_when_quiet, id="build", if_exists="restart", message=("commits", commit)
            )
        print(await handle.result())
        handle = await runtime.start(
            build_when_quiet, id="build", if_exists="restart", message=("commits", "d4")
        )
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
