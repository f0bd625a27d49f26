"""How long the server works for a request: until it is answered, takes too long, or its client goes away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive

from specexport_runtime.server.errors import client_gone, timed_out


@asynccontextmanager
async def request_life(receive: Receive, timeout_s: float) -> AsyncIterator[None]:
    """Interrupts its block, wherever it waits, when the client goes away (``ApiError`` 499) or the time is up (504).

    ``receive`` is that of a request whose body was read. The error replaces what the block would have raised.
    """
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        with suppress(RuntimeError):  # it was up already, in this very turn of the loop
            limit.reschedule(0)  # now

    try:
        async with asyncio.timeout(timeout_s) as limit:
            watcher = asyncio.create_task(watch())
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if not limit.expired():
            raise  # one of the block's own
        raise (client_gone() if gone else timed_out(timeout_s)) from None
