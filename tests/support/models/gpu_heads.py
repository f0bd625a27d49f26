"""Targets and heads as GPU backends lower them, in float32, which hides no wrong graph, run by numpy."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch

from specexport.backends.ort import write_onnx
from specexport.backends.profiles import engine_kv_capacity, most_new_tokens, plan_profiles
from specexport.heads.kinds import trace_head
from specexport.lowering import trt_native
from specexport.lowering.common import step_inputs
from specexport.lowering.feature_gate import feature_size
from specexport.lowering.fuse import fuse_norms
from specexport.lowering.ort_cuda import attach_paged_attention
from specexport.passes.linear_flatten import LinearFlattenPass
from specexport.passes.pipeline import default_passes, run_passes
from specexport.trace.check import trace_checkpoint
from specexport.trace.layers import FeatureRequest
from specexport_runtime import SpecEngine
from specexport_runtime.bundle.arrays import CutHead, MaskInput
from specexport_runtime.bundle.entry import CutLmHead
from specexport_runtime.bundle.profiles import HeadSteps, Profile, head_steps
from specexport_runtime.executors import ort_cuda
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.ort_cuda import OrtCudaExecutor
from specexport_runtime.executors.paged import CUDNN_SWITCH
from tests.support.cases import entries
from tests.support.fakes.engine import make_tokenizer
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.fake_onnxruntime import FakeOrt
from tests.support.fakes.trt_fakes import FakeGpu, make_entry, open_fake
from tests.support.fakes.trt_graphs import GraphEngine
from tests.support.models.loading import load
from tests.support.models.tiny_heads import VOCAB
from tests.support.references.cuda_graphs import ReferenceSession
from tests.support.references.engine_harness import make_checkpoint
from tests.support.references.lowered import fuse_for_paging, lower_tensorrt

ROWS, MAX_MODEL_LEN = 3, 48
CUDA, FOLDED, UNFOLDED, EXPLICIT = "ort-cuda", "folded", "unfolded", "explicit"
CUDA_ROWS = "ort-cuda, a row for each token"


class Traced(NamedTuple):
    """A graph after the passes; clone it before it is lowered."""

    ir_model: Any
    layers: Any


def trace_target(target: Any, loaded: Any) -> Traced:
    request = FeatureRequest(loaded.config.taps, loaded.projection, loaded.config.feature_size)
    return _passed(trace_checkpoint(make_checkpoint(target), request))


def trace_own(loaded: Any, dtype: str = "float32") -> Traced:
    """A head, as GPU backends have it; its weights get the dtype."""
    return _passed(trace_head(loaded.head.to(getattr(torch, dtype)), fixed_sizes=True), dtype)


def _passed(traced: Any, dtype: str = "float32") -> Traced:
    run_passes(traced.ir_model, default_passes(dtype))
    return Traced(traced.ir_model, tuple(traced.layers))


def read_head(write: Callable[[Path, Any], Any], folder: Path, target: Any) -> tuple[Any, Any]:
    """A head that ``write`` makes: what its reference needs to know, and the head in memory."""
    return write(folder, target), load(folder, target)


def steps_of(config: Any, lookahead: int) -> HeadSteps:
    return head_steps(
        lookahead,
        num_draft_heads=config.num_draft_heads,
        block_size=config.block_size,
        has_mask=config.mask_token_id is not None,
    )


def entry_fields(config: Any) -> dict[str, Any]:
    return {
        "feature_size": config.feature_size,
        "kind": config.kind,
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "num_draft_heads": config.num_draft_heads,
        "cut_lm_head": None
        if config.draft_vocab_size == VOCAB
        else CutLmHead("lm_head_ids.npy", config.draft_vocab_size),
    }


def open_graph(
    way: str, traced: Traced, folder: Path, patch: pytest.MonkeyPatch, *, config: Any = None, lookahead: int = 3
) -> Any:
    """An executor on a lowered graph; a head's with its ``config``. ``explicit``: as written out where no kernel is."""
    if way == CUDA_ROWS:
        patch.delenv(CUDNN_SWITCH, raising=False)
        patch.setattr(ort_cuda, "compute_capability", lambda device_id: 90)
    opened = _open_cuda if way in (CUDA, CUDA_ROWS) else partial(_open_trt, way=way)
    executor: Any = opened(traced, folder, patch, config, lookahead)
    return executor


