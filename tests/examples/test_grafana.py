"""The dashboard and the alerts ask for metrics that a server has, with labels that these have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.serving import fake_engine

FOLDER = Path(__file__).parents[2] / "examples" / "grafana"
NAME = re.compile(r"\b(?:(?:vllm|specexport):|process_)\w+")
SELECTOR = re.compile(r"(\S*?)\{([^}]*)\}")
LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
GIVEN_BY_PROMETHEUS = {"instance", "job"}


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    from prometheus_client.parser import text_string_to_metric_families

    from specexport_runtime import SamplingParams
    from specexport_runtime.metrics import EngineMetrics

    engine, metrics = fake_engine(), EngineMetrics("fake")
    metrics.attach(engine)
    engine.submit("w1 w2 w1 w2", SamplingParams(max_tokens=20)).result(30)
    execute, engine.target.execute = engine.target.execute, None
    with pytest.raises(Exception, match="TypeError"):
        engine.submit("w1").result(30)
    engine.target.execute = execute
    engine.close()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "dashboard.json").read_text())


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_and_of_the_alerts_is_served(samples):
    alerts = (FOLDER / "alerts.yaml").read_text()
    for page in (alerts, " ".join(expressions())):
        asked = {name for name in NAME.findall(page) if not name.startswith("specexport: ")}
        assert asked
        assert asked <= set(samples)


def test_every_label_of_the_dashboard_exists(samples):
    for expression in expressions():
        for name, inside in SELECTOR.findall(expression):
            metric = NAME.search(name)
            assert metric, expression
            assert set(LABEL.findall(inside)) <= samples[metric[0]] | GIVEN_BY_PROMETHEUS, expression
        for labels in re.findall(r"\bby \(([^)]*)\)", expression):
            names = {label.strip() for label in labels.split(",")}
            known = set().union(*(samples[name] for name in NAME.findall(expression))) | GIVEN_BY_PROMETHEUS
            assert names <= known, expression


def test_rates_are_of_counters_and_quantiles_of_buckets(samples):
    for expression in expressions():
        for name in re.findall(r"rate\(([\w:]+)", expression):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), expression
        for name in re.findall(r"histogram_quantile\([\d.]+, sum by \(le\) \(rate\(([\w:]+)", expression):
            assert name.endswith("_bucket")
        assert expression.count("(") == expression.count(")")


def test_the_dashboard_can_be_imported_anywhere():
    board = dashboard()
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert "__inputs" not in board
    assert "id" not in board
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert {panel["datasource"]["uid"], *(t["datasource"]["uid"] for t in panel["targets"])} == {"${datasource}"}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    used = set(re.findall(r"\$(\w+)", " ".join(expressions()))) - {"__rate_interval"}
    assert used <= set(variables)
