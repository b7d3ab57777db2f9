"""Sub-orchestrations: call an orchestration inside another one; the tree is five levels deep."""

import asyncio

from perdure import Runtime, activity, orchestration


@activity
async def count_files(path: str) -> int:
    return len(path)


@orchestration
async def walk(path: str, depth: int) -> int:
    own = await count_files(path)
    if depth == 0:
        return own
    below = await asyncio.gather(walk(f"{path}/a", depth - 1), walk(f"{path}/b", depth - 1))
    return own + sum(below)


async def main() -> None:
    async with Runtime("memory:", [walk, count_files]) as runtime:
        handle = await runtime.start(walk, "root", 4, id="walk")
        print(f"{await handle.result()} files")
        tree = await runtime.admin.tree("walk")
        print(f"{len(tree.instance_ids)} instances")


if __name__ == "__main__":
    asyncio.run(main())
