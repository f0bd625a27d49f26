"""LoRA adapters over HTTP: each is a model of its own, as with vLLM."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.state import ServerState
from tests.support.cases import patience
from tests.support.servers.serving import Served, fake_engine

ADAPTERS = ("sql", "poems")
BODY = {"prompt": "w1 w2 w3", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(lambda: fake_engine(adapters=ADAPTERS), ServerConfig(model_name="base")) as server:
        yield server


def post(served: Served, path: str, **body: object) -> dict:
    answer = patience.post(f"{served.url}{path}", json=body)
    return {"status": answer.status_code, **answer.json()}


def test_each_adapter_is_a_model(served):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    found = {model.id: model for model in client.models.list()}
    assert list(found) == ["base", *ADAPTERS]
    assert [found[name].parent for name in found] == [None, "base", "base"]
    assert [found[name].root for name in found] == ["base"] * 3
    assert client.models.retrieve("poems").parent == "base"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("chess")
    assert caught.value.code == "model_not_found"


def test_a_request_names_its_adapter(served):
    texts = {}
    for name in (None, "base", *ADAPTERS):
        named = {} if name is None else {"model": name}
        answer = post(served, "/v1/completions", **BODY, **named)
        assert answer["model"] == (name or "base")
        texts[name] = answer["choices"][0]["text"]
        chat = post(served, "/v1/chat/completions", messages=[{"role": "user", "content": "w1"}], max_tokens=2, **named)
        assert chat["model"] == (name or "base")
    assert texts[None] == texts["base"]
    assert len(set(texts.values())) == 3
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    chunks = list(client.completions.create(**BODY, model="sql", stream=True))
    assert {chunk.model for chunk in chunks} == {"sql"}
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts["sql"]


ROUTES = {
    "/v1/completions": {"prompt": "w1"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w1"}]},
    "/v1/responses": {"input": "w1"},
    "/tokenize": {"prompt": "w1"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize(("path", "body"), ROUTES.items())
def test_an_unknown_model_is_refused(served, path, body):
    answer = post(served, path, model="chess", **body)
    assert (answer["status"], answer["error"]["param"], answer["error"]["code"]) == (404, "model", "model_not_found")
    assert "only 'base', 'sql', 'poems'" in answer["error"]["message"]
    if "tokenize" in path:
        assert post(served, path, model="sql", **body)["status"] == 200


def test_what_is_kept_of_a_prompt_is_for_its_adapter(served):
    prompt = " ".join(f"w{3 * i % 17}" for i in range(40))
    cached = [
        post(served, "/v1/completions", prompt=prompt, max_tokens=2, model=name)["usage"]["prompt_tokens_details"]
        for name in ("base", "sql", "sql", "poems", "base")
    ]
    assert [details["cached_tokens"] > 0 for details in cached] == [False, False, True, False, True]


def test_the_model_cannot_have_the_name_of_an_adapter():
    async def use() -> None:
        state = ServerState(ServerConfig(model_name="sql"))
        async with AsyncSpecEngine(fake_engine(adapters=ADAPTERS)) as service:
            with pytest.raises(InvalidRequestError, match="LoRA adapters has that name"):
                state.use_engine(service)
        assert state.status == "loading"

    asyncio.run(use())
