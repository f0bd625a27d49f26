"""The list of passes and the loop that runs it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from specexport.channel_ranges import ChannelRanges
from specexport.passes.base import CountingPass, Quantizing
from specexport.passes.block_weight import BlockWeight
from specexport.passes.clean_up import (
    ConstantFoldPass,
    NodeDeduplicatePass,
    OperatorFusePass,
    SelectFoldPass,
    WeightDeduplicatePass,
    WeightRemovePass,
)
from specexport.passes.contract_check import find_contract_problems, find_lowered_problems
from specexport.passes.lm_head_cut import LmHeadCutPass
from specexport.passes.logit_row_select import LogitRowSelectPass
from specexport.passes.precision_cast import PrecisionCastPass
from specexport.passes.transpose_fold import TransposeFoldPass
from specexport_runtime.bundle.quant_kinds import KINDS, either, get_backend_passes
from specexport_runtime.errors import CheckFailedError, RecipeError
from specexport_runtime.executors.base import Int32Array

if TYPE_CHECKING:
    from specexport.passes.low_rank import Adapter


def default_passes(
    dtype: str,
    *,
    pack: bool = False,  # join linear layers that read the same tensor
    quantize: str | None = None,  # name of a kind of quantization
    quantize_lm_head: bool = True,
    backend: str = "ort-cpu",  # that is built for
    head_ids: Int32Array | None = None,  # token ids that the LM head keeps, int32 [N]; None for all
    # how large inputs get, by name of the weight, to weigh errors by; None: all alike
    ranges: Mapping[str, ChannelRanges] | None = None,
    # with "keep": the checkpoint's quantized weights by name in the traced graph
    kept: Mapping[str, BlockWeight] | None = None,
    adapters: "Sequence[Adapter]" = (),  # what requests may choose to have added to linear layers
    own_operators: bool = False,  # give layers and embeddings that stay float to our own operators for CPUs
) -> list[CountingPass]:
    """The passes of a build, in order. Each says why it is there in its ``reason``."""
    cutting: list[CountingPass] = [] if head_ids is None else [LmHeadCutPass(head_ids)]
    noting: list[CountingPass] = []
    packing: list[CountingPass] = []
    quantizing: list[CountingPass] = []
    if ranges is not None and quantize is not None:
        from specexport.passes.input_note import InputNotePass

        noting = [InputNotePass(ranges)]
    if pack:
        from specexport.passes.linear_pack import LinearPackPass
        from specexport.passes.quantize_kept import kept_form

        packing = [LinearPackPass(partial(kept_form, kept) if kept else None)]
    marking: list[CountingPass] = []
    if adapters:
        from specexport.passes.low_rank import LowRankMarkPass

        marking = [LowRankMarkPass(adapters)]
    if quantize is not None:
        quantizing = quantizing_passes(quantize, backend, lm_head=quantize_lm_head, kept=kept, head_ids=head_ids)
    if own_operators:
        from specexport.passes.float_blocks import FloatBlocksPass

        quantizing = [*quantizing, FloatBlocksPass()]
    return [
        ConstantFoldPass(),  # first: the other passes look for tidy patterns
        OperatorFusePass(),
        WeightDeduplicatePass(),  # before anything touches a weight: they are still the model's own memory
        LogitRowSelectPass(),  # before TransposeFold: it takes the LM head's weight as it is stored
        SelectFoldPass(),
        TransposeFoldPass(shared=own_operators),
        *cutting,  # before the weights are cast and quantized: what goes needs neither
        *noting,  # before packing: ranges are known by the checkpoint's weights
        *packing,
        *marking,  # after packing, so that joined layers are one; before the weights get other forms
        PrecisionCastPass(dtype),
        *quantizing,
        NodeDeduplicatePass(),
        WeightRemovePass(),  # last: the others leave weights without readers
    ]


def run_passes(
    ir_model: ir.Model,
    passes: Sequence[CountingPass],
    *,
    # gets the graph after each pass: ``NN-name.onnx`` (without weights) and ``NN-name.txt``
    dump_dir: Path | None = None,
    on_pass: Callable[[str], Any] | None = None,  # called with each pass's name when it is done
) -> tuple[tuple[str, int], ...]:
    """Run ``passes`` in place; gives each one's changes. CheckFailedError names the one that broke the contract."""
    report = []
    cast_at = next((n for n, item in enumerate(passes, start=1) if isinstance(item, PrecisionCastPass)), 0)
    _check_contract(ir_model, "tracing", cast_to_come=cast_at > 0)
    if dump_dir is not None:
        _dump(ir_model, dump_dir, 0, "traced")
    for number, item in enumerate(passes, start=1):
        item(ir_model)
        _check_contract(ir_model, f"pass {item.name}", cast_to_come=number < cast_at)
        report.append((item.name, item.changes))
        if dump_dir is not None:
            _dump(ir_model, dump_dir, number, item.name)
        if on_pass is not None:
            on_pass(item.name)
    return tuple(report)


def run_lowering(ir_model: ir.Model, passes: Sequence[CountingPass]) -> dict[str, int]:
    """Run the passes of a lowering in place; gives each one's changes. CheckFailedError as :func:`run_passes`."""
    for item in passes:
        item(ir_model)
        _raise_on_problems(find_lowered_problems(ir_model), f"pass {item.name}")
    return {item.name: item.changes for item in passes}


def _check_contract(ir_model: ir.Model, after: str, *, cast_to_come: bool) -> None:
    _raise_on_problems(find_contract_problems(ir_model, cast_to_come=cast_to_come), after)


def _raise_on_problems(problems: Sequence[str], after: str) -> None:
    if problems:
        raise CheckFailedError(f"after {after} the graph breaks its contract: {'; '.join(problems[:5])}.")


def _dump(ir_model: ir.Model, folder: Path, number: int, name: str) -> None:
    """Write the graph for readers: as text, and as an .onnx file that names its weights but does not hold them."""
    import onnx

    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{number:02d}-{name}"
    stem.with_suffix(".txt").write_text(str(ir_model), encoding="utf-8")
    weights = {value: value.const_value for value in ir_model.graph.initializers.values()}
    try:
        for value, tensor in weights.items():
            if tensor is not None and tensor.nbytes > 1024:
                value.const_value = ir.ExternalTensor(
                    "weights-not-dumped",
                    0,
                    tensor.nbytes,
                    tensor.dtype,
                    shape=value.shape or ir.Shape(()),
                    name=str(value.name),
                )
        onnx.save(ir.to_proto(ir_model), str(stem.with_suffix(".onnx")))
    finally:
        for value, tensor in weights.items():
            value.const_value = tensor


def quantizing_passes(
    kind: str,
    backend: str,
    *,
    lm_head: bool = True,
    kept: Mapping[str, BlockWeight] | None = None,
    head_ids: Int32Array | None = None,
) -> list[CountingPass]:
    """The passes of a kind for a backend, see ``Quantizing``; RecipeError if the backend does not have the kind."""
    form = get_backend_passes(kind, backend)
    if form is None:
        raise RecipeError(f"there is no quantization {kind!r} for this backend.", f"use {either()}, or leave it out.")
    made: list[CountingPass] = import_module(form.module).passes(
        Quantizing(KINDS[kind], form, lm_head=lm_head, kept=kept, head_ids=head_ids)
    )
    return made
