"""What the tests of the OpenAI endpoints share."""

from typing import Any

import openai

from specexport_runtime.requests.results import GenerationResult
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.patience import HANG_S
from tests.support.servers.serving import Served


def client_of(served: Served) -> openai.OpenAI:
    """The official client; close it."""
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def async_client_of(served: Served) -> openai.AsyncOpenAI:
    """The official client for asyncio; close it."""
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def alone(served: Served, prompt: Any, reference: Any = None, **params: Any) -> GenerationResult:
    """The same request to the engine itself, with nothing beside it; OpenAI's defaults."""
    drafting = {name: params.pop(name) for name in ("drafter", "acceptance") if name in params}
    params = {"temperature": 1.0, "max_tokens": 16} | params
    return served.engine.engine.generate(prompt, SamplingParams(**params), references=[reference], **drafting)[0]
