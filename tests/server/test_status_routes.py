"""``/health``, ``/ready``, ``/metrics`` and ``/v1/models``."""

import openai
import pytest
from fastapi.testclient import TestClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from specexport_runtime.errors import MissingDependencyError
from specexport_runtime.server import page
from specexport_runtime.server.app import create_app
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.servers.serving import MAX_MODEL_LEN


@pytest.fixture
def unloaded() -> TestClient:
    return TestClient(create_app(None, ServerConfig(model_name="late")), base_url="http://127.0.0.1")


def test_alive_and_ready(fake_served):
    assert patience.get(f"{fake_served.url}/health").json() == {"status": "ok"}
    answer = patience.get(f"{fake_served.url}/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    for path in ("/health", "/ready"):  # as some proxies ask
        asked = patience.request("HEAD", fake_served.url + path)
        assert (asked.status_code, asked.content) == (200, b"")


def test_not_ready_while_loading(unloaded):
    assert unloaded.get("/health").status_code == 200
    assert unloaded.head("/ready").status_code == 503
    answer = unloaded.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
    assert int(answer.headers["retry-after"]) >= 1
    assert unloaded.get("/metrics").status_code == 200
    assert unloaded.get("/v1/models").json()["data"][0]["max_model_len"] is None
    unloaded.app.state.server.draining = True
    assert unloaded.get("/ready").json() == {"status": "draining"}


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=1.0.0",
        "application/openmetrics-text;version=banana;escaping=weird",
        "text/html, application/OpenMetrics-Text;q=0.5, */*",
    ],
)
def test_openmetrics_where_it_is_asked_for(fake_served, accept):
    answer = patience.get(f"{fake_served.url}/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert {family.name for family in parse_openmetrics(answer.text)} >= {"vllm:num_requests_running"}


def test_the_model_by_its_name(fake_served):
    client = openai.OpenAI(base_url=f"{fake_served.url}/v1", api_key="none", max_retries=0)
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "specexport")
    assert model.created > 1_600_000_000
    assert model.max_model_len == MAX_MODEL_LEN
    assert client.models.retrieve("fake") == model
    for name in ("other", "org/other", "fake/"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.code == "model_not_found"
    client.close()


def test_a_model_whose_name_has_a_slash():
    client = TestClient(create_app(None, ServerConfig(model_name="org/model")), base_url="http://127.0.0.1")
    assert client.get("/v1/models/org/model").json()["id"] == "org/model"
    assert client.get("/v1/models/org").json()["error"]["code"] == "model_not_found"


def test_no_metrics_without_a_collector(unloaded):
    unloaded.app.state.server.metrics = None
    assert unloaded.get("/metrics").status_code == 404


def test_a_page_that_is_not_installed_is_told_with_what_to_do(monkeypatch):
    monkeypatch.setattr(page, "_MODULE", "specexport_runtime.no_annex.routes")
    with pytest.raises(MissingDependencyError, match="no_annex is not installed") as caught:
        create_app(None, ServerConfig())
    assert "--no-playground" in str(caught.value.hint)
    client = TestClient(create_app(None, ServerConfig(playground=False)), base_url="http://127.0.0.1")
    assert client.get("/health").status_code == 200
    assert client.get("/").status_code == 404
