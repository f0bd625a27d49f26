"""Settings of a deployment, typed and checked before anything starts; nothing here needs Ray."""

import json
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specexport_runtime.bundle.manifest import MANIFEST_NAME, load_manifest
from specexport_runtime.engine_options import OPTIONS, EngineOptions
from specexport_runtime.errors import BundleError, InvalidRequestError
from specexport_runtime.server.config import ServerConfig

Routing = Literal["balanced", "session", "prefix"]
"""``balanced``: Ray Serve's own choice, the shorter queue of two replicas. ``session``: by the header ``X-Session-Id``.
``prefix``: by the beginning of the prompt, read by one more deployment in front."""

API_KEYS = "SPECEXPORT_API_KEYS"
"""Environment variable of the API keys, separated by commas: of the process that deploys and of the replicas."""

_SPARE = 16
"""Calls a replica takes beyond its rows and its queue: it refuses them itself, as OpenAI's API does; also /metrics."""


@dataclass(frozen=True)
class RaySettings:
    """What to deploy."""

    bundle: Path  # folder, at the same path on every node
    num_replicas: int | None = None  # if their number is fixed
    min_replicas: int | None = None  # if their number follows the load
    max_replicas: int | None = None  # turns autoscaling on
    target_ongoing_requests: float | None = None  # requests a replica that autoscaling aims at; None: its rows
    # Seconds for which more replicas must be wanted before one is added; None: Ray's default, as for the next two.
    upscale_delay_s: float | None = None
    downscale_delay_s: float | None = None  # seconds for which fewer must be wanted
    look_back_period_s: float | None = None  # seconds over which the number of requests is averaged
    max_ongoing_requests: int | None = None  # most that Ray gives a replica; None: rows, queue and a few to be refused
    max_queued_requests: int = 256  # most requests that wait in a proxy for a replica; more get 429 from the proxy
    routing: Routing = "balanced"  # how a replica is chosen for a request
    prefix_chars: int = 256  # characters of a prompt that say where it goes
    routing_margin: int = 4  # requests by which a replica's queue may be longer before its keys go elsewhere
    ingress_replicas: int = 1  # of the deployment that reads prompts (``routing="prefix"``)
    ray_actor_options: Mapping[str, Any] | None = None  # reserved for a replica; None: as many CPUs as threads
    health_check_period_s: float = 5.0  # of a replica
    app_name: str = "specexport"
    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServerConfig = field(default_factory=ServerConfig)  # limits of each replica's server

    def __post_init__(self) -> None:
        if not (self.bundle / MANIFEST_NAME).is_file():
            raise BundleError(f"{self.bundle} is not a bundle.", "give a folder that `specexport build -o` wrote.")
        if self.max_replicas is not None and self.num_replicas is not None:
            raise InvalidRequestError("num_replicas and max_replicas were both given.", "give one of them.")
        if self.max_replicas is None and self.min_replicas is not None:
            raise InvalidRequestError("min_replicas was given without max_replicas.", "give both.")
        if self.max_replicas is not None and (self.min_replicas or 0) > self.max_replicas:
            raise InvalidRequestError(
                f"min_replicas is {self.min_replicas}, max_replicas {self.max_replicas}.", "swap them."
            )
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} is {value}.", "give 1 or more.")
        for name in ("health_check_period_s", "look_back_period_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidRequestError(f"{name} is {value}.", "give more than 0.")
        for name, value in self.autoscaling.items():
            if self.max_replicas is None:
                raise InvalidRequestError(f"{name} was given without max_replicas.", "give both.")
            if value < 0:
                raise InvalidRequestError(f"{name} is {value}.", "give 0 or more.")
        if self.max_queued_requests < 0 or self.routing_margin < 0:
            raise InvalidRequestError("max_queued_requests and routing_margin must not be negative.", "give 0 or more.")

    @property
    def autoscaling(self) -> dict[str, float]:
        """What was said of how fast the number of replicas follows the load, by Ray's names."""
        return {name: value for name in _AUTOSCALING if (value := getattr(self, name)) is not None}

    @property
    def num_rows(self) -> int:
        """Sequences that one replica decodes at a time."""
        return int(self.engine.max_num_seqs or load_manifest(self.bundle).default_num_seqs)

    @property
    def ongoing_limit(self) -> int:
        """Most requests that Ray gives one replica."""
        return self.max_ongoing_requests or self.num_rows + self.server.max_waiting + _SPARE


_AT_LEAST_ONE = (
    *("num_replicas", "min_replicas", "max_replicas", "max_ongoing_requests", "target_ongoing_requests"),
    *("prefix_chars", "ingress_replicas"),
)
_AUTOSCALING = ("upscale_delay_s", "downscale_delay_s", "look_back_period_s")
_ENGINE_TYPES = {name: kind for name, kind in get_type_hints(EngineOptions).items() if OPTIONS[name].in_text}
_OURS = {name: kind for name, kind in get_type_hints(RaySettings).items() if name not in ("engine", "server")}
_NOT_HERE = {"api_keys": f"set the environment variable {API_KEYS}."}
_SERVER_TYPES = {name: kind for name, kind in get_type_hints(ServerConfig).items() if name not in _NOT_HERE}


def parse_settings(args: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> RaySettings:
    """Settings from ``key=value`` arguments, as ``serve run`` passes them (all text), or from Python.

    Keys are fields of :class:`RaySettings`, ``EngineOptions`` and ``ServerConfig``. API keys come from ``environ``
    only. ``InvalidRequestError`` if a key or value is wrong, ``BundleError`` if ``bundle`` is no bundle.
    """
    sorted_out: tuple[dict[str, Any], ...] = ({}, {}, {})
    for key, value in args.items():
        for kinds, found in zip((_OURS, _ENGINE_TYPES, _SERVER_TYPES), sorted_out, strict=True):
            if key in kinds:
                found[key] = coerce(key, value, kinds[key])
                break
        else:
            raise _unknown_setting_error(key)
    ours, engine, server = sorted_out
    if "bundle" not in ours:
        raise InvalidRequestError("no bundle was given.", "add bundle=/path/to/bundle.")
    ours["bundle"] = ours["bundle"].expanduser().absolute()
    server.setdefault("model_name", ours["bundle"].name)
    config = ServerConfig(**server, api_keys=api_keys(environ))
    return RaySettings(**ours, engine=_engine_options(engine, ours), server=config)


def api_keys(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The API keys of the environment."""
    text = (os.environ if environ is None else environ).get(API_KEYS, "")
    return tuple(key for key in (part.strip() for part in text.split(",")) if key)


def coerce(key: str, value: Any, kind: Any) -> Any:
    """``value`` as a ``kind``: itself if it is one, else read from text; ``InvalidRequestError`` if it is neither."""
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value is None or value in ("None", "null"):
        if types.NoneType in choices:
            return None
        raise InvalidRequestError(f"{key} is None.", "leave it out to get the default.")
    for choice in choices:
        if choice is not types.NoneType:
            try:
                return _convert_value(value, choice)
            except (ValueError, TypeError, KeyError):
                continue
    names = " or ".join(_name(choice) for choice in choices if choice is not types.NoneType)
    raise InvalidRequestError(f"{key} is {value!r}.", f"give {names}.")


def _convert_value(value: Any, kind: Any) -> Any:
    origin = get_origin(kind) or kind
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(value)
        return value
    if origin is bool:
        return value if isinstance(value, bool) else _WORDS[str(value).lower()]
    if isinstance(value, bool):
        raise TypeError(value)
    if origin is Mapping:
        found = json.loads(value) if isinstance(value, str) else value
        if not isinstance(found, Mapping):
            raise TypeError(value)
        return dict(found)
    if origin is tuple:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else tuple(map(str, value))
    if origin is int and isinstance(value, float) and value != int(value):
        raise ValueError(value)
    if origin in (str, Path) and not isinstance(value, (str, Path)):
        raise TypeError(value)
    return origin(value)


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    return {int: "an integer", float: "a number", bool: "true or false", Mapping: "a JSON object"}.get(
        get_origin(kind) or kind, "text"
    )


def _unknown_setting_error(key: str) -> InvalidRequestError:
    if key in _NOT_HERE:
        return InvalidRequestError(f"{key} is not taken as a setting: it would show in Ray's state.", _NOT_HERE[key])
    names = [*_OURS, *_ENGINE_TYPES, *_SERVER_TYPES]
    near = get_close_matches(key, names, n=1)
    return InvalidRequestError(
        f"there is no setting {key!r}.", f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names)}."
    )


def _engine_options(given: dict[str, Any], ours: Mapping[str, Any]) -> EngineOptions:
    """Replicas share a machine: one takes the threads that were reserved for it, and they do not spin."""
    reserved = (ours.get("ray_actor_options") or {}).get("num_cpus", 1)
    return EngineOptions(**{"num_threads": max(1, int(reserved)), "spin": False, "share_threads": True} | given)
