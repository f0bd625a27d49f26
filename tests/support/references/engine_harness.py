"""Runs a built engine the way the runtime does: bound by pointer, caches in place."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specexport_runtime.abi import CACHE_INPUTS, PADDED_STEP_INPUTS, LayerGeometry
from tests.support.references.sessions import session_of


def make_checkpoint(model: Any) -> Any:
    from specexport.checkpoint.loaded import Checkpoint

    return Checkpoint(
        source="tiny", source_sha256="", architecture=type(model).__name__, model=model, dtype="float32",
        tokenizer_json=b"{}", chat_template=None, special_tokens={}, bos_token_id=1, eos_token_ids=(2,),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]), num_parameters=model.num_parameters(),
        max_positions=256,
    )  # fmt: skip


def build(
    model: Any, folder: Path, dump_dir: Path | None = None, *, group_experts: bool = False
) -> tuple[Any, tuple[LayerGeometry, ...], dict[str, int]]:
    """Compile ``model`` into ``folder``, both graphs; returns the lowered IR, the layers and what each pass changed."""
    from specexport.backends.ort import write_onnx, write_padded_onnx
    from specexport.passes.pipeline import default_passes, run_passes
    from tests.support.models.tiny_traces import trace_of
    from tests.support.references.lowered import lower_ort_cpu

    traced = trace_of(model, group_experts=group_experts)
    report = run_passes(traced.ir_model, default_passes("float32", own_operators=True), dump_dir=dump_dir)
    padded_model = traced.ir_model.clone()
    lower_ort_cpu(traced.ir_model)
    write_onnx(traced.ir_model, folder)
    lower_ort_cpu(padded_model, padded_kv=True)
    write_padded_onnx(padded_model, folder)
    return traced.ir_model, traced.layers, dict(report)


def compiled(model: Any, folder: Path, kept: Any = None, **values: Any) -> Any:
    from specexport.backends.base import BuildJob
    from specexport.compile.part import compile_graph
    from specexport.progress import StageClock
    from specexport.recipe import BuildRecipe, resolve_parts
    from tests.support.cases.entries import make_entry
    from tests.support.models.tiny_traces import trace_of

    traced, count = trace_of(model, group_experts=True), model.num_parameters()
    asked = BuildRecipe(target="tiny", output="tiny", **({"dtype": "float32"} | values))
    recipe = resolve_parts(asked, {"target": True})["target"]
    layers, clock = tuple(traced.layers), StageClock(None, 1)
    job = BuildJob(recipe, asked.quantize, 256, layers, count, 256, folder, clock, states=traced.states)
    made = compile_graph(traced.ir_model, job, None, kept=kept)
    return make_entry(
        vocab_size=int(model.get_output_embeddings().weight.shape[0]), max_positions=256, layers=job.layers,
        windows=traced.windows, states=traced.states, engine=made.engine, quantize=asked.quantize, passes=made.passes,
    )  # fmt: skip


def indices_of(past: Sequence[int], new: Sequence[int]) -> dict[str, np.ndarray]:
    """Where the tokens of rows are in a step: in the pack, in their rows, and in a batch as wide as the longest."""
    cu, width = np.concatenate([[0], np.cumsum(new)]), int(max(*new, 1))
    lens = np.array(past, np.int32)[:, None]
    # A row without tokens names one of the step's tokens; the entry it writes is not counted.
    starts = np.minimum(cu[:-1], cu[-1] - 1)[:, None]
    ends = np.maximum(cu[1:, None], starts + 1)
    return {
        "kv_lens": lens, "cu_new_tokens": cu.astype(np.int32), "row_starts": starts, "row_ends": ends,
        "row_totals": (lens + ends - starts).astype(np.int32),
        "pad_index": np.minimum(starts + np.arange(width), ends - 1)[:, None],
        "unpad_index": np.array([b * width + j for b, count in enumerate(new) for j in range(count)], np.int64),
    }  # fmt: skip


def pack(
    tokens: Sequence[Sequence[int]], pasts: Sequence[int], held: Sequence[Sequence[int]] | None = None
) -> dict[str, np.ndarray]:
    """Inputs of one packed step, all logits wanted; ``held``: position of each padded-KV entry, -1 for padding."""
    firsts = pasts if held is None else [sum(at >= 0 for at in row) for row in held]
    counts = [len(row) for row in tokens]
    positions = [first + j for first, count in zip(firsts, counts, strict=True) for j in range(count)]
    kv_positions = np.full((len(tokens), 1, max(pasts) + max(counts) + 3), -1, np.int64)
    for b, row in enumerate(held or ()):
        own = [*row, *range(firsts[b], firsts[b] + counts[b])]
        kv_positions[b, 0, : len(own)] = own
    return indices_of(pasts, counts) | {
        "kv_positions": kv_positions,
        "input_ids": np.array([t for row in tokens for t in row], np.int64),
        "positions": np.array(positions, np.int64),
        "logit_rows": np.arange(sum(counts), dtype=np.int64),
    }


INT8_POISON = -77
"""What caches in 8 bits hold where nothing was written."""


class Engine:
    """A session with its cache arena; ``step`` binds rows by address and updates them in place."""

    def __init__(
        self, folder: Path, layers: Sequence[LayerGeometry], num_rows: int, capacity: int, *, graph: str = "model.onnx",
        poison: float = np.nan,
    ) -> None:  # fmt: skip
        self.session = session_of(folder / graph)
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.flat_caches = len(next(x.shape for x in self.session.get_inputs() if x.name == "k_cache.0")) == 4
        kind = next(value.type for value in self.session.get_inputs() if value.name == "k_cache.0")
        self.cache_dtype: Any
        fill, self.cache_dtype = (poison, np.float32) if kind == "tensor(float)" else (INT8_POISON, np.int8)
        self.caches = {
            spec.name.format(i=i): np.full((num_rows, 1, layer.kv_heads, capacity, dim), fill, self.cache_dtype)
            for i, layer in enumerate(layers)
            for spec, dim in zip(CACHE_INPUTS, (layer.k_dim, layer.v_dim), strict=True)
        }

    def step(
        self, tokens: Sequence[Sequence[int]], pasts: Sequence[int], first_row: int = 0,
        held: Sequence[Sequence[int]] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Logits [T, V] of the new tokens of rows ``first_row …``."""
        io = self.session.io_binding()
        step = pack(tokens, pasts, held)
        for spec in PADDED_STEP_INPUTS:
            if spec.name in self.inputs:
                io.bind_cpu_input(spec.name, step[spec.name])
        for name, cache in self.caches.items():
            rows = cache[first_row : first_row + len(tokens)]
            rows = rows[:, 0] if self.flat_caches else rows
            bound = ("cpu", 0, self.cache_dtype, rows.shape, rows.ctypes.data)
            io.bind_input(name, *bound)
            io.bind_output(name.replace("_cache.", "_cache_out."), *bound)
        io.bind_output("logits", "cpu")
        self.session.run_with_iobinding(io)
        logits: np.ndarray = io.get_outputs()[-1].numpy()
        return logits


def resident_pages(executor: Any, layer: int, row: int = 0) -> int:
    """Pages of the keys of a layer in a row that are this process's own. Reading what went back maps a shared page."""
    array: np.ndarray = executor._memory[f"k_cache.{layer}"].array
    first, count = array[row].ctypes.data // mmap.PAGESIZE, array.strides[0] // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * count), np.uint64)
    own = (pages >> np.uint64(63)) & (pages >> np.uint64(56)) & np.uint64(1)
    return int(own.sum())
