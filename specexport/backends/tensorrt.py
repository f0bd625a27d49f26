"""TensorRT and TensorRT-RTX: an engine for each GPU architecture, with profiles for the steps of a round."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specexport.backends.base import Backend, BuildJob, HeadNeed, PartRecipe
from specexport.backends.present_gpu import find_gpu_unchecked_reason
from specexport.backends.profiles import SMALLEST_PREFILL, engine_kv_capacity, kv_bytes, most_new_tokens, plan_profiles
from specexport.backends.trt_package import PACKAGES, resolve_architectures
from specexport_runtime.abi import ITEM_BYTES, LayerGeometry
from specexport_runtime.bundle.entry import EngineEntry, EngineLimits, ModelEntry
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.machine import memory_bytes

if TYPE_CHECKING:
    import onnx_ir as ir

DEFAULT_MAX_NUM_TOKENS = 512
"""Of the largest prefill, where its masks leave room for it (:func:`plan_folding`)."""
MAX_MASK_BYTES = 1 << 29
"""Most bytes of masks that folded attention may need in the largest prefill."""

BUILD_FACTOR = 3.5
"""Host memory at the builder's peak, in sizes of the model's weights (docs/gpu.md has the measurement)."""
BUILD_BASE_BYTES = 700 * 10**6
"""Host memory of the builder and the compiler without any model."""


class TensorRt(Backend):
    """The full TensorRT, which builds on the GPU it builds for and takes plugins."""

    name = "tensorrt"
    dtypes = ("float16", "bfloat16")
    modules = ("tensorrt",)
    extra = "tensorrt"
    lowerings: tuple[str, ...] = ("plugin",)
    options = ("sm", "gpu_memory_gb")
    default_max_num_seqs = 8
    limits = {"max_num_seqs": (1, 256), "max_num_tokens": (1, 8192)}  # noqa: RUF012 never changed
    needs_gpu = True
    # Engines are built for step sizes and architectures.
    key_fields = (
        "sm", "lowering", "lookahead", "max_model_len", "max_num_seqs", "max_num_tokens", "quantize_lm_head",
    )  # fmt: skip
    head_needs: frozenset[HeadNeed] | None = frozenset(["later tokens"])
    fixed_sizes = True

    def find_head_refusal(self, kind: str, needs: frozenset[HeadNeed], recipe: PartRecipe) -> str | None:
        """See ``Backend.find_head_refusal``."""
        if "later tokens" in needs and recipe.lowering == "plugin":
            return f"the attention plugin is causal, and tokens of a {kind} head see later ones: leave --lowering out"
        return super().find_head_refusal(kind, needs, recipe)

    def architectures(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """See ``Backend.architectures``."""
        return resolve_architectures(PACKAGES[self.name], asked)

    def check_memory(self, job: BuildJob) -> None:
        """Tell what a build needs, and refuse it if this machine or the GPU it is meant for has too little."""
        plan = _memory_plan(job.recipe, job.num_parameters, job.layers, _compute_kv_capacity(job))
        job.clock.note(plan.describe())
        total, free, limit = memory_bytes()
        require_host_memory(plan, min(free, limit) if limit else free if total else 0)
        require_gpu_memory([plan], 0, job.recipe.gpu_memory_gb)

    def build(self, ir_model: "ir.Model", job: BuildJob) -> EngineEntry:
        """See ``Backend.build``. Features are given in every step: TensorRT records no step with a branch."""
        from specexport.backends.trt import TrtPlan, write_trt_engines
        from specexport.lowering.common import norm_type_pass, step_inputs
        from specexport.lowering.feature_gate import feature_size
        from specexport.lowering.tensorrt import TrtAttentionPass
        from specexport.lowering.trt_native import FOLDED
        from specexport.passes.linear_flatten import LinearFlattenPass
        from specexport.passes.pipeline import run_lowering

        recipe, role, rows = job.recipe, job.role, job.recipe.max_num_seqs
        capacity = _compute_kv_capacity(job)
        plugin = recipe.lowering == "plugin"
        with job.clock.stage("lower", role, f"{self.name}, plugin" if plugin else self.name):
            tokens = recipe.max_num_tokens or DEFAULT_MAX_NUM_TOKENS
            fold, tokens, _ = Folding(1, tokens) if plugin else _plan_folding(ir_model, job)
            attention = TrtAttentionPass(kv_capacity=capacity, fold=fold, plugin=plugin)
            run_lowering(ir_model, [LinearFlattenPass(), norm_type_pass(), attention])
            inputs, given = step_inputs(ir_model), feature_size(ir_model)
        with job.clock.stage("build", role):
            profiles = plan_profiles(
                role,
                lookahead=recipe.lookahead,
                max_num_seqs=rows,
                max_num_tokens=tokens,
                fold=fold if FOLDED in attention.forms else 1,
                head=job.head_steps,
            )
            plan = TrtPlan(self.name, recipe.sm, profiles, job.layers, capacity, job.feature_size)
            engines = write_trt_engines(ir_model, plan, job.folder, note=job.clock.note, names=inputs)
        return EngineEntry(
            path=engines[0].path,
            inputs=inputs,
            lowering="plugin" if plugin else "native",
            files=engines,
            limits=EngineLimits(profiles, capacity, rows),
            feature_size=given or job.feature_size,
            fused=tuple(sorted(Counter(attention.forms).items())),
        )

    def find_unchecked_reason(self, recipe: PartRecipe) -> str | None:
        """See ``Backend.find_unchecked_reason``."""
        return find_gpu_unchecked_reason(recipe)

    def check_bundle(self, recipe: PartRecipe, entries: Mapping[str, ModelEntry]) -> None:
        """Refuse a bundle whose models together do not fit the GPU that ``gpu_memory_gb`` describes."""
        plans = [
            _memory_plan(recipe, entry.parameters.total, entry.attention.layers, limits.kv_capacity if limits else 0)
            for entry in entries.values()
            for limits in [entry.engine.limits]
        ]
        activations = sum(max(engine.memory_bytes or 0 for engine in entry.engine.files) for entry in entries.values())
        require_gpu_memory(plans, activations, recipe.gpu_memory_gb)


class TensorRtRtx(TensorRt):
    """TensorRT-RTX, which builds for any GPU anywhere, and takes no plugins."""

    name = "tensorrt-rtx"
    modules = ("tensorrt_rtx",)
    extra = "tensorrt-rtx"
    lowerings = ()
    needs_gpu = False
    # Its attention does the work of a verify step in every step: K+1 queries for each token that is decoded.
    default_lookahead = 4


class Folding(NamedTuple):
    """How attention is folded, and the largest prefill that its masks leave room for."""

    fold: int  # tokens of a row that are taken for heads; 1 where nothing is folded
    max_num_tokens: int
    note: str = ""  # for people, where something gave way


def plan_folding(
    fold: int,  # tokens of a row in a verify step
    heads: int,  # query heads of all masks (``trt_native.count_mask_heads``)
    *,
    max_num_seqs: int,  # rows
    kv_capacity: int,  # L
    max_num_tokens: int | None,  # of a prefill; None for the most that can be folded, up to the default
) -> Folding:
    """Fold what a verify step has, within ``MAX_MASK_BYTES`` for the masks of the largest prefill.

    A smaller prefill costs a long prompt some more steps, and nothing that is folded costs every verify step a copy of
    each layer's keys and values. So the default gives way, down to the smallest prefill; a size that was asked for
    stays.
    """
    slot_bytes = heads * max_num_seqs * kv_capacity
    wanted = max_num_tokens or DEFAULT_MAX_NUM_TOKENS
    most = MAX_MASK_BYTES // max(slot_bytes, 1) // fold * fold
    if -(-wanted // fold) * fold <= most:
        return Folding(fold, wanted)
    needed, allowed = f"{wanted * slot_bytes / 1e9:.2f} GB of masks", f"{MAX_MASK_BYTES / 1e9:.2f} are allowed"
    if max_num_tokens is None and most >= SMALLEST_PREFILL:
        return Folding(fold, most, f"steps have up to {most} tokens: {wanted} would need {needed}, {allowed}")
    return Folding(
        1,
        wanted,
        f"nothing is folded: a prefill of {wanted} tokens beside {max_num_seqs - 1} other rows would need {needed} "
        f"({allowed}). A lower --max-num-tokens, --max-num-seqs or --max-model-len folds.",
    )


def _plan_folding(ir_model: "ir.Model", job: BuildJob) -> Folding:
    from specexport.lowering.trt_native import count_mask_heads

    recipe, fold = job.recipe, most_new_tokens(job.role, job.recipe.lookahead, job.head_steps)
    found = plan_folding(
        fold,
        count_mask_heads(ir_model, fold=fold),
        max_num_seqs=recipe.max_num_seqs,
        kv_capacity=_compute_kv_capacity(job),
        max_num_tokens=recipe.max_num_tokens or None,
    )
    if found.note:
        job.clock.note(found.note)
    return found


def _memory_plan(
    recipe: PartRecipe, num_parameters: int, layers: Sequence[LayerGeometry], kv_capacity: int
) -> "BuildMemoryPlan":
    return plan_memory(
        num_parameters=num_parameters,
        dtype=recipe.dtype,
        layers=layers,
        kv_capacity=kv_capacity,
        max_num_seqs=recipe.max_num_seqs,
        num_engines=len(recipe.sm),
    )


def _compute_kv_capacity(job: BuildJob) -> int:
    width = None if job.head_steps is None else job.head_steps.width
    return engine_kv_capacity(job.max_model_len, job.recipe.lookahead, width)


class BuildMemoryPlan(NamedTuple):
    """Bytes that one model needs."""

    host: int  # host memory, at the peak of the build
    disk: int  # at the peak: the graph, and one engine for each architecture
    gpu_weights: int  # GPU memory for weights, when the engine runs
    gpu_kv: int  # GPU memory for the KV caches of all rows

    def describe(self) -> str:
        """One line for people."""
        return (
            f"needs {self.host / 1e9:.1f} GB of memory and {self.disk / 1e9:.1f} GB of disk to build; "
            f"on the GPU {self.gpu_weights / 1e9:.2f} GB of weights and {self.gpu_kv / 1e9:.2f} GB of KV cache"
        )


def plan_memory(
    *,
    num_parameters: int,
    dtype: str,  # of weights and caches
    layers: Sequence[LayerGeometry],
    kv_capacity: int,  # L
    max_num_seqs: int,  # cache rows
    num_engines: int,  # one for each architecture
) -> BuildMemoryPlan:
    """What building and running one model needs."""
    item = ITEM_BYTES[dtype]
    weights = num_parameters * item
    return BuildMemoryPlan(
        host=int(weights * BUILD_FACTOR) + BUILD_BASE_BYTES,
        disk=int(weights * (1 + num_engines) * 1.05),
        gpu_weights=weights,
        gpu_kv=kv_bytes(layers, kv_capacity, max_num_seqs, item),
    )


def require_host_memory(plan: BuildMemoryPlan, available: int) -> None:
    """Refuse a build that needs more than the ``available`` bytes (0: unknown): IncompatibleError names both."""
    if 0 < available < plan.host:
        raise IncompatibleError(
            f"building needs about {plan.host / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free here.",
            "close other programs, or build on a machine with more memory: no GPU is needed for tensorrt-rtx.",
        )


def require_gpu_memory(plans: Sequence[BuildMemoryPlan], activations: int, gpu_memory_gb: float) -> None:
    """Refuse engines that their GPU cannot hold: IncompatibleError names what is needed, and what to lower."""
    weights, caches = sum(plan.gpu_weights for plan in plans), sum(plan.gpu_kv for plan in plans)
    needed = weights + caches + activations
    if needed > gpu_memory_gb * 1e9:
        raise IncompatibleError(
            f"the engines need {needed / 1e9:.2f} GB of GPU memory (weights {weights / 1e9:.2f}, KV caches "
            f"{caches / 1e9:.2f}, activations {activations / 1e9:.2f}), and --gpu-memory-gb is {gpu_memory_gb:g}.",
            "lower --max-num-seqs, --max-model-len or --max-num-tokens, or use a smaller model.",
        )
