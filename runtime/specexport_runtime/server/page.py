"""The door of the playground, an annex: the server imports it only where it serves the page."""

import importlib
from typing import Any, Protocol, cast

from fastapi import APIRouter

from specexport_runtime.errors import MissingDependencyError
from specexport_runtime.server.config import ServerConfig

_MODULE = "specexport_runtime.playground.routes"


class Page(Protocol):
    """What an annex that is a page has: routes, and which of their paths need no API key."""

    router: APIRouter
    PUBLIC_PATHS: frozenset[str]


def find_page(config: ServerConfig) -> Page | None:
    """The page, if it is to be served; ``MissingDependencyError`` if it is not installed."""
    if not config.playground:
        return None
    try:
        module: Any = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{error.name} is not installed.", "serve with --no-playground, or install specexport anew."
        ) from None
    return cast("Page", module)
