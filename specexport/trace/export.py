"""From a transformers model to a packed ONNX graph with one ``UnpaddedAttention`` a layer.

torch.export with explicit dimensions, then the dynamo exporter at opset 23, whose fusions do not know 24.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from torch import Tensor

from specexport.checkpoint.stored import WEIGHT_PREFIX, Stored, stored_tensor
from specexport.checkpoint.streaming import use_empty_weights
from specexport.ops.onnx_op import build_translation, register_schema
from specexport.ops.spec import DIM_NAMES, EXPERTS, RECURRENCES, UNPADDED_ATTENTION
from specexport.trace.attention import AttentionContext, LayerCall, ScoreTerms, attention_hook, unpadded_attention
from specexport.trace.geometry import ModelCalls
from specexport.trace.layer_kinds import LayerKinds, LayersDiffer
from specexport.trace.layers import FeatureRequest, record_taps
from specexport.trace.quirks import PackedTokens, quirks
from specexport.trace.recurrence import RecurrenceCall, RecurrenceContext, call_recurrence_op, recurrence_hook
from specexport.trace.refuse import refuse
from specexport.trace.unroll import select_calls, skip_other_layers, unroll
from specexport_runtime.abi import (
    CACHE_INPUTS,
    FEATURES,
    K_CACHE,
    K_CACHE_OUT,
    LOGITS,
    PENDING,
    STATE_INPUTS,
    STATE_OUTPUTS,
    STATE_STEPS,
    STEP_INPUTS,
    V_CACHE_OUT,
    LayerGeometry,
    StateGeometry,
    TensorSpec,
    state_shapes,
)
from specexport_runtime.errors import SpecexportError

OPSET = 23
_OPS = (UNPADDED_ATTENTION, *RECURRENCES, EXPERTS)
# Sizes of the example inputs: all different, so that no two dimensions are taken for one.
_EXAMPLE = {"T": 7, "B": 2, "B+1": 3, "Q": 5, "R": 4, "L": 16, "S": 6}


class TracedModel(NamedTuple):
    """A traced model."""

    ir_model: ir.Model  # with ``specexport::UnpaddedAttention`` nodes and the contract's inputs and outputs
    layers: tuple[LayerGeometry, ...]  # cache sizes of each attention layer
    states: tuple[StateGeometry, ...] = ()  # sizes of what each recurrence keeps
    # Entries that a token of each attention layer sees, -1 for all; empty where all see all
    windows: tuple[int, ...] = ()
    whole: str | None = None  # why all layers were traced; None if those of a kind were written like one of them


class PackedModel(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """The model as the contract sees it: packed tokens and caches in, selected logits and caches out."""

    def __init__(self, model: Any, calls: ModelCalls, features: FeatureRequest | None = None) -> None:
        super().__init__()
        self.model = model
        self.calls = calls
        self.num_caches = 2 * len(calls.attention)
        self.has_states = bool(calls.recurrences)
        self.taps = () if features is None else features.taps
        self.projection = None if features is None else features.projection

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step: from the step inputs and what is kept to logits [R, V], features if asked for, and what is kept.

        What is kept is k and v cache of each layer, then state and pending entries of each recurrence.
        """
        input_ids, positions, wanted, *step = inputs[: len(STEP_INPUTS)]
        kept = list(inputs[len(STEP_INPUTS) + self.has_states :])
        caches, states = kept[: self.num_caches], kept[self.num_caches :]

        def answer(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, terms: ScoreTerms) -> Tensor:
            call = replace(call, window=self.calls.attention[call.index].window)  # as the probe found its mask
            pair = slice(2 * call.index, 2 * call.index + 2)
            old_k, old_v = caches[pair]
            output, *caches[pair] = unpadded_attention(call, q, k, v, (old_k, old_v), tuple(step), terms)
            return output

        def recurs(call: RecurrenceCall, given: tuple[Tensor | None, ...]) -> Tensor:
            pair = slice(2 * call.index, 2 * call.index + 2)
            state, pending = states[pair]
            _, cu_new_tokens, row_starts, _, _, pad_index, unpad_index = step
            rows = (cu_new_tokens, row_starts, pad_index, unpad_index)
            output, *states[pair] = call_recurrence_op(call, given, (state, pending), inputs[len(STEP_INPUTS)], rows)
            return output

        with (
            attention_hook(self.model, AttentionContext(answer)),
            recurrence_hook(self.model, RecurrenceContext(recurs)),
            record_taps(self.model, self.taps) as found,
            quirks(self.model, PackedTokens(positions, wanted)) as asked,
        ):
            result = self.model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **asked)
        if self.projection is None:
            return (result.logits[0], *caches, *states)
        features = self.projection([found[tap][0] for tap in self.taps]).float()
        return (result.logits[0], features, *caches, *states)


