"""Waiting on conditions: a time only ever bounds a failure."""

import asyncio
import inspect

from patience import HANG_SECONDS
from perdure.errors import NotFound


async def until(condition, seconds=HANG_SECONDS):
    """Wait until the condition, a function or an async one, holds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not (await found if inspect.isawaitable(found := condition()) else found):
        assert asyncio.get_running_loop().time() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


async def waiting(client, instance_id):
    """Wait until the instance waits for something."""

    async def is_waiting():
        try:
            return bool((await client.describe(instance_id)).waiting_for)
        except NotFound:
            return False

    await until(is_waiting)


async def reached(client, instance_id, status):
    """Wait until the instance has that status."""

    async def has_status():
        try:
            return (await client.describe(instance_id, waits=False)).status is status
        except NotFound:
            return False

    await until(has_status)
