"""The deployment in front of the replicas that reads prompts, so that prompts that begin alike go to one replica."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from specexport_runtime.ray_serve.affinity import prompt_key
from specexport_runtime.ray_serve.replica import AsgiApp, Receive, Send, add_headers, make_replica_config
from specexport_runtime.ray_serve.settings import RaySettings

_PICKLED = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)


class PrefixIngress:
    """Passes a request on to a replica by the beginning of its prompt; ``needs_key``: not without an API key."""

    def __init__(self, settings: RaySettings, replicas: Any, *, needs_key: bool) -> None:
        self._settings = settings
        self._replicas = replicas.options(method_name="relay", stream=True)
        self.config = make_replica_config(settings, needs_key=needs_key)

    def make_app(self) -> AsgiApp:
        """An application with the guards of a replica's, and no routes."""
        from specexport_runtime.server.guard import Guard
        from specexport_runtime.server.state import ServerState

        state = ServerState(self.config, engine=self._replicas)  # ready as long as it runs: it waits for replicas
        return add_headers(Guard(self._pass_on, self.config, state))

    async def _pass_on(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _answer_lifespan(scope, receive, send)
            return
        body = (await receive()).get("body", b"")  # the guards have read it
        key = prompt_key(body, self._settings.prefix_chars) if scope["method"] == "POST" else ""
        plain = {name: scope[name] for name in _PICKLED if name in scope}
        answer = self._replicas.options(session_id=key).remote(plain, body)
        gone = asyncio.ensure_future(receive())  # nothing comes after the body but the client's disconnect
        relaying = asyncio.ensure_future(_relay(answer, send))
        try:
            await asyncio.wait({gone, relaying}, return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                relaying.result()
        finally:
            gone.cancel()
            if not relaying.done():
                relaying.cancel()
                answer.cancel()


async def _relay(answer: Any, send: Send) -> None:
    from ray.exceptions import RayError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    from specexport_runtime.errors import QueueFullError
    from specexport_runtime.server.errors import ApiError

    try:
        async for messages in answer:
            for message in messages:
                await send(message)
    except BackPressureError as error:
        raise QueueFullError("every replica is busy, and as many requests wait as may.", "try again later.") from error
    except (RayError, DeploymentUnavailableError) as error:  # before the first byte this is the answer
        raise ApiError(
            503,
            "the replica that had this request is gone; send it again.",
            kind="service_unavailable",
            code="replica_lost",
            headers={"Retry-After": "1"},
        ) from error


async def _answer_lifespan(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for word in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{word}.complete"})
