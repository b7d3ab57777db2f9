"""Sessions: activities of one session run on one worker, which may keep something in memory."""

import asyncio

from perdure import Runtime, activity, activity_info, orchestration

loaded: dict[str, str] = {}


@activity
async def load_model(name: str) -> str:
    loaded[name] = activity_info().worker_id
    return name


@activity
async def predict(name: str, value: int) -> bool:
    return loaded[name] == activity_info().worker_id and value > 0


@orchestration
async def batch(values: list[int]) -> int:
    model = await load_model.options(session="model-7")("small")
    one = predict.options(session="model-7")
    return sum(await asyncio.gather(*[one(model, value) for value in values]))


async def main() -> None:
    async with Runtime("memory:", [batch, load_model, predict]) as runtime:
        handle = await runtime.start(batch, [1, -1, 2])
        print(f"{await handle.result()} of 3 are positive")


if __name__ == "__main__":
    asyncio.run(main())
