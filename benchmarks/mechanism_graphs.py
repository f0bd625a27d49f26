"""Graphs for ``self_draft_mechanisms.py``, all made from the one target graph of a bundle."""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

MODEL = "model.onnx"
PACKED = "packed.onnx"
_DATA = "model.onnx.data"


def write_graphs(target: Path, folder: Path) -> None:
    """``model.onnx`` without gates and ``gated.onnx`` with them, over one link to (or copy of) the weights."""
    import onnx_ir as ir

    from specexport.lowering.layer_gate import gate_layers
    from specexport.passes.residual_blocks import find_residual_blocks

    try:
        os.link(target.parent / _DATA, folder / _DATA)
    except OSError:
        shutil.copyfile(target.parent / _DATA, folder / _DATA)
    model = ir.load(target)
    remove_gates(model)
    ir.save(model, folder / MODEL)
    blocks = find_residual_blocks(model)
    if blocks.obstacle is not None:
        raise SystemExit(f"{target}: {blocks.obstacle}")
    gate_layers(model, blocks)
    ir.save(model, folder / "gated.onnx")


def remove_gates(model: "ir.Model") -> None:
    """Take the blocks of a gated graph out of their gates again, in place; nothing if there are none."""
    graph = model.graph
    gates = [node for node in graph if node.op_type == "If" and str(node.name).startswith("gate.")]
    graph.outputs[:] = [value for value in graph.outputs if value.name != "attention_similarity"]
    for node in [node for node in graph if node.name == "attention_similarity"]:
        graph.remove(node, safe=True)
    for gate in gates:
        if str(gate.name).endswith(".similarity"):
            graph.remove(gate, safe=True)
            continue
        branch = gate.attributes["then_branch"].as_graph()
        nodes, given = list(branch), list(branch.outputs)
        branch.outputs.clear()
        branch.remove(nodes)
        graph.insert_before(gate, nodes)
        for old, new in zip(gate.outputs, given, strict=True):
            name = old.name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name, new.name = f"{name}.gated", name
        graph.remove(gate, safe=True)
    for node in [node for node in graph if node.name == "layer_mask.split"]:
        graph.remove(node, safe=True)
    for value in [value for value in graph.inputs if value.name in ("layer_mask", "want_similarity")]:
        graph.inputs.remove(value)


def split_blocks(folder: Path) -> None:
    """``head.onnx``, ``block0.onnx`` …, ``tail.onnx`` of ``model.onnx``; ``chain.json`` says how they join."""
    import onnx_ir as ir

    from specexport.passes.residual_blocks import Dataflow, find_residual_blocks

    model = ir.load(folder / MODEL)
    graph, blocks = model.graph, find_residual_blocks(model).blocks
    flow = Dataflow(graph)
    regions = [{*flow.branch_of(block)[1], block.total.producer()} for block in blocks]
    behind = flow.after([blocks[-1].total])
    inside = set().union(*regions, behind)
    outer = [node for node in flow.nodes if node not in inside]
    shared = {value for node in inside for value in flow.reads[node] if value.producer() in set(outer)}
    caches = [{value for value in graph.outputs if value.producer() in region} for region in regions]
    logits = [value for value in graph.outputs if value.producer() in behind]
    types = _write(model, folder / "head.onnx", outer, sorted(shared, key=lambda value: str(value.name)), {})
    for number, (block, region, cache) in enumerate(zip(blocks, regions, caches, strict=True)):
        nodes = sorted(region, key=flow.position.__getitem__)
        _write(model, folder / f"block{number}.onnx", nodes, [block.total, *cache], types)
    _write(model, folder / "tail.onnx", sorted(behind, key=flow.position.__getitem__), logits, types)
    stream = dict.fromkeys(str(value.name) for block in blocks for value in (block.residual, block.total))
    plan = {"stream": list(stream), "layers": [block.layer for block in blocks]}
    (folder / "chain.json").write_text(json.dumps(plan), encoding="utf-8")


