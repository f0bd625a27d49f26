"""What a backend is: all that the rest of the compiler may know of one.

A new backend is a lowering, a file here with a subclass of :class:`Backend`, an executor in the runtime, and a line in
each registry: ``backends/registry.py`` here, ``executors/open.py`` there. Nothing else names backends.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

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
"""What a kind of draft head may need beside a causal step over features: tokens of a block see those behind them; a
row's logits are of all tokens that it ends in; its attention reads the target's caches; the host corrects the logits of
each place by the tokens drafted in front of it."""


class RecipeFields(Protocol):
    """What a backend may know of a ``BuildRecipe``; see there."""

    @property
    def backend(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def sm(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def lowering(self) -> str: ...  # noqa: D102
    @property
    def lookahead(self) -> int: ...  # noqa: D102
    @property
    def max_model_len(self) -> int | Literal["auto"]: ...  # noqa: D102
    @property
    def max_num_seqs(self) -> int | None: ...  # noqa: D102
    @property
    def max_num_tokens(self) -> int | None: ...  # noqa: D102
    @property
    def gpu_memory_gb(self) -> float | None: ...  # noqa: D102
    @property
    def fuse(self) -> bool: ...  # noqa: D102
    @property
    def self_draft(self) -> bool: ...  # noqa: D102
    def quantization_of(self, role: str) -> str | None: ...  # noqa: D102


class BuildJob(NamedTuple):
    """One model that is to become engines.

    Attributes:
        recipe: resolved.
        role: ``"target"`` or ``"draft"``.
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

    recipe: RecipeFields
    role: str
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
        key_fields: recipe fields that decide an engine, besides those that decide every backend's.
        draft_differs: a draft's engine is built otherwise than a target's.
    """

    name: str
    dtypes: tuple[str, ...]
    computes: str = ""
    modules: tuple[str, ...] = ()
    extra: str
    lowerings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    default_lookahead: int = 8
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
    draft_differs: bool = True

    def defaults(self, recipe: RecipeFields) -> dict[str, Any]:
        """Concrete values for fields of its own that a recipe left open."""
        del recipe
        return {}

    def settle(self, recipe: RecipeFields) -> dict[str, Any]:
        """Recipe fields that depend on this machine, decided and checked before any work.

        Raises:
            MissingDependencyError: the package that builds is not installed.
            RecipeError, IncompatibleError: it cannot build what is asked for, here.
        """
        del recipe
        return {}

    def engine_key(self, recipe: RecipeFields) -> dict[str, Any]:
        """What decides an engine beyond the model, its role and the dtype; plain values."""
        return {name: getattr(recipe, name) for name in self.key_fields}

    def meets(self, needs: frozenset[HeadNeed]) -> bool:
        """Whether draft heads with these needs can be built."""
        return self.head_needs is not None and needs <= self.head_needs

    def head_obstacle(self, kind: str, needs: frozenset[HeadNeed], recipe: RecipeFields) -> str | None:
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

    def check_obstacle(self, recipe: RecipeFields) -> str | None:
        """Why engines cannot be compared with eager transformers here; None if they can."""
        del recipe
        return None

    def check_bundle(self, recipe: RecipeFields, entries: "Mapping[str, ModelEntry]") -> None:
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
