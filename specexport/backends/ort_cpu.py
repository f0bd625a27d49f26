"""ONNX Runtime on a CPU: several graphs of a model over one weights file."""

from typing import TYPE_CHECKING

from specexport.backends.base import Backend, BuildJob, HeadNeed, release_weights
from specexport_runtime.abi import ITEM_BYTES
from specexport_runtime.bundle.entry import NO_GATES, EngineEntry, Gates, PaddedGraph
from specexport_runtime.bundle.quant_kinds import KEPT
from specexport_runtime.machine import available_cores

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.passes.base import CountingPass
    from specexport.passes.residual_blocks import ResidualBlocks


class OrtCpu(Backend):
    """See the module."""

    name = "ort-cpu"
    dtypes = ("float32", "bfloat16", "float16")
    computes = "float32"
    modules = ("onnxruntime",)
    extra = "cpu"
    options = ("self_draft", "kv_cache_dtype")
    own_operators = True
    packs_linear = True
    has_states = True
    chooses_adapters = True
    groups_experts = True
    head_needs: frozenset[HeadNeed] | None = frozenset(
        ["later tokens", "earlier guesses", "lent caches", "corrected logits"]
    )
    key_fields = ("quantize_lm_head", "fuse", "self_draft", "kv_cache_dtype", "rotary_len")

    def build(self, ir_model: "ir.Model", job: BuildJob) -> EngineEntry:
        """See ``Backend.build``."""
        from specexport.backends.ort import write_onnx, write_padded_onnx
        from specexport.lowering.common import select_fusions, step_inputs
        from specexport.lowering.feature_gate import feature_size
        from specexport.lowering.layer_gate import LAYER_GATE
        from specexport.passes.block_linear import packed_formats
        from specexport.passes.pipeline import run_lowering
        from specexport.passes.residual_blocks import find_residual_blocks

        recipe, role, folder = job.recipe, job.role, job.folder
        with job.clock.stage("lower", role, self.name):
            padded_model, given = _padded_model(ir_model, job), feature_size(ir_model)
            gated = _needs_first_gate(job) or (recipe.self_draft and role == "target")
            blocks = find_residual_blocks(ir_model) if gated else None
            done = run_lowering(ir_model, _passes(job, blocks))
            if padded_model is not None:
                run_lowering(padded_model, _passes(job, padded_kv=True))
        gates = (
            NO_GATES if blocks is None else Gates(blocks.gate_kinds if done.get(LAYER_GATE) else (), blocks.obstacle)
        )
        formats, padded = packed_formats(ir_model.graph), None
        stored, count = sum(each.num_bytes for each in formats), sum(each.weights for each in formats)
        with job.clock.stage("build", role):
            path = write_onnx(ir_model, folder, workers=available_cores())
            if padded_model is not None:
                padded = PaddedGraph(write_padded_onnx(padded_model, folder), step_inputs(padded_model))
                release_weights(padded_model.graph.initializers.values())
        return EngineEntry(
            path=path,
            inputs=step_inputs(ir_model),
            padded=padded,
            gates=gates,
            feature_size=given or job.feature_size,
            fused=select_fusions(done),
            weight_formats=() if job.quantize == KEPT.name else formats,  # else those of the checkpoint
            packed_bytes=(stored, count * ITEM_BYTES[self.computes]),
        )


def _needs_first_gate(job: BuildJob) -> bool:
    """Whether the layers are of draft heads of which the first alone reads them."""
    return job.first_only and bool(job.layers)


def _passes(job: BuildJob, blocks: "ResidualBlocks | None" = None, *, padded_kv: bool = False) -> "list[CountingPass]":
    """The lowering of a graph, in order; one of padded KV has its weights, and nothing that is fused or gated."""
    from specexport.lowering.feature_gate import feature_pass
    from specexport.lowering.fuse import rotary_pass
    from specexport.lowering.layer_gate import gate_passes
    from specexport.lowering.low_rank import adapter_pass
    from specexport.lowering.ort_cpu import int8_cache_pass, operator_passes

    caches = [] if job.cache_ranges is None else [int8_cache_pass(job.cache_ranges)]
    adapters = adapter_pass(job.adapters)
    if padded_kv:
        return [*caches, *operator_passes(padded_kv=True), adapters]
    fuse = job.recipe.fuse
    return [
        *([rotary_pass(job.max_model_len, job.max_positions)] if fuse else []),
        *caches,
        *operator_passes(trees=job.role == "target"),
        *gate_passes(blocks, fuse=fuse, first_only=_needs_first_gate(job)),
        feature_pass(),
        adapters,
    ]


def _padded_model(ir_model: "ir.Model", job: BuildJob) -> "ir.Model | None":
    """What becomes the padded-KV graph; heads have none, nor have models with states, which padding would enter."""
    from specexport.lowering.feature_gate import drop_features

    if job.role == "head" or job.states:
        return None
    padded_model = ir_model.clone()  # shares the weights
    drop_features(padded_model)
    return padded_model
