import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specexport_runtime import SamplingParams, SpecEngine
from tests.support.servers.cluster import ENGINE, KEY, SETTINGS, Deployed, free_port, ray_cluster


@pytest.fixture(scope="session")
def _cluster() -> Iterator[int]:
    """Ray and its proxy; the port of the latter. Keys and the token are in the environment before Ray starts."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: sockets lie in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXPORT_API_KEYS", KEY)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            with ray_cluster(folder):
                yield free_port()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def deployed(_cluster: int, demo_bundle: Path) -> Deployed:
    from specexport_runtime.ray_serve import deploy

    handle = deploy({"bundle": str(demo_bundle), "num_replicas": 2, "port": _cluster, **SETTINGS})
    return Deployed(handle, f"http://127.0.0.1:{_cluster}")


@pytest.fixture(scope="session")
def alone(demo_bundle: Path) -> Iterator["Alone"]:
    engine = SpecEngine.load(demo_bundle, spin=False, **ENGINE)
    yield Alone(engine)
    engine.close()


class Alone:
    def __init__(self, engine: SpecEngine) -> None:
        self._engine = engine
        self._texts: dict[tuple[str, int], str] = {}

    def text(self, prompt: str, max_tokens: int) -> str:
        if (prompt, max_tokens) not in self._texts:
            result = self._engine.generate(prompt, SamplingParams(max_tokens=max_tokens))[0]
            self._texts[prompt, max_tokens] = result.text
        return self._texts[prompt, max_tokens]
