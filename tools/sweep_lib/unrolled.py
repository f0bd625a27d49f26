"""Whether a model of many layers has the same engine from a few traced layers as from all."""

import hashlib
from typing import Any

_REPEATS = 3  # of the layers that have every kind


def compare_traces(name: str) -> tuple[str | None, bool]:
    """Of a tiny, deep model of an architecture: why all its layers are traced, None if not; and if both ways agree."""
    from transformers import AutoModelForCausalLM

    from tests.support.models.tiny_models import randomize
    from tests.support.references.engine_harness import make_checkpoint
    from tools.sweep_lib.shrink import shrink

    return compare_model(make_checkpoint(randomize(AutoModelForCausalLM.from_config(shrink(name, _REPEATS)))))


def compare_model(checkpoint: Any) -> tuple[str | None, bool]:
    """The same of a model in memory."""
    from specexport.checkpoint.lengths import freeze_length
    from specexport.trace.check import check_packed, trace_checkpoint
    from specexport.trace.experts import make_experts_traceable
    from specexport.trace.export import trace_model
    from specexport.trace.geometry import probe_layers

    model = checkpoint.model
    freeze_length(checkpoint, 128)
    found = trace_checkpoint(checkpoint)
    if found.whole is not None:
        return found.whole, True
    with make_experts_traceable(model, grouped=False):
        calls = probe_layers(model)
        kinds = check_packed(model, calls)
        assert not isinstance(kinds, str)  # noqa: S101
        if len(kinds.traced()) == len(kinds.kinds):
            return "there are no three layers of a kind", True
        whole = trace_model(model, calls)
    return None, engine_of(found.ir_model) == engine_of(whole.ir_model)


def engine_of(traced: Any) -> list[Any]:
    """Nodes and weights of the engine that a trace becomes, in order, without their names."""
    import onnx_ir as ir

    from specexport.lowering.ort_cpu import operator_passes
    from specexport.passes.pipeline import default_passes, run_lowering, run_passes

    model = traced.clone()
    run_passes(model, default_passes("float32", pack=True, backend="ort-cpu", own_operators=True))
    run_lowering(model, operator_passes(trees=True))
    names: dict[Any, Any] = {None: None} | {value: value.name for value in model.graph.inputs}
    names |= {value: _hash(value.const_value) for value in model.graph.initializers.values()}
    nodes: list[Any] = []
    for node in model.graph:
        attributes = {
            name: _hash(each.value) if each.type == ir.AttributeType.TENSOR else repr(each.value)
            for name, each in sorted(node.attributes.items())
        }
        nodes.append((node.op_type, node.domain, [names[value] for value in node.inputs], attributes))
        names |= {value: (len(nodes), at) for at, value in enumerate(node.outputs)}
    return [*nodes, [(value.name, names[value]) for value in model.graph.outputs]]


def _hash(tensor: Any) -> tuple[str, str, str]:
    return hashlib.sha256(tensor.tobytes()).hexdigest(), str(tensor.shape), str(tensor.dtype)
