"""Who may ask, and how much: API key, ``Host``, content type, body size and time, before a route sees a request."""

from fastapi import FastAPI

from specexport_runtime.server.config import ServerConfig


def add_guards(app: FastAPI, config: ServerConfig) -> None:
    """Put the guards in front of an application."""
