"""``specexport serve``."""

from pathlib import Path
from typing import Any

import click

from specexport_runtime.cli_options import batch_options


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind to.")
@click.option("--port", type=int, default=8000, show_default=True, help="TCP port; 0 takes a free one.")
@batch_options
def serve(bundle: Path, host: str, port: int, **limits: Any) -> int:
    """Serve BUNDLE over HTTP, as OpenAI's API does."""
    from specexport_runtime.server.config import ServerConfig
    from specexport_runtime.server.run import run_server

    config = ServerConfig(host=host, port=port, model_name=bundle.name)
    return run_server(bundle, config, **limits)