def cache_names(num_layers: int) -> tuple[list[str], list[str]]:
    """Names of the cache inputs and outputs, k and v of each layer in turn."""
    pairs = [(i, spec) for i in range(num_layers) for spec in (*CACHE_INPUTS, K_CACHE_OUT, V_CACHE_OUT)]
    inputs = [spec.name.format(i=i) for i, spec in pairs if spec in CACHE_INPUTS]
    outputs = [spec.name.format(i=i) for i, spec in pairs if spec not in CACHE_INPUTS]
    return inputs, outputs


def state_names(num_states: int) -> tuple[list[str], list[str]]:
    """Names of the inputs and outputs that recurrences keep, state and pending entries of each in turn."""
    inputs = [spec.name.format(i=i) for i in range(num_states) for spec in STATE_INPUTS]
    outputs = [spec.name.format(i=i) for i in range(num_states) for spec in STATE_OUTPUTS]
    return inputs, outputs


def trace_model(
    model: Any,
    calls: ModelCalls,
    stored: Stored | None = None,
    features: FeatureRequest | None = None,
    kinds: LayerKinds | None = None,
) -> TracedModel:
    """Trace a model in eval mode to ONNX IR, over its own memory; UnsupportedModelError if torch cannot export it.

    With ``kinds`` the first and the last layer of each are traced, and the others are written like them.
    """
    layers = tuple(call.geometry for call in calls.attention)
    states = tuple(call.geometry for call in calls.recurrences)
    with torch.no_grad(), use_empty_weights(model, stored or {}) as names:
        try:
            ir_model, whole = _trace_layers(model, calls, features, kinds)
        except SpecexportError:
            raise
        except Exception as error:  # of torch.export and of the exporter, which have many
            lines = str(error).strip().splitlines()
            reason = next((line.strip() for line in lines if re.search(r"Error: \S", line)), None)
            reason = reason or ": ".join([type(error).__name__, *lines[:1]])
            raise refuse(model, f"torch cannot export its forward pass ({reason[:300]})") from error
        _name_stored(model, ir_model, stored or {}, names)
    windows = tuple(call.window for call in calls.attention)
    return TracedModel(ir_model, layers, states, windows if max(windows, default=-1) > 0 else (), whole)


def _trace_layers(
    model: Any, calls: ModelCalls, features: FeatureRequest | None, kinds: LayerKinds | None
) -> tuple[ir.Model, str | None]:
    """The graph of all layers; and why all of them were traced, None if not all were."""
    outputs, taps = ([LOGITS], ()) if features is None else ([LOGITS, FEATURES], features.taps)
    inputs = [*STEP_INPUTS, *([STATE_STEPS] if calls.recurrences else [])]

    def trace(some: ModelCalls, finish: Callable[[ir.Model], None] | None = None) -> ir.Model:
        layers = [call.geometry for call in some.attention]
        states = [call.geometry for call in some.recurrences]
        packed = PackedModel(model, some, features).eval()
        return trace_step(packed, model.dtype, layers, inputs, outputs, states=states, finish=finish)

    traced = [] if kinds is None else kinds.traced(taps)
    if kinds is None or len(traced) == len(kinds.layers):
        alone = kinds is not None and len(set(kinds.kinds)) == len(traced) > 2
        return trace(calls), f"each of its {len(traced)} layers computes something of its own" if alone else None
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    try:
        with skip_other_layers(kinds, traced):
            finish = partial(unroll, kinds=kinds, traced=traced, weights=weights, taps=taps)
            return trace(select_calls(calls, kinds, traced), finish), None
    except Exception as error:  # of the exporter too: the whole model decides
        return trace(calls), str(error) if isinstance(
            error, LayersDiffer
        ) else "a few of its layers are not exported alone"


