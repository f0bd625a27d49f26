"""Prompts that one server read are not read again by the next one: what clients see of ``--prefix-cache-dir``."""

from pathlib import Path
from typing import Any

import openai
import pytest

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.server.config import ServerConfig
from tests.support.cases.patience import HANG_S
from tests.support.fakes.rounds import opened
from tests.support.servers.server_process import ServerProcess
from tests.support.servers.serving import Served

KEYS = ("first-key", "second-key")
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n" * 3


def ask(url: str, key: str, **more: Any) -> tuple[int, str]:
    """Cached tokens and text of an answer."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=HANG_S) as client:
        answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=0, **more)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.choices[0].text


@pytest.fixture
def served(demo_bundle: Path, tmp_path: Path) -> Any:
    config = ServerConfig(model_name="demo", api_keys=KEYS)
    options: dict[str, Any] = {
        "num_threads": 1,
        "spin": False,
        "adaptive": False,
        "prefix_cache_dir": tmp_path / "kept",
    }
    return lambda: Served(lambda: SpecEngine.load(demo_bundle, max_num_seqs=4, **options), config)


def test_a_key_finds_after_a_restart_what_it_asked_and_no_other_does(served: Any, tmp_path: Path) -> None:
    with served() as first:
        cold, wanted = ask(first.url, KEYS[0])
        assert cold == 0
    with served() as second:
        assert ask(second.url, KEYS[1]) == (0, wanted)
        assert ask(second.url, KEYS[0], extra_body={"cache_salt": "x"}) == (0, wanted)
        cached, text = ask(second.url, KEYS[0])
    assert cached > 60
    assert text == wanted
    kept = b"".join(path.name.encode() + path.read_bytes() for path in (tmp_path / "kept").iterdir())
    assert not any(key.encode() in kept for key in KEYS)


def test_the_command_writes_what_it_has_when_it_is_told_to_end(demo_bundle: Path, tmp_path: Path) -> None:
    flags = ("--model-name", "demo", "--prefix-cache-dir", str(tmp_path / "kept"), "--prefix-cache-bytes", "1GiB")
    with ServerProcess(demo_bundle, *flags) as server:
        cached, wanted = ask(server.wait_until_ready().url, "none")
        server.tell()
        code, said = server.end()
    assert (code, cached) == (0, 0), said
    with opened(demo_bundle, prefix_cache_dir=tmp_path / "kept") as engine:
        (found,) = engine.generate(PROMPT, SamplingParams(max_tokens=8))
    assert found.stats.cached_tokens > 60
    assert found.text == wanted
