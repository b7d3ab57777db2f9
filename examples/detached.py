"""Detached starts: start an orchestration that does not depend on this one."""

import asyncio

from perdure import Runtime, activity, orchestration, start_detached


@activity
async def send_mail(to: str) -> str:
    return f"mail sent to {to}"


@orchestration
async def newsletter(to: str) -> str:
    return await send_mail(to)


@orchestration
async def sign_up(address: str) -> str:
    start_detached(newsletter, address, id=f"newsletter-{address}")
    return f"welcome, {address}"


async def main() -> None:
    async with Runtime("memory:", [sign_up, newsletter, send_mail]) as runtime:
        handle = await runtime.start(sign_up, "ada@example.org", id="sign-up-1")
        print(await handle.result())
        letter = runtime.get("newsletter-ada@example.org", newsletter)
        print(await letter.result(timeout=10))


if __name__ == "__main__":
    asyncio.run(main())