def _open_cuda(traced: Traced, folder: Path, patch: pytest.MonkeyPatch, config: Any, lookahead: int) -> OrtCudaExecutor:
    del lookahead
    model = traced.ir_model.clone()
    patch.setitem(sys.modules, "onnxruntime", onnxruntime)  # rotations are measured with it
    fuse_for_paging(model, MAX_MODEL_LEN + 8, None)
    attach_paged_attention(model)
    fuse_norms(model)
    write_onnx(model, folder)
    patch.setitem(ort_cuda._CACHE_TYPES, "float32", (1, "uint32"))
    FakeOrt(lambda _, path: ReferenceSession(path)).install(patch)
    fields = {"feature_size": feature_size(model)} if config is None else entry_fields(config)
    entry = entries.make_entry(
        backend="ort-cuda", vocab_size=VOCAB, layers=traced.layers, inputs=step_inputs(model), lowering="paged",
        **fields,
    )  # fmt: skip
    return OrtCudaExecutor(folder / "model.onnx", entry, num_rows=ROWS, kv_capacity=MAX_MODEL_LEN + 8)


class Lowered(NamedTuple):
    ir_model: Any
    layers: Any
    inputs: tuple[str, ...]
    profiles: tuple[Profile, ...]
    capacity: int


def lower_trt(traced: Traced, config: Any, *, lookahead: int, folds: bool) -> Lowered:
    """What the backend makes of a graph; ``config`` is a head's, None for a target."""
    model = traced.ir_model.clone()
    LinearFlattenPass()(model)
    role, steps = ("target", None) if config is None else ("head", steps_of(config, lookahead))
    width = most_new_tokens(role, lookahead, steps)
    capacity = engine_kv_capacity(MAX_MODEL_LEN, lookahead, None if steps is None else width)
    fold = width if folds else 1
    forms = lower_tensorrt(model, kv_capacity=capacity, fold=fold)
    fold = fold if "folded" in forms else 1
    profiles = plan_profiles(role, lookahead=lookahead, max_num_seqs=ROWS, max_num_tokens=24, fold=fold, head=steps)
    return Lowered(model, traced.layers, step_inputs(model), profiles, capacity)


def _open_trt(traced: Traced, folder: Path, patch: pytest.MonkeyPatch, config: Any, lookahead: int, *, way: str) -> Any:
    if way != EXPLICIT:
        patch.setattr(trt_native, "_FUSED_DTYPES", ("FLOAT",))
    model, layers, inputs, profiles, capacity = lower_trt(traced, config, lookahead=lookahead, folds=way == FOLDED)
    fields = {"feature_size": feature_size(model)} if config is None else entry_fields(config)
    entry = make_entry(
        lookahead, ROWS, MAX_MODEL_LEN, dtype="float32", layers=layers, profiles=profiles, vocab_size=VOCAB,
        inputs=inputs, kv_capacity=capacity, **fields,
    )  # fmt: skip
    gpu = FakeGpu(1 << 26)
    engine = GraphEngine(gpu, entry, model)
    executor, _, _ = open_fake(folder, entry, FakeExecutor(VOCAB, ROWS, 8), gpu, load=lambda *_: engine)
    executor.capture(executor.fixed_shapes())
    return executor


def open_engine(
    way: str, target: Traced, head: Traced, loaded: Any, folder: Path, patch: pytest.MonkeyPatch, lookahead: int = 3
) -> SpecEngine:
    """Target and head on the graphs of one backend, as a bundle loads them."""
    config = loaded.config
    executors = [
        open_graph(way, traced, folder / role, patch, config=own, lookahead=lookahead)
        for role, traced, own in (("target", target, None), ("head", head, config))
    ]
    mask = None
    if config.mask_token_id is not None:
        feature = np.zeros(config.feature_size, np.float32) if loaded.mask_feature is None else loaded.mask_feature
        mask = MaskInput(config.mask_token_id, feature, config.block_size)
    cut_head = None if loaded.ids is None else CutHead(loaded.ids, VOCAB)
    given = {"head": executors[1], "max_model_len": MAX_MODEL_LEN, "lookahead": lookahead}
    return engine_of(executors[0], make_tokenizer(VOCAB), **given, cut_head=cut_head, mask=mask)
