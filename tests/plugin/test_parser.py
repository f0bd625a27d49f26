"""What a real TensorRT parser makes of a graph of plugins: it looks for exactly these, and finds nothing else wrong.

TensorRT-RTX has the parser and no way to register a Python plugin, so the search itself must come up empty here.
"""

import re
from typing import Any

import onnx_ir as ir
import pytest

from specexport.lowering import trt_plugin
from specexport.plugin.naming import plugin_names
from tests.support.cases.unpadded_cases import CASES, one_node_model


@pytest.mark.parametrize("splits", [1, 2])
def test_the_parser_looks_for_the_plugins_of_a_graph(splits: int) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="no TensorRT parser is installed")
    model = one_node_model(CASES["sinks"], "float16")
    trt_plugin.replace_attention(model, kv_capacity=40, num_splits=splits)
    said: list[tuple[Any, str]] = []

    class Collector(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            said.append((severity, message))

    logger = Collector()
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert not parser.parse(ir.to_proto(model).SerializeToString())
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    assert [error.node_operator() for error in errors] == plugin_names(model)
    assert all("Plugin not found" in error.desc() for error in errors)
    pattern = re.compile(r"pluginName: (\w+), pluginVersion: 1, pluginNamespace: specexport$")
    searched = [match[1] for _, text in said if (match := pattern.search(text))]
    assert searched == plugin_names(model)
    warnings = [text for severity, text in said if severity == trt.ILogger.WARNING]
    assert all("Int64 binding" in text for text in warnings)
