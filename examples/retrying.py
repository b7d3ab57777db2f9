"""Retries: a flaky service is asked again with growing pauses, but not for errors that stay."""

import asyncio

from perdure import ActivityFailed, Retry, Runtime, activity, activity_info, orchestration

PATIENT = Retry(max_attempts=5, first_delay=0.01, never=(PermissionError,))


@activity(retry=PATIENT, timeout=5)
async def ask_service(question: str) -> str:
    attempt = activity_info().attempt
    if question == "secret":
        raise PermissionError("not for you")
    if attempt < 3:
        raise ConnectionError(f"attempt {attempt} failed")
    return f"answer to {question} at attempt {attempt}"


@orchestration
async def interview() -> list[str]:
    answers = [await ask_service("weather")]
    try:
        answers.append(await ask_service("secret"))
    except ActivityFailed as error:
        answers.append(f"{error.type_name}: {error.message}")
    return answers


async def main() -> None:
    async with Runtime("memory:", [interview, ask_service]) as runtime:
        handle = await runtime.start(interview)
        for answer in await handle.result():
            print(answer)


if __name__ == "__main__":
    asyncio.run(main())
