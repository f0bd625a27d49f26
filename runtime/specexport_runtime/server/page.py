"""The door of the playground, an annex: the server imports it only where it serves the page."""

import importlib
from typing import Any

from specexport_runtime.errors import MissingDependencyError
from specexport_runtime.server.config import ServerConfig

_MODULE = "specexport_runtime.playground.routes"


def find_page(config: ServerConfig) -> Any:
    """Module of the page, if it is to be served, else None; ``MissingDependencyError`` if it is not installed."""
    if not config.playground:
        return None
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{error.name} is not installed.", "serve with --no-playground, or install specexport anew."
        ) from None
