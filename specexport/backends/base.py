"""What a backend is: all that the rest of the compiler may know of one.

A new backend is a lowering, a file here with a subclass of :class:`Backend`, an executor in the runtime, and a line in
each registry: ``backends/registry.py`` here, ``executors/open.py`` there. Nothing else names backends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specexport.progress import StageClock
from specexport_runtime.abi import LayerGeometry, StateGeometry
from specexport_runtime.bundle.profiles import HeadSteps

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.channel_ranges import CacheRange
    from specexport.passes.low_rank import Adapter
    from specexport_runtime.bundle.entry import EngineEntry, ModelEntry


ANY_ARCHITECTURE = "any"
"""``sm`` of a portable engine, for GPUs of several architectures."""
AUTO_MODEL_LEN = 4096
"""``max_model_len = "auto"`` takes what the models support, but no more than this: the KV cache grows with it."""


HeadNeed = Literal["later tokens", "earlier guesses", "lent caches", "corrected logits"]
"""What a kind of draft head may need beside a causal step over features: tokens of a block see those after them; a
row's logits are of all tokens that it ends in; its attention reads the target's caches; the host corrects the logits of
each place by the tokens drafted in front of it."""


@dataclass(frozen=True)
class PartRecipe:
    """A recipe for one part of a bundle, in which nothing is left open; ``recipe.resolve_parts`` makes it.

    Attributes:
        role: ``"target"``, ``"draft"`` or ``"head"``.
        backend: what runs the part.
        dtype: of weights that stay float.
        model_dtype: of activations, and of KV caches that have no dtype of their own.
        quantize: kind of quantization, ``"keep"``, or ``"none"`` for float weights. Of a draft whose form is tried, the
            simplest one; :attr:`BuildJob.quantize` says what an engine really has.
        quantize_lm_head: quantization takes the LM head too.
        kv_cache_dtype: what KV caches hold.
        max_model_len: most tokens of a sequence; ``"auto"`` is what the model has, see :attr:`BuildJob.max_model_len`.
        lookahead: K.
        max_num_seqs: most sequences at a time; 0 where whoever loads the bundle decides.
        max_num_tokens: most tokens of a step; 0 where the one who loads decides, or TensorRT's masks.
        sm: GPU architectures.
        lowering: form of attention, or ``"auto"``.
        gpu_memory_gb: what the engines must fit into; infinite where nothing is said.
        fuse: pack and fuse operators.
        self_draft: the layers can be switched off.
        check: how engines are compared with eager transformers.
        trust_remote_code: the hub's Python code may run.
        chooses_adapters: requests choose between adapters.
    """

    role: str
    backend: str
    dtype: str
    model_dtype: str
    quantize: str
    quantize_lm_head: bool
    kv_cache_dtype: str
    max_model_len: int | Literal["auto"]
    lookahead: int
    max_num_seqs: int
    max_num_tokens: int
    sm: tuple[str, ...]
    lowering: str
    gpu_memory_gb: float
    fuse: bool
    self_draft: bool
    check: str
    trust_remote_code: bool
    chooses_adapters: bool

    @property
    def has_small_caches(self) -> bool:
        """Whether KV caches hold less than the model computes."""
        return self.kv_cache_dtype != self.model_dtype

    @property
    def rotary_len(self) -> int:
        """Positions that the tables of fused rotary embeddings have at least."""
        return max(AUTO_MODEL_LEN, 0 if self.max_model_len == "auto" else self.max_model_len)

    def rounding(self, quantize: str | None) -> str | None:
        """The dtype that float weights are rounded to, where a model computes in another; None for exact ones."""
        return self.dtype if self.dtype != self.model_dtype and quantize is None else None


class BuildJob(NamedTuple):
    """One model that is to become engines.

    Attributes:
        recipe: of this part.
        quantize: how this form of it is quantized; None if it is not.
        max_model_len: most tokens of a sequence.
        layers: cache sizes of each attention layer.
        num_parameters: parameters, tied ones counted once.
        max_positions: positions the model supports; None if it has no limit.
        folder: where the engine files go.
        clock: times the stages and takes notes.
        cache_ranges: of each layer, where KV caches are int8; None where they have the model's dtype.
        first_only: its layers are of draft heads of which the first alone reads them.
        feature_size: E of a draft head; 0 for all others.
        head_steps: of a draft head, the steps that it runs between two rounds; None for all others.
        states: sizes of what each recurrence keeps of a row.
        adapters: what requests may choose to have added to the layers that the passes have marked.
    """

    recipe: PartRecipe
    quantize: str | None
    max_model_len: int
    layers: tuple[LayerGeometry, ...]
    num_parameters: int
    max_positions: int | None
    folder: Path
    clock: StageClock
    cache_ranges: "Sequence[CacheRange] | None" = None
    first_only: bool = False
    feature_size: int = 0
    head_steps: HeadSteps | None = None
    states: tuple[StateGeometry, ...] = ()
    adapters: "Sequence[Adapter]" = ()

    @property
    def role(self) -> str:
        """What the model is in the bundle."""
        return self.recipe.role


class Backend:
    """One way to run models. Attributes are traits; methods are called in the order of a build.

    Attributes:
        name: as recipes, manifests and ``--backend`` have it.
        dtypes: dtypes it can build; the first is what ``"auto"`` means.
        computes: dtype of activations and KV caches, where weights alone are rounded to what a recipe says; empty where
            all have that.
        modules: Python modules that building needs besides the export stack.
        extra: the distribution's extra that installs them.
        lowerings: forms of attention that may be asked for in the place of its own.
        options: recipe fields that are this backend's own; for another they are refused.
        default_lookahead: K where a recipe gives none.
        default_max_num_seqs: most sequences at a time, where engines fix that and a recipe gives none.
        limits: ranges of the limits that engines fix when they are built; other limits are defaults for loading.
        own_operators: linear layers are operators of our own for CPUs, whatever their weights are.
        packs_linear: linear layers that share their input are packed into one.
        has_states: layers may keep a state instead of a KV cache.
        chooses_adapters: requests can choose between several LoRA adapters of a target.
        groups_experts: a layer's experts are one operator, which reads each expert once a step; otherwise they are
            batched products, with a copy of its experts' weights for every token.
        head_needs: what draft heads may need beside a causal step over features; None where none can be built, nor
            targets that give features to them.
        fixed_sizes: no size in a graph may depend on a value, because steps are recorded as CUDA graphs.
        needs_gpu: engines are built only where the GPU is that they are for.
        key_fields: fields of :class:`PartRecipe` that decide an engine, besides those that decide every backend's.
    """

    name: str
    dtypes: tuple[str, ...]
    computes: str = ""
    modules: tuple[str, ...] = ()
    extra: str
    lowerings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    default_lookahead: int = 8
    default_max_num_seqs: int = 0
    limits: Mapping[str, tuple[int, int]] = {}
    own_operators: bool = False
    packs_linear: bool = False
    has_states: bool = False
    chooses_adapters: bool = False
    groups_experts: bool = False
    head_needs: frozenset[HeadNeed] | None = None
    fixed_sizes: bool = False
    needs_gpu: bool = False
    key_fields: tuple[str, ...] = ()

    def architectures(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The GPU architectures to build for, decided and checked before any work.

        Raises:
            MissingDependencyError: the package that builds is not installed.
            RecipeError, IncompatibleError: it cannot build what is asked for, here.
        """
        return asked

    def meets(self, needs: frozenset[HeadNeed]) -> bool:
        """Whether draft heads with these needs can be built."""
        return self.head_needs is not None and needs <= self.head_needs

    def find_head_refusal(self, kind: str, needs: frozenset[HeadNeed], recipe: PartRecipe) -> str | None:
        """Why a kind of draft head cannot be built; None if it can."""
        del recipe
        return None if self.meets(needs) else f"backend {self.name} runs no {kind} heads"

    def check_memory(self, job: BuildJob) -> None:
        """Refuse a model that this machine cannot build, or its GPU cannot hold; called before the passes.

        Raises:
            IncompatibleError: names what is needed and what there is.
        """

    def build(self, ir_model: "ir.Model", job: BuildJob) -> "EngineEntry":
        """Lower a model and write its engines.

        Args:
            ir_model: the traced model after its passes; changed, and its weights are let go.
            job: what it is to become.

        Returns:
            what the manifest says of it; paths are relative to the job's folder.

        Raises:
            UnsupportedModelError: the lowering cannot do what a layer needs.
            CheckFailedError: the engine cannot be built, or not exactly.
        """
        raise NotImplementedError

    def find_unchecked_reason(self, recipe: PartRecipe) -> str | None:
        """Why engines cannot be compared with eager transformers here; None if they can."""
        del recipe
        return None

    def check_bundle(self, recipe: PartRecipe, entries: "Mapping[str, ModelEntry]") -> None:
        """Refuse a bundle whose models do not fit together; called when all are built.

        Raises:
            IncompatibleError: they do not.
        """


def release_weights(values: Iterable[Any]) -> None:
    """Let go of the weights of a graph that has been written.

    The rewrite rules of onnxscript live as long as their module and remember the last graph they saw; without this the
    checkpoint would stay in memory beside the engine that the check loads.

    Args:
        values: onnx_ir values of the initializers, those that passes replaced too.
    """
    for value in values:
        value.const_value = None
