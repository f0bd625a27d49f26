"""A bundle as a Ray Serve application: replicas, autoscaling, streaming (extra ``ray``).

On a cluster::

    serve run specexport_runtime.ray_serve:build_app bundle=/models/demo num_replicas=2

and from Python::

    from specexport_runtime.ray_serve import deploy
    deploy({"bundle": "/models/demo", "num_replicas": 2})

Which replica gets a request, how many there are and what happens when one dies is Ray Serve's. Ray is imported when an
application is built.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specexport_runtime.errors import MissingDependencyError, SpecexportError, make_install_hint
from specexport_runtime.ray_serve.replica import use_proxy_address
from specexport_runtime.ray_serve.settings import RaySettings, parse_settings

__all__ = ["RaySettings", "build_app", "deploy", "parse_settings"]


def build_app(args: Mapping[str, Any]) -> Any:
    """The Ray Serve application of a bundle, as ``serve.run`` takes it; ``args`` are those of ``parse_settings``.

    Errors are those of ``parse_settings``, ``InvalidRequestError`` if the proxies' address needs an API key, and
    ``MissingDependencyError`` if Ray is not installed.
    """
    settings = parse_settings(args)
    _check_ray()
    from specexport_runtime.ray_serve.deployments import make_application

    return make_application(replace(settings, server=use_proxy_address(settings.server)))


def deploy(args: Mapping[str, Any], *, route_prefix: str = "/") -> Any:
    """Start Ray Serve's proxies at ``host`` and ``port`` if they do not run, and run a bundle's application there.

    Returns a handle once the replicas are ready; ``SpecexportError`` as :func:`build_app`, or with the reason why a
    replica does not start. ``route_prefix`` is the path below which the application answers.
    """
    settings = parse_settings(args)
    application = build_app(args)
    from ray import serve

    rest_s = math.ceil(settings.server.keep_alive_timeout_s)
    serve.start(
        http_options={"host": settings.server.host, "port": settings.server.port, "keep_alive_timeout_s": rest_s}
    )
    try:
        return serve.run(application, name=settings.app_name, route_prefix=route_prefix)
    except RuntimeError as error:
        raise SpecexportError(f"the application did not start: {_reason(settings.app_name) or error}") from error


def _reason(app_name: str) -> str:
    """What Ray says of the replicas that did not start."""
    from ray import serve

    application = serve.status().applications.get(app_name)
    deployments = {} if application is None else application.deployments
    return " ".join(f"{name}: {state.message}" for name, state in deployments.items() if state.message)


def _check_ray() -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"Ray Serve cannot be imported ({error}).", make_install_hint("ray", "serve")
        ) from error
