"""A graph quantized as it must never be, one activation scale for a whole step, and as it may be, one a token."""

from pathlib import Path

import numpy as np


def quantize_activations(source: Path, folder: Path, *, each_token: bool) -> Path:
    """Writes a copy of a lowered graph whose linear layers take int8 weights, and int8 activations scaled as told."""
    import onnx
    from onnx import numpy_helper

    from specexport.passes.block_format import unpack

    model = onnx.load(source)
    weights = {item.name: item for item in model.graph.initializer}
    made: dict[str, tuple[str, str]] = {}

    def quantized(name: str, kind: str, n: int, k: int) -> tuple[str, str]:
        if name not in made:
            values = unpack(kind, numpy_helper.to_array(weights[name]), n, k).T
            scale = np.abs(values).max(axis=0) / 127
            whole = np.round(values / scale).astype(np.int8)
            made[name] = (f"{name}.int8", f"{name}.scale")
            model.graph.initializer.append(numpy_helper.from_array(whole, made[name][0]))
            model.graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), made[name][1]))
        return made[name]

    def rewrite(graph: onnx.GraphProto) -> None:
        nodes = []
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    rewrite(attribute.g)
            if node.op_type != "BlockLinear":
                nodes.append(node)
                continue
            told = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            given, out = node.input[0], node.output[0]
            assert len(node.input) == 2, "the demo target has no biases"
            weight, scale = quantized(node.input[1], told["format"].decode(), told["N"], told["K"])
            make = onnx.helper.make_node
            nodes += [
                make("Abs", [given], [f"{out}.abs"]),
                make("ReduceMax", [f"{out}.abs", "axes.last"] if each_token else [f"{out}.abs"], [f"{out}.max"]),
                make("Mul", [f"{out}.max", "step"], [f"{out}.xs"]),
                make("Div", [given, f"{out}.xs"], [f"{out}.scaled"]),
                make("Round", [f"{out}.scaled"], [f"{out}.whole"]),
                make("Cast", [f"{out}.whole"], [f"{out}.x"], to=onnx.TensorProto.INT8),
                make("MatMulInteger", [f"{out}.x", weight], [f"{out}.sum"]),
                make("Cast", [f"{out}.sum"], [f"{out}.float"], to=onnx.TensorProto.FLOAT),
                make("Mul", [f"{out}.xs", scale], [f"{out}.scales"]),
                make("Mul", [f"{out}.float", f"{out}.scales"], [out]),
            ]
        del graph.node[:]
        graph.node.extend(nodes)

    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "axes.last"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(1 / 127, np.float32), "step"))
    rewrite(model.graph)
    assert made, "no linear layer was found"
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    return path
