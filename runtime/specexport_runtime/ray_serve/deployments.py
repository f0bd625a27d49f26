"""Ray Serve's deployments of a bundle; imported only where Ray is."""

from dataclasses import replace
from typing import Any

from specexport_runtime.ray_serve.ingress import PrefixIngress
from specexport_runtime.ray_serve.replica import Replica
from specexport_runtime.ray_serve.settings import RaySettings

_ROUTER = "specexport_runtime.ray_serve.router.AffinityRouter"
_SHUTDOWN_SPARE_S = 10.0


def make_application(settings: RaySettings) -> Any:
    """The application: replicas that answer HTTP themselves, or behind a deployment that reads prompts."""
    from ray import serve

    needs_key = bool(settings.server.api_keys)
    bare = _remove_keys(settings)
    if settings.routing != "prefix":
        served = serve.deployment(**engine_options(settings))(serve.ingress()(_make_http_replica()))
        return served.bind(bare, needs_key=needs_key)
    engines = serve.deployment(**engine_options(settings))(_make_handle_replica())
    ingress = serve.deployment(**ingress_options(settings))(serve.ingress()(_make_http_ingress()))
    return ingress.bind(bare, engines.bind(bare, needs_key=needs_key), needs_key=needs_key)


def engine_options(settings: RaySettings) -> dict[str, Any]:
    """Options of the deployment of replicas."""
    threads = settings.engine.num_threads
    options: dict[str, Any] = {
        "name": "engine",
        "max_ongoing_requests": settings.ongoing_limit,
        "max_queued_requests": settings.max_queued_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "ray_actor_options": {"num_cpus": threads} | dict(settings.ray_actor_options or {}),
        "health_check_period_s": settings.health_check_period_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": settings.server.drain_timeout_s + _SHUTDOWN_SPARE_S,
        "max_constructor_retry_count": 1,  # what fails twice is a setting or a file
    }
    if settings.max_replicas is None:
        options["num_replicas"] = settings.num_replicas or 1
    else:
        options["autoscaling_config"] = {
            "min_replicas": settings.min_replicas or 1,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.target_ongoing_requests or settings.num_rows,
            **settings.autoscaling,
        }
    if settings.routing != "balanced":
        options["request_router_config"] = {
            "request_router_class": _ROUTER,
            "request_router_kwargs": {"margin": settings.routing_margin},
        }
    return options


def ingress_options(settings: RaySettings) -> dict[str, Any]:
    """Options of the deployment that reads prompts: it holds a request for as long as it is being answered."""
    most = settings.max_replicas or settings.num_replicas or 1
    environment = {key: value for key, value in (settings.ray_actor_options or {}).items() if key == "runtime_env"}
    return {
        "name": "ingress",
        "num_replicas": settings.ingress_replicas,
        "max_ongoing_requests": settings.ongoing_limit * most + settings.max_queued_requests,
        "max_queued_requests": settings.max_queued_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "ray_actor_options": {"num_cpus": 0} | environment,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": settings.server.drain_timeout_s + _SHUTDOWN_SPARE_S,
    }


def _remove_keys(settings: RaySettings) -> RaySettings:
    """What Ray keeps in its state must not hold a key: replicas take keys from their environment."""
    return replace(settings, server=replace(settings.server, api_keys=(), host="127.0.0.1"))


def _make_handle_replica() -> type:
    class Engine(Replica):
        async def __init__(self, settings: RaySettings, *, needs_key: bool) -> None:  # type: ignore[misc]
            Replica.__init__(self, settings, needs_key=needs_key)
            await self.load()

        async def __del__(self) -> None:
            await self.close()

    return Engine


def _make_http_replica() -> type:
    class HttpEngine(_make_handle_replica()):  # type: ignore[misc]
        def __serve_build_asgi_app__(self) -> Any:  # Ray's name
            return self.app

    return HttpEngine


def _make_http_ingress() -> type:
    class Ingress(PrefixIngress):
        def __serve_build_asgi_app__(self) -> Any:  # Ray's name
            return self.make_app()

    return Ingress
