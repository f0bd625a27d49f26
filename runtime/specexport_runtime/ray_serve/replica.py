"""One replica: a bundle loaded in a Ray actor, behind the application of ``specexport serve``, with Ray metrics."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.errors import EngineDeadError, InvalidRequestError, SpecexportError
from specexport_runtime.ray_serve.settings import API_KEYS, RaySettings, api_keys
from specexport_runtime.server.config import ServerConfig

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

REPLICA_HEADER = b"x-specexport-replica"
"""Response header: the replica that answered."""

_CLOSE_SECONDS = 5.0
_LAST_WORDS_SECONDS = 1.0
"""Between telling Ray that a replica is dead and ending its process."""
_log = logging.getLogger(__name__)

PERIOD_S = 5.0


class Replica:
    """Loads the bundle of ``settings`` and answers with it; ``needs_key``: not without an API key."""

    def __init__(self, settings: RaySettings, *, needs_key: bool) -> None:
        self._settings = settings
        self.config = make_replica_config(settings, needs_key=needs_key)
        self._engine: AsyncSpecEngine | None = None
        self._app: AsgiApp | None = None
        self._end_process: Callable[[int], object] = os._exit

    async def load(self) -> None:
        """Load the bundle and make the application."""
        from specexport_runtime.server.app import create_app

        self._engine = await AsyncSpecEngine.load(
            self._settings.bundle, self._settings.engine, max_waiting=self.config.max_waiting
        )
        app = create_app(self._engine, self.config)
        state = app.state.server
        if state.metrics is not None:
            MetricsMirror(state.metrics.registry).start()
        self._app = add_headers(app, (REPLICA_HEADER, replica_name().encode()))

    @property
    def app(self) -> AsgiApp:
        """The application."""
        if self._app is None:
            raise SpecexportError("the replica has not loaded its bundle.")
        return self._app

    def describe(self) -> dict[str, Any]:
        """Which process this is and what it does: for operators and tests, by a deployment handle."""
        engine = self._engine
        active, rounds = (0, 0) if engine is None else (engine.num_active, engine.engine.times.rounds)
        return {"replica": replica_name(), "pid": os.getpid(), "active": active, "rounds": rounds}

    async def check_health(self) -> None:
        """Fail if the engine is closed, dead or stuck, and Ray replaces it; a dead one ends its process as well."""
        if self._engine is None:
            return
        if (trouble := self._engine.engine.trouble) is not None:
            if isinstance(trouble, EngineDeadError):
                _log.error("This replica ends: %s", trouble)
                asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self._end_process, 1)
            raise trouble

    async def relay(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Answer a request whose body was read elsewhere, in ASGI messages; closing the generator cancels it."""
        async for messages in run_asgi(self.app, scope, body):
            yield messages

    async def close(self) -> None:
        """Finish what is being answered, then free the engine."""
        if self._engine is not None:
            await self._engine.aclose(_CLOSE_SECONDS)  # Ray has waited for requests before it calls this


async def run_asgi(app: AsgiApp, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
    """Run an application on a request whose body is known; closing the generator is the client's disconnect."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    requests = asyncio.Queue[Message]()
    requests.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def answer() -> None:
        try:
            await app(scope, requests.get, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.ensure_future(answer())
    try:
        while (message := await sent.get()) is not None:
            messages = [message]
            while not sent.empty() and (more := sent.get_nowait()) is not None:
                messages.append(more)
            yield messages
            if task.done() and sent.empty():
                break
        await task
    finally:
        requests.put_nowait({"type": "http.disconnect"})
        task.cancel()


def add_headers(app: AsgiApp, *more: tuple[bytes, bytes]) -> AsgiApp:
    """An application whose answers have more headers, and no ``X-Request-Id``: Ray's proxy adds that, the same one."""

    async def edited(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def send_edited(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [item for item in message.get("headers", ()) if item[0].lower() != b"x-request-id"]
                message = {**message, "headers": [*kept, *more]}
            await send(message)

        await app(scope, receive, send_edited)

    return edited


def make_replica_config(settings: RaySettings, *, needs_key: bool) -> ServerConfig:
    """Settings with this process's API keys (InvalidRequestError if one is missing) and the proxies' address."""
    keys = api_keys()
    if needs_key and not keys:
        raise InvalidRequestError(
            f"{API_KEYS} was set where the application was deployed and is not set for its replicas.",
            "set it on every node before `ray start`; Ray keeps and shows what is in runtime_env.",
        )
    return use_proxy_address(replace(settings.server, api_keys=keys))


def use_proxy_address(config: ServerConfig) -> ServerConfig:
    """Ray's proxies' address, if they run; InvalidRequestError if others can reach it and there is no API key."""
    from ray.serve.context import _get_global_client

    try:
        client = _get_global_client(raise_if_no_controller_running=False)
    except Exception:  # no cluster yet
        client = None
    host = None if client is None else client.http_config.host
    if host is None or host == config.host:
        return config
    try:
        return replace(config, host=host)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"Ray Serve's proxies listen there already: {error.message}", error.hint) from error


def replica_name() -> str:
    """Name of the replica that this process is."""
    from ray import serve

    return str(serve.get_replica_context().replica_tag)


class MetricsMirror:
    """Copies the samples of a Prometheus ``CollectorRegistry`` to gauges of Ray, with the tags of the replica."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._gauges: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Copy every few seconds, for as long as the event loop runs."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def copy(self) -> int:
        """Copy all samples once; returns how many."""
        from ray.serve.metrics import Gauge

        count = 0
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                keys = tuple(sample.labels)
                name = sample.name.replace(":", "_")
                gauge = self._gauges.get((name, keys))
                if gauge is None:
                    gauge = self._gauges[name, keys] = Gauge(name, family.documentation, tag_keys=keys)
                gauge.set(sample.value, tags=dict(sample.labels))
                count += 1
        return count

    async def _run(self) -> None:
        while True:
            try:
                self.copy()
            except Exception:  # Ray's metrics come and go with its agents; answers must not depend on them
                _log.exception("metrics could not be handed to Ray")
            await asyncio.sleep(PERIOD_S)
