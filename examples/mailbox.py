"""A chat: messages wait in a mailbox in the order they were sent, until the code reads them."""

import asyncio

from perdure import Runtime, activity, next_message, orchestration, set_custom_status


@activity
async def answer(message: str) -> str:
    return message.upper()


@orchestration
async def chat() -> list[str]:
    replies: list[str] = []
    while (message := await next_message("inbox", str)) != "bye":
        replies.append(await answer(message))
        set_custom_status({"replies": len(replies)})
    return replies


async def main() -> None:
    async with Runtime("memory:", [chat, answer]) as runtime:
        handle = await runtime.start(chat, id="chat-1")
        for message in ("hello", "how are you?", "bye"):
            await handle.send_message("inbox", message)
        print(await handle.result())
        print((await handle.describe()).custom_status)


if __name__ == "__main__":
    asyncio.run(main())
