"""Several models behind one server: each is opened when a request asks for it, and closed when memory or time say.

::

    closed ── a request asks, and there is room ──> opening ──> open ── it rests ──> closing ──> closed

A model opens in a thread of its own: requests for it wait, all others go on. It rests while no request leases it.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.bundle.sizes import most_memory
from specexport_runtime.drafters.suffix_open import CACHE
from specexport_runtime.engine import SpecEngine
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import InvalidRequestError, OwnerLimitError, QueueFullError
from specexport_runtime.executors.gpu import format_gib
from specexport_runtime.intake.checks import check_adapter
from specexport_runtime.metrics import EngineMetrics
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.conversation import warn_of_unused_budget
from specexport_runtime.server.errors import ApiError, unavailable_error
from specexport_runtime.server.models import no_such_model
from specexport_runtime.server.parsing import parse_json
from specexport_runtime.server.prompt_tokens import SHORT
from specexport_runtime.server.state import ServerState
from specexport_runtime.side_work import SideWork

T = TypeVar("T")

LOADER = "specexport-load"
"""Name of the threads that open bundles."""
PATIENCE_S = 30.0
"""How long a model waits for others to rest, if there is no memory for it beside them."""
HURRY_S = 1.0
"""For the prefixes of a model that is being closed, once a request waits for that."""
RETRY_S = 5.0
"""After an opening that failed, until a request tries it again."""
_log = logging.getLogger("specexport.server")


class _Model:
    """One bundle, and who uses it."""

    def __init__(self, state: ServerState, bundle: Path, manifest: Manifest, options: EngineOptions) -> None:
        self.state, self.bundle = state, bundle  # the state has its engine while it is open
        self.name = state.config.model_name
        self.num_rows = options.max_num_seqs or manifest.default_num_seqs
        length, rows = state.max_model_len or 0, self.num_rows + options.prefix_rows
        self.num_bytes = most_memory(manifest, num_rows=rows, max_model_len=length, kv_bytes=options.kv_bytes)
        self.phase: Literal["closed", "opening", "open", "closing"] = "closed"  # memory is taken in all but the first
        self.change: asyncio.Task[tuple[str, str] | None] | None = None  # opens or closes it; why it could not
        self.retry_at = 0.0  # no opening before, on the loop's clock
        self.leases: Counter[str] = Counter()  # requests that use it, or wait for it, by owner
        self.rested_at = 0.0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def rests(self) -> bool:
        """Whether it can be closed: it is open, no request needs it, and its engine would end."""
        engine = self.state.engine
        return engine is not None and not (self.leases.total() or engine.has_work_aside or engine.engine.trouble)


class ModelPool(ServerState):
    """The models of a server by name; its end is that of an ``AsyncSpecEngine``.

    InvalidRequestError if two have a name, or one does not fit the options or the memory; BundleError for a bad bundle.
    """

    opens_when_asked = True

    def __init__(
        self,
        bundles: Mapping[str, Path],  # by the names of their models
        config: ServerConfig,
        options: EngineOptions,
        *,
        idle_unload_s: float | None = None,  # how long a model may rest; None for ever
        memory: int | None = None,  # bytes of all that are open; None for no limit
    ) -> None:
        super().__init__(config)
        self._options, self._idle_unload_s, self._memory = options, idle_unload_s, memory
        self._models: dict[str, _Model] = {}
        self._names: dict[str, _Model] = {}  # of LoRA adapters too
        for name, bundle in bundles.items():
            self._add(name, bundle)
        self.metrics = next(iter(self._models.values())).state.metrics
        if options.suffix_file not in (None, CACHE) and len(bundles) > 1:
            raise InvalidRequestError("--suffix-file is one file, and there are several models.", "give `cache`.")
        self._changed = asyncio.Event()  # set, and made anew, whenever room may have come
        self._reading = SideWork("specexport-models")
        self._ending: list[AsyncSpecEngine] = []
        self._closing: dict[_Model, AsyncSpecEngine] = {}

    def _add(self, name: str, bundle: Path) -> None:
        manifest, asked = load_manifest(bundle), self._options.max_model_len
        if asked is not None and not 2 <= asked <= manifest.max_model_len:
            raise InvalidRequestError(
                f"max_model_len is {asked}, and {bundle} allows 2 to {manifest.max_model_len}.", "leave it out."
            )
        first = next(iter(self._models.values()), None)
        state = ServerState(
            replace(self.config, model_name=name),
            metrics=EngineMetrics(name, beside=None if first is None else first.state.metrics),
            started=int(time.time()),
            max_model_len=asked or manifest.max_model_len,
            adapters=manifest.models["target"].chosen_adapters if "target" in manifest.models else (),
        )
        check_adapter(self._options.lora, state.adapters)
        model = self._models[name] = _Model(state, bundle, manifest, self._options)
        for each in (name, *state.adapters):
            if each in self._names:
                raise InvalidRequestError(
                    f"{each!r} would name a model of {self._names[each].bundle}, and one of {bundle}.",
                    "rename a folder, or serve them apart.",
                )
            self._names[each] = model
        if self._memory is not None and model.num_bytes > self._memory:
            raise InvalidRequestError(
                f"--memory is {format_gib(self._memory)}, and {bundle} may take {format_gib(model.num_bytes)}.",
                "give more, or a smaller --max-num-seqs, --max-model-len or --kv-cache-memory-bytes.",
            )

    @property
    def states(self) -> list[ServerState]:
        """Those of the models, in the order in which they were given."""
        return [model.state for model in self._models.values()]

    @property
    def status(self) -> str:
        """As ``ServerState.status``: ready though no model is open, dead if one engine is."""
        is_dead = any(state.engine is not None and state.status == "dead" for state in self.states)
        return "dead" if is_dead else "draining" if self.draining else "ready"

    @asynccontextmanager
    async def lease(self, request: Request, asked: bytes | str | None) -> AsyncIterator[ServerState]:
        """The state of the model that a body or a name asks for, open until it is left.

        ``ApiError``: there is no such model (404), or it could not be opened (503). ``QueueFullError``: too many wait.
        """
        owner = getattr(request.state, "owner", "")
        name = await self._read_model_name(asked, owner) if isinstance(asked, bytes) else asked
        model = self._find(name)
        request.state.served = model.state
        if (log := getattr(request.state, "log", None)) is not None:
            log.model = name or model.name
        model.leases[owner] += 1
        try:
            if model.state.engine is None:
                await self._open_for(owner, model)
            yield model.state
        finally:
            model.leases[owner] -= 1
            self._note_rest(model)

    async def _read_model_name(self, data: bytes, owner: str) -> str | None:
        read = partial(parse_json, data)
        body = read() if len(data) <= SHORT else await self._reading.put(owner, read)
        name: Any = body.get("model")
        if name is not None and not isinstance(name, str):
            raise ApiError(400, "model must be a text.", param="model", code="invalid_type")
        return name

    def _find(self, name: str | None) -> _Model:
        if name is None and len(self._models) > 1:
            message = "model is missing: this server has several. GET /v1/models lists them."
            raise ApiError(400, message, param="model", code="missing_required_parameter")
        found = next(iter(self._models.values())) if name is None else self._names.get(name)
        if found is None:
            raise no_such_model(name, list(self._names))
        return found

    async def _open_for(self, owner: str, model: _Model) -> None:
        """Wait until a model is open, with as many others as its engine will take."""
        limits = (
            (QueueFullError, model.num_rows + self.config.max_waiting, model.leases.total()),
            (OwnerLimitError, self.config.per_key_limit(model.num_rows), model.leases[owner]),
        )
        for kind, limit, count in limits:
            if limit is not None and count > limit:
                raise kind(f"{limit} requests wait for model {model.name!r} to be opened.", "try again later.")
        while model.state.engine is None:
            if self.draining:
                raise unavailable_error("draining", "The server is shutting down.")
            if asyncio.get_running_loop().time() < model.retry_at:
                raise unavailable_error(*_failed(model))
            if model.phase == "closing":
                self._closing[model].limit_flush(HURRY_S)
            model.change = model.change or asyncio.create_task(self._open(model))
            await asyncio.wait({change := model.change})
            if not change.cancelled() and (refusal := change.result()) is not None:
                raise unavailable_error(*refusal)

    async def _open(self, model: _Model) -> tuple[str, str] | None:
        """Open a model, if room can be made for it; else code and message of the refusal."""
        clock = asyncio.get_running_loop().time
        try:
            if not await self._make_room(model):
                return "no_memory", f"There is no room for model {model.name!r} (--memory): others answer requests."
            model.phase, began = "opening", clock()
            engine = await load_in_thread(partial(SpecEngine.load, model.bundle, self._options))
            model.state.use_engine(AsyncSpecEngine(engine, max_waiting=self.config.max_waiting))
            warn_of_unused_budget(engine, model.state.config)
            model.phase = "open"
            _log.info("Opened %s in %.2f s.", model.name, clock() - began)
        except Exception as error:
            _log.error("Model %s could not be opened.", model.name, exc_info=error)
            model.retry_at = clock() + RETRY_S
            return _failed(model)
        finally:
            model.change = None
            if model.phase != "open":
                model.phase = "closed"
            self._note_rest(model)
        return None

    async def _make_room(self, model: _Model) -> bool:
        """Close models that rest, the longest first, until this one fits; False if it does not in time."""
        if (limit := self._memory) is None:
            return True
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while model.leases.total():
            others = self._models.values()
            lacking = model.num_bytes + sum([each.num_bytes for each in others if each.phase != "closed"]) - limit
            if lacking <= 0:
                return True
            lacking -= sum([each.num_bytes for each in others if each.phase == "closing"])
            resting = sorted([each for each in others if each.rests], key=lambda each: each.rested_at)
            if lacking <= sum([each.num_bytes for each in resting]):  # else nothing is won
                for each in resting:
                    if lacking > 0:
                        lacking -= each.num_bytes
                        self._close(each)
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                break
        return False

    def _close(self, model: _Model) -> None:
        async def end() -> None:
            try:
                await service.aclose(0)
            except Exception as error:
                _log.error("Model %s could not be closed.", model.name, exc_info=error)
            del self._closing[model]
            model.phase, model.change = "closed", None
            _log.info("Closed %s.", model.name)
            self._note_rest(model)

        service, model.phase = model.state.drop_engine(), "closing"
        self._closing[model] = service
        model.change = asyncio.create_task(end())

    def _note_rest(self, model: _Model) -> None:
        """Something has ended: a model may rest from now on, or there may be room for another."""
        loop = asyncio.get_running_loop()
        if model.timer is not None:
            model.timer.cancel()
        if model.phase == "open" and not model.leases.total():
            model.rested_at = loop.time()
            if self._idle_unload_s is not None:
                model.timer = loop.call_later(self._idle_unload_s, self._unload, model, context=Context())
        self._changed.set()
        self._changed = asyncio.Event()

    def _unload(self, model: _Model) -> None:
        if model.rests:
            self._close(model)
        elif model.phase == "open":
            self._note_rest(model)

    @property
    def _services(self) -> list[AsyncSpecEngine]:
        return [state.engine for state in self.states if state.engine is not None]

    @property
    def num_active(self) -> int:
        """Requests that engines have taken, and that have not ended."""
        return sum([service.num_active for service in self._services])

    @property
    def has_work_aside(self) -> bool:
        """Whether a piece of work is going on that cannot be stopped, such as an opening."""
        opens = any(thread.name == LOADER for thread in threading.enumerate())
        return opens or self._reading.is_busy or any(service.has_work_aside for service in self._ending)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait for those that engines have; whether all ended by themselves in time."""
        self.draining, self._ending = True, self._services
        for model in self._models.values():
            if model.change is not None and model.phase != "closing":
                model.change.cancel()
        return all(await asyncio.gather(*[service.drain(timeout) for service in self._ending]))

    def limit_flush(self, seconds: float) -> None:
        """See ``AsyncSpecEngine.limit_flush``; they are closed side by side, and some may be already."""
        for service in (*self._ending, *self._closing.values()):
            service.limit_flush(seconds)

    async def aclose(self, timeout: float | None = None) -> None:
        """Drain, then close all."""
        await self.drain(timeout)
        self._reading.close()
        for model in self._models.values():
            if model.phase == "open":
                self._close(model)
        if changes := [model.change for model in self._models.values() if model.change is not None]:
            await asyncio.wait(changes)


def _failed(model: _Model) -> tuple[str, str]:
    return "model_unavailable", f"Model {model.name!r} could not be opened; the server's log has the reason."


def load_in_thread(load: Callable[[], T]) -> "asyncio.Future[T]":
    """What is loaded, by a thread of its own: it cannot be told to stop, and must not keep others from theirs."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            set_it, value = loaded.set_result, load()
        except BaseException as error:
            set_it, value = loaded.set_exception, error  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop may be over
            loop.call_soon_threadsafe(lambda: loaded.done() or set_it(value))

    threading.Thread(target=work, name=LOADER, daemon=True).start()
    return loaded
