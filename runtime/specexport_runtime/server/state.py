"""What the routes of one server share."""

import logging
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.errors import EngineDeadError, InvalidRequestError
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.telemetry.never_accepted import NeverAccepted

if TYPE_CHECKING:
    from starlette.requests import Request

    from specexport_runtime.metrics import EngineMetrics
    from specexport_runtime.server.token_text import TokenTexts

_log = logging.getLogger("specexport.server")


@dataclass
class ServerState:
    """One server's engine and settings, kept in ``app.state.server``; of a ``ModelPool``, those of one model."""

    config: ServerConfig
    engine: AsyncSpecEngine | None = None  # None until it is loaded
    metrics: "EngineMetrics | None" = None
    draining: bool = False  # no request is admitted any more
    started: int = 0  # when it was made, seconds since the epoch
    max_model_len: int | None = None  # None until it is known
    adapters: tuple[str, ...] = ()  # LoRA adapters that requests may name
    token_texts: "TokenTexts | None" = None  # of the engine's tokenizer, once they are asked for
    opens_when_asked: ClassVar[bool] = False  # requests are taken while there is no engine

    _said_dead: bool = False

    @property
    def status(self) -> str:
        """``"ready"`` if a request would be taken, else ``"loading"``, ``"draining"``, or ``"dead"``."""
        if self.engine is None:
            return "draining" if self.draining else "loading"
        trouble = self.engine.engine.trouble
        is_dead = trouble is not None and (isinstance(trouble, EngineDeadError) or not self.draining)
        if is_dead and not self._said_dead:
            _log.error("The engine is dead: %s", trouble)
        self._said_dead = is_dead
        return "dead" if is_dead else "draining" if self.draining else "ready"

    def use_engine(self, engine: AsyncSpecEngine) -> None:
        """Answer with an engine from now on, and watch it; the model's name must not be one of its LoRA adapters'."""
        if self.config.model_name in engine.engine.adapters:
            raise InvalidRequestError(
                f"the model is to be served as {self.config.model_name!r}, and one of its LoRA adapters has that name.",
                "give another --model-name.",
            )
        if self.metrics is not None:
            self.metrics.attach(engine.engine)
        engine.max_requests_per_owner = self.config.per_key_limit(engine.engine.max_num_seqs)
        engine.engine.stuck_after_s = self.config.stuck_after_s
        engine.engine.add_observer(NeverAccepted(_log.warning))
        self.engine = engine
        self.max_model_len, self.adapters = engine.engine.max_model_len, engine.engine.adapters

    def drop_engine(self) -> AsyncSpecEngine:
        """Answer with the engine no more; it is to be closed."""
        assert self.engine is not None  # noqa: S101  # it is open
        dropped, self.engine, self.token_texts = self.engine, None, None
        if self.metrics is not None:
            self.metrics.detach()
        return dropped

    def lease(self, request: "Request", asked: bytes | str | None) -> AbstractAsyncContextManager["ServerState"]:  # noqa: ARG002
        """The state of the model that a body or a name asks for, open until the block is left; here there is one."""
        return nullcontext(self)

    @property
    def states(self) -> "list[ServerState]":
        """Those of all models."""
        return [self]


def state_of(request: "Request") -> ServerState:
    """The state of the server that got a request."""
    state: ServerState = request.app.state.server
    return state
