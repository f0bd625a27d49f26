"""The step inputs of a lowered graph: which it takes, and letting go of those it does not."""

from typing import TYPE_CHECKING

from specexport_runtime.abi import (
    ADAPTER_IDS,
    ALIGNED_STEP_INPUTS,
    EXTENT_INPUTS,
    FEATURE_INPUTS,
    GATE_INPUTS,
    PADDED_STEP_INPUTS,
    STATE_STEPS,
)

if TYPE_CHECKING:
    import onnx_ir as ir


def step_inputs(ir_model: "ir.Model") -> tuple[str, ...]:
    """Names of the step inputs that a lowered graph takes, in the contract's order."""
    present = {value.name for value in ir_model.graph.inputs}
    gates = (*EXTENT_INPUTS, *GATE_INPUTS, *FEATURE_INPUTS, ADAPTER_IDS, STATE_STEPS)
    specs = (*PADDED_STEP_INPUTS, *ALIGNED_STEP_INPUTS, *gates)
    names = dict.fromkeys(spec.name for spec in specs)
    return tuple(name for name in names if name in present)


def drop_unused_step_inputs(ir_model: "ir.Model") -> tuple[str, ...]:
    """Remove step inputs without readers from the graph's inputs; returns their names."""
    step_names = {spec.name for spec in (*PADDED_STEP_INPUTS, *ALIGNED_STEP_INPUTS)}
    graph = ir_model.graph
    unused = [x for x in graph.inputs if x.name in step_names and not x.uses()]
    for value in unused:
        graph.inputs.remove(value)
    return tuple(str(value.name) for value in unused)