def trace_step(
    packed: torch.nn.Module,
    dtype: torch.dtype,  # of the caches
    layers: Sequence[LayerGeometry],  # sizes of the caches
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
    sizes: Mapping[str, int] | None = None,  # dimension words of ``inputs`` that are fixed
    *,
    states: Sequence[StateGeometry] = (),  # sizes of what recurrences keep
    reads_only: bool = False,  # the caches are another model's, and ``packed`` does not give them
    finish: Callable[[ir.Model], None] | None = None,  # gets the graph with the exporter's notes
) -> ir.Model:
    """Trace a module from ``inputs``, caches and states of a packed step to ``outputs``, caches and states."""
    for op in _OPS:
        register_schema(op)
    arguments, dims = _example(dtype, layers, inputs, sizes or {}, states)
    state_inputs, state_outputs = state_names(len(states))
    cache_inputs, cache_outputs = cache_names(len(layers))
    if reads_only:
        cache_outputs = []
    with _silence_exporter(), torch.no_grad():
        exported = torch.export.export(packed, arguments, dynamic_shapes={"inputs": dims}, strict=False)
        program = torch.onnx.export(
            exported,
            (),
            dynamo=True,
            opset_version=OPSET,
            optimize=False,  # the passes do that, without copying weights
            verbose=False,
            input_names=[*(spec.name for spec in inputs), *cache_inputs, *state_inputs],
            output_names=[*(spec.name for spec in outputs), *cache_outputs, *state_outputs],
            custom_translation_table={
                getattr(torch.ops.specexport, op.torch_name).default: build_translation(op) for op in _OPS
            },
        )
    if finish is not None:
        finish(program.model)
    # The exporter notes Python stack traces, with paths of this machine, on every node.
    common_passes.ClearMetadataAndDocStringPass()(program.model)
    name_dimensions(program.model)
    traced: ir.Model = program.model
    return traced


def _name_stored(model: Any, ir_model: ir.Model, stored: Stored, names: Mapping[int, str]) -> None:
    """Give each weight that the trace took from a blank parameter what reads it."""
    for value in ir_model.graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        address = raw.data_ptr() if isinstance(raw, Tensor) and raw.numel() else None
        name = str(value.name).removeprefix(WEIGHT_PREFIX)
        if name in stored:
            value.const_value = stored_tensor(str(value.name), stored[name])
        elif address is not None and address in names:
            raise refuse(model, f"its trace has {names[address]} in a form that no weight of it has")


def _example(
    dtype: torch.dtype,
    layers: Sequence[LayerGeometry],
    inputs: list[TensorSpec],
    sizes: Mapping[str, int],
    states: Sequence[StateGeometry],
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Example inputs and their dynamic dimensions."""
    words = {word: torch.export.Dim(name, min=1, max=1 << 24) for word, name in DIM_NAMES.items()}
    words["B+1"] = words["B"] + 1
    tensors, dims = [], []
    known = {**_EXAMPLE, **sizes}
    for spec in inputs:
        shape = [known[word] if isinstance(word, str) else word for word in spec.shape]
        tensors.append(torch.zeros(shape, dtype=getattr(torch, spec.dtype)))
        dims.append({axis: words[str(word)] for axis, word in enumerate(spec.shape) if word in words})
    for heads, k_dim, v_dim in layers:
        for head_dim in (k_dim, v_dim):
            tensors.append(torch.zeros(_EXAMPLE["B"], 1, heads, _EXAMPLE["L"], head_dim, dtype=dtype))
            dims.append({0: words["B"], 3: words["L"]})
    for name, held in state_shapes(states, _EXAMPLE["B"], _EXAMPLE["S"]).items():
        tensors.append(torch.zeros(held))
        is_pending = name.startswith(PENDING.name.partition(".")[0])
        dims.append({0: words["B"], **({2: words["S"]} if is_pending else {})})
    return tuple(tensors), tuple(dims)


def name_dimensions(ir_model: ir.Model) -> None:
    """Give the exporter's anonymous symbols (s21, s15 + 1) the contract's dimension names, in place."""
    symbols: dict[str, str] = {}
    by_name = {value.name: value for value in ir_model.graph.inputs}
    for spec in (*STEP_INPUTS, K_CACHE._replace(name="k_cache.0"), PENDING._replace(name="pending.0")):
        if spec.name not in by_name:  # heads without attention have no caches
            continue
        for word, dim in zip(spec.shape, by_name[spec.name].shape or (), strict=True):
            if word in DIM_NAMES:
                symbols[str(dim)] = DIM_NAMES[str(word)]
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, symbols)) + r")\b")
    values = [*ir_model.graph.inputs, *(value for node in ir_model.graph for value in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([_rename_dimension(dim, pattern, symbols) for dim in value.shape])


def _rename_dimension(dim: Any, pattern: re.Pattern[str], symbols: dict[str, str]) -> Any:
    if isinstance(dim, int) or dim.value is None:  # None is "unknown"; as a name it would mean "all the same"
        return dim
    return pattern.sub(lambda match: symbols[match[1]], str(dim.value))


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Silence the exporter: its warnings are about itself, and what matters is checked on the graph."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