def _write(
    model: "ir.Model", path: Path, nodes: list["ir.Node"], outputs: list["ir.Value"], types: dict[str, Any]
) -> dict[str, Any]:
    """Write a graph of ``nodes`` and return the types of its outputs, as ONNX Runtime finds them."""
    import onnx
    import onnx_ir as ir
    import onnxruntime as ort

    from specexport.passes.residual_blocks import Dataflow
    from specexport_runtime.executors.operators import register

    flow = Dataflow(model.graph)
    made = {value for node in nodes for value in node.outputs}
    read = dict.fromkeys(value for node in nodes for value in flow.reads[node] if value not in made)
    local = {value for node in nodes for value in _inner(node)}
    inputs = [value for value in read if not value.is_initializer() and value not in local]
    proto = onnx.ModelProto(ir_version=model.ir_version, functions=[ir.to_proto(f) for f in model.functions.values()])
    proto.opset_import.extend(onnx.helper.make_opsetid(name, at) for name, at in model.opset_imports.items())
    proto.graph.name = path.stem
    proto.graph.node.extend(ir.to_proto(node) for node in nodes)
    proto.graph.initializer.extend(ir.to_proto(_named(value)) for value in read if value.is_initializer())
    proto.graph.output.extend(_described(value, {}) for value in outputs)
    proto.graph.input.extend(_described(value, types) for value in inputs)
    onnx.save(proto, path)
    if types:
        return {}
    options = ort.SessionOptions()
    register(options)
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return {value.name: value.type.removeprefix("tensor(").removesuffix(")") for value in session.get_outputs()}


def _inner(node: "ir.Node") -> list["ir.Value"]:
    """Values that the node's subgraphs make themselves."""
    found: list[ir.Value] = []
    for attribute in node.attributes.values():
        if attribute.type.name == "GRAPH":
            found += attribute.as_graph().inputs
            for inner in attribute.as_graph():
                found += [*inner.outputs, *_inner(inner)]
    return found


def _named(value: "ir.Value") -> Any:
    tensor = value.const_value
    tensor.name = value.name  # type: ignore[union-attr]
    return tensor


def _described(value: "ir.Value", types: dict[str, str]) -> Any:
    """A graph input or output: what the graph says of it, or the type found by a session, without a shape."""
    import onnx
    import onnx_ir as ir

    if value.type is not None and value.shape is not None:
        return ir.to_proto(value)
    name = {"float": "FLOAT", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}.get(types.get(str(value.name), ""))
    if name is None:
        return onnx.ValueInfoProto(name=str(value.name))
    return onnx.helper.make_tensor_value_info(str(value.name), getattr(onnx.TensorProto, name), None)


def write_packed(folder: Path) -> None:
    """``packed.onnx``: ``model.onnx`` as ONNX Runtime has optimized it, with its packed weights in a file to map."""
    import onnxruntime as ort

    from specexport_runtime.executors.operators import register

    options = ort.SessionOptions()
    register(options)
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / PACKED)
    for key, value in {
        "session.optimized_model_external_initializers_file_name": "packed.data",
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(key, value)
    ort.InferenceSession(str(folder / MODEL), options, providers=["CPUExecutionProvider"])


def cut_layers(source: Path, path: Path, skipped: tuple[int, ...]) -> None:
    """Write a packed graph without the layers ``skipped``, over the same file of packed weights.

    The proto is edited, not onnx_ir's form of it, which does not keep where packed weights are.
    """
    import warnings

    import onnx
    import onnx_ir as ir

    from specexport.passes.residual_blocks import Dataflow, find_residual_blocks

    proto = onnx.load(source, load_external_data=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ir.from_proto(proto)
    flow, blocks = Dataflow(model.graph), find_residual_blocks(model).blocks
    passed, gone = {}, set()
    for block in blocks:
        if block.layer in skipped:
            nodes = [*flow.branch_of(block)[1], block.total.producer()]
            gone |= {value.name for node in nodes for value in node.outputs}
            passed[block.total.name] = passed.get(block.residual.name, block.residual.name)
    graph = proto.graph
    kept = [node for node in graph.node if node.output[0] not in gone]
    for node in kept:
        node.input[:] = [passed.get(name, name) for name in node.input]
    _keep(graph.node, kept)
    _keep(graph.output, [value for value in graph.output if value.name not in gone])
    read = {name for node in graph.node for name in _reads(node)}
    _keep(graph.input, [value for value in graph.input if value.name in read])
    _keep(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])
    onnx.save(proto, path)


def _keep(field: Any, items: list[Any]) -> None:
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)


def _reads(node: Any) -> set[str]:
    names = set(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names |= _reads(inner)
        names |= {value.name for value in attribute.g.output}
    return names
