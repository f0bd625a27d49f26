"""Does the graph still keep the contract of ``abi``? Changes nothing; runs between all stages."""

import re
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from specexport.ops.spec import DIM_NAMES
from specexport.passes.base import AS_STORED, attention_nodes, recurrence_nodes
from specexport_runtime import abi
from specexport_runtime.abi import (
    CACHE_INPUTS,
    FEATURES,
    LOGITS,
    NEXT_FEATURES,
    OUTPUTS,
    STATE_INPUTS,
    STATE_OUTPUTS,
    STATE_STEPS,
    STEP_INPUTS,
    TOKEN_FEATURES,
    TensorSpec,
)
from specexport_runtime.executors.ort_gates import LAYER_ON
from specexport_runtime.executors.paged import ATTENTION_METADATA, BLOCK_TABLE

_TENSORS = [spec for spec in vars(abi).values() if isinstance(spec, TensorSpec)]
_KNOWN = {spec.name: spec for spec in (*_TENSORS, BLOCK_TABLE, ATTENTION_METADATA, LAYER_ON)}
_NUMBER = re.compile(r"(?<=\.)\d+$")
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_PICK = {"GatherElements", "GatherND"}  # embeddings are read by Gather
_REARRANGE = {"Expand", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"}


def find_contract_problems(model: ir.Model, *, cast_to_come: bool = False) -> list[str]:
    """Everything that is wrong with a graph between passes, one phrase each; empty if nothing is.

    Inputs, outputs, dtypes, shapes, and attention nodes and recurrences, each between its own caches or states.
    """
    layers, own = _count_layers(model)
    expected_inputs = list(STEP_INPUTS) + [_numbered(spec, i) for i in range(layers) for spec in CACHE_INPUTS]
    logits = LOGITS._replace(dtype=_logits_dtype(model)) if cast_to_come else LOGITS
    expected_outputs = [logits] + [_numbered(spec, i) for i in range(own) for spec in OUTPUTS if spec != LOGITS]
    recurrences = list(recurrence_nodes(model))
    if recurrences:
        expected_inputs.append(STATE_STEPS)
    for i, node in enumerate(recurrences):
        rank = len(node.outputs[1].shape or ()) - 2  # sizes of its state
        expected_inputs += [_state(spec, i, rank) for spec in STATE_INPUTS]
        expected_outputs += [_state(spec, i, rank) for spec in STATE_OUTPUTS]
    given = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    if TOKEN_FEATURES.name in given or NEXT_FEATURES.name in given:  # a draft head has both
        expected_inputs.append(TOKEN_FEATURES)
        expected_outputs.append(NEXT_FEATURES)
    elif FEATURES.name in given:
        expected_outputs.append(FEATURES)
    return [
        *_compare("input", expected_inputs, model.graph.inputs),
        *_compare("output", expected_outputs, model.graph.outputs),
        *_check_attention(model),
        *_check_recurrences(recurrences),
        *_check_weights(model),
    ]


def find_lowered_problems(model: ir.Model) -> list[str]:
    """What is wrong with a graph while it is lowered: step inputs may be gone, and caches have another form by now."""
    graph = model.graph
    inputs, outputs = ({str(value.name): value for value in values} for values in (graph.inputs, graph.outputs))
    problems = []
    for name, value in (inputs | outputs).items():
        spec = _KNOWN.get(_NUMBER.sub("{i}", name))
        if spec is None:
            problems.append(f"{name} is not in the contract")
        elif spec.dtype not in ("model", "cache") and str(value.dtype).lower() not in (spec.dtype, _onnx(spec.dtype)):
            problems.append(f"{name} is {value.dtype}, not {spec.dtype}")
    if LOGITS.name not in outputs:
        problems.append("there are no logits")
    for name, value in outputs.items():
        given = inputs.get(name.replace("_out.", "."))
        if "_out." in name and (given is None or (given.dtype, given.shape) != (value.dtype, value.shape)):
            problems.append(f"{name} does not fit into the memory of its input")
    return [*problems, *_find_unmade_reads(graph, set())]


def _find_unmade_reads(graph: ir.Graph, made: set[ir.Value]) -> Iterator[str]:
    """What is read before it is made; a branch reads what is around it too."""
    made.update(graph.inputs, graph.initializers.values())
    for node in graph:
        missing = [value.name for value in node.inputs if value is not None and value not in made]
        if missing:
            yield f"{node.name} reads {missing[0]}, which nothing in front of it makes"
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _find_unmade_reads(attribute.as_graph(), made)
        made.update(node.outputs)
    yield from (f"nothing makes {value.name}" for value in graph.outputs if value not in made)


def _count_layers(model: ir.Model) -> tuple[int, int]:
    """Layers that have caches in the graph, and how many of them fill theirs: none where an attention has no keys."""
    nodes = list(attention_nodes(model))
    if all(node.inputs[1] is not None for node in nodes):
        return len(nodes), len(nodes)
    return len({node.inputs[3] for node in nodes}), 0


def _logits_dtype(model: ir.Model) -> str:
    """What logits may be before the cast to float32: what they are, if the caches are that too."""
    logits = next((value.dtype for value in model.graph.outputs if value.name == LOGITS.name), None)
    return str(logits).lower() if logits is not None and logits == _model_dtype(model) else LOGITS.dtype


def _model_dtype(model: ir.Model) -> ir.DataType | None:
    """What the caches hold; of graphs without attention, what their first matrix holds."""
    node = next(attention_nodes(model), None)
    told = {TOKEN_FEATURES.name, STATE_STEPS.name}
    if node is None and any(value.name in told for value in model.graph.inputs):
        tensors = (value.const_value for value in model.graph.initializers.values())
        return next((x.dtype for x in tensors if x is not None and x.dtype in _FLOATS and _is_matrix(x)), None)
    return None if node is None or node.inputs[3] is None else node.inputs[3].dtype


def _numbered(spec: TensorSpec, layer: int) -> TensorSpec:
    return spec._replace(name=spec.name.format(i=layer))


def _state(spec: TensorSpec, number: int, rank: int) -> TensorSpec:
    """A tensor of a recurrence, with a word for each size of its state."""
    words = [part for word in spec.shape for part in ([f"Z{i}" for i in range(rank)] if word == "Z" else [word])]
    return _numbered(spec, number)._replace(shape=tuple(words))


def _check_recurrences(nodes: Sequence[ir.Node]) -> Iterator[str]:
    for i, node in enumerate(nodes):
        given = {str(value.name) for value in node.inputs if value is not None}
        missing = [name for spec in STATE_INPUTS if (name := spec.name.format(i=i)) not in given]
        made = [str(value.name) for value in node.outputs[1:]]
        if missing or made != [spec.name.format(i=i) for spec in STATE_OUTPUTS]:
            yield f"recurrence {i} is not between its own states"


def _compare(kind: str, expected: list[TensorSpec], found: Sequence[ir.Value]) -> Iterator[str]:
    by_name = {str(value.name): value for value in found}
    for name in sorted({spec.name for spec in expected} ^ set(by_name)):
        yield f"{kind} {name} is {'unexpected' if name in by_name else 'missing'}"
    for spec in expected:
        if spec.name in by_name:
            yield from _compare_one(kind, spec, by_name[spec.name])


def _compare_one(kind: str, spec: TensorSpec, value: ir.Value) -> Iterator[str]:
    dtype = value.dtype
    exact = spec.dtype not in ("model", "cache")
    wrong = str(dtype).lower() not in (spec.dtype, _onnx(spec.dtype)) if exact else dtype not in _FLOATS
    if wrong:
        yield f"{kind} {spec.name} is {dtype}, not {spec.dtype}"
    shape = value.shape
    if shape is None or len(shape) != len(spec.shape):
        yield f"{kind} {spec.name} has shape {shape}, not {list(spec.shape)}"
        return
    for word, dim in zip(spec.shape, shape, strict=True):
        if isinstance(word, int) and dim != word:
            yield f"{kind} {spec.name} has {dim} where the contract has {word}"
        if word in DIM_NAMES and (isinstance(dim, int) or dim.value != DIM_NAMES[str(word)]):
            yield f"{kind} {spec.name} has {dim} where the contract has {DIM_NAMES[word]}"


def _onnx(dtype: str) -> str:
    return {"float32": "float"}.get(dtype, dtype)


def _check_attention(model: ir.Model) -> Iterator[str]:
    for i, node in enumerate(attention_nodes(model)):
        if node.inputs[1] is None:
            yield from _check_reading(i, node)
            continue
        wired = [node.inputs[3], node.inputs[4], node.outputs[1], node.outputs[2]]
        names = [spec.name.format(i=i) for spec in (*CACHE_INPUTS, *(s for s in OUTPUTS if s != LOGITS))]
        for value, name in zip(wired, names, strict=True):
            if value is None or value.name != name:
                yield f"attention {i} uses {None if value is None else value.name} in the place of {name}"
        if node.outputs[0].dtype != node.inputs[3].dtype:  # type: ignore[union-attr]
            yield f"attention {i} computes in {node.outputs[0].dtype} on caches of another dtype"


def _check_reading(i: int, node: ir.Node) -> Iterator[str]:
    """Of attention that appends nothing: keys and values of one layer go in, and no cache comes out."""
    given = [None if value is None else str(value.name).split(".") for value in node.inputs[3:5]]
    k, v = (["", ""] if name is None else name for name in given)
    if [k[0], v[0]] != ["k_cache", "v_cache"] or k[1:] != v[1:] or node.inputs[2] is not None:
        yield f"attention {i} reads {given}, not the caches of one layer"
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        yield f"attention {i} appends nothing, and its caches are read"


def _check_weights(model: ir.Model) -> Iterator[str]:
    """Matrices must have the caches' dtype: anything else is a precision that was not asked for."""
    dtype = _model_dtype(model)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            yield f"weight {value.name} has no data"
        elif value.meta.get(AS_STORED):
            continue  # scales of a quantized checkpoint, which are made float before a product reads them
        elif _is_table(value):
            continue
        elif tensor.dtype in _FLOATS | {ir.DataType.DOUBLE} and _is_matrix(tensor) and tensor.dtype != dtype:
            yield f"weight {value.name} is {tensor.dtype}, the model {dtype}"


def _is_table(value: ir.Value) -> bool:
    """Whether values are only picked out by number, as GPT-J and CodeGen do with rotary angles in float32."""
    readers = [use.node for use in value.uses()]
    return bool(readers) and all(
        node.op_type in _PICK or (node.op_type in _REARRANGE and _is_table(node.outputs[0])) for node in readers
    )


def _is_matrix(tensor: ir.TensorProtocol) -> bool:
    """Axes of size 1 make no matrix: rotary frequencies may come as [1, n, 1]."""
    return sum(size != 1 for size in tensor.shape) > 1
