"""A Ray cluster of this machine with one deployed bundle, for tests."""

import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until

KEY = "test-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
ENGINE = {"max_num_seqs": 4, "num_threads": 1}
SETTINGS = {**ENGINE, "model_name": "demo", "health_check_period_s": 1, "drain_timeout_s": 5, "playground": False}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def import_ray() -> Any:
    """Ray, whose modules use deprecated parts of pydantic when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import ray
        import ray.serve
    return ray


@contextmanager
def ray_cluster(folder: Path) -> Iterator[None]:
    """Ray with four logical CPUs, authenticated by a token of this run; ended whatever happens."""
    ray = import_ray()
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error", _node_ip_address="127.0.0.1",
        _temp_dir=str(folder), _system_config={"metrics_report_interval_ms": 500},
    )  # fmt: skip
    processes = [info.process for infos in ray._private.worker._global_node.all_processes.values() for info in infos]
    try:
        yield
    finally:
        ray.serve.shutdown()
        ray.shutdown()
        for process in processes:  # Ray kills what does not end within a second, and does not wait for it
            process.wait(HANG_S)


class Deployed:
    """A deployed bundle.

    Args:
        handle: Ray Serve's handle of the deployment of replicas.
        url: where it answers.
    """

    def __init__(self, handle: Any, url: str) -> None:
        self.handle = handle
        self.url = url

    def describe(self, wanted: int, *, without: tuple[int, ...] = ()) -> dict[str, dict[str, Any]]:
        """What each replica says of itself; waits until there are ``wanted`` that are not among the processes."""
        found: dict[str, dict[str, Any]] = {}

        def all_found() -> bool:
            with contextlib.suppress(Exception):  # the replica died meanwhile
                said = self.handle.describe.remote().result(timeout_s=HANG_S)
                if said["pid"] not in without:
                    found[said["replica"]] = said
            return len(found) >= wanted

        wait_until(all_found)
        return found

    def describe_one(self, name: str) -> dict[str, Any]:
        said: dict[str, Any] = {}

        def found() -> bool:
            said.update(self.handle.describe.remote().result(timeout_s=HANG_S))
            return bool(said["replica"] == name)

        wait_until(found)
        return said

    def complete(self, prompt: str, max_tokens: int, **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        return patience.post(f"{self.url}/v1/completions", json=body, headers=HEADERS)

    def stream(self, prompt: str, max_tokens: int, **more: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **more}
        return patience.stream("POST", f"{self.url}/v1/completions", json=body, headers=HEADERS)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
