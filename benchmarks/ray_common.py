"""What the benchmarks of Ray Serve share: a cluster of this machine, streams of answers."""

import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

REPLICA = "x-specexport-replica"
"""Response header: the replica that answered."""
WAIT_S = 60.0


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[int]:
    """Ray on 127.0.0.1 with so many logical CPUs, ended whatever happens; gives a free port for its proxies."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # what Ray would choose, with a token that is only of this run
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    folder = tempfile.mkdtemp(prefix="ray")
    try:
        ray.init(
            num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder
        )
        yield free_port()
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def read_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events.

    Raises:
        httpx.RemoteProtocolError: it did not end as it should.
    """
    import httpx

    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[6:])
    raise httpx.RemoteProtocolError("the stream broke off")


def text_of(event: dict[str, Any]) -> str:
    """The text of one event of a completion."""
    return "".join(choice["text"] for choice in event["choices"])
