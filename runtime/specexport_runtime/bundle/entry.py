"""One model in a bundle's manifest: checkpoint, sizes, and engines. A field's type is its rule (``schema``)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from specexport_runtime.abi import CACHE_BYTES, ITEM_BYTES, PARENTS, GateKind, LayerGeometry, Size, StateGeometry
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.schema import InnerPath, number, one_of, whole

MAX_LOOKAHEAD = 64
MAX_MODEL_LEN = 1 << 24
MAX_NUM_SEQS = 4096
MAX_NUM_TOKENS = 1 << 20
MAX_ADAPTERS = 64
"""What a recipe may ask for, and a manifest may say."""
SMALL_DRAFT_PARAMETERS = 20_000_000
"""Below this a draft's step is mostly fixed cost per operator: threads do not share it, fewer operators help."""

Length = Annotated[int, whole(1, MAX_MODEL_LEN)]
LayerNumber = Annotated[int, whole(0, 1 << 20)]
NumSeqs = Annotated[int, whole(1, MAX_NUM_SEQS)]
Ratio = Annotated[float, number(0, 1 << 40)]
Share = Annotated[float, number(0, 1)]
TokenId = Annotated[int, whole(0, 1 << 24)]
VocabSize = Annotated[int, whole(1, 1 << 24)]


class ProfileReport(NamedTuple):
    """What a builder made of a profile."""

    profile: str  # its name
    kernels: int
    fused_attention: int  # kernels
    float32_matmuls: tuple[str, ...]  # names of the kernels
    kv_copy_bytes: int  # of KV caches, in a step
    quantized_products: int  # that read quantized weights as they are stored
    expanded_weights: int  # quantized ones that a kernel makes float for another


class EngineReport(NamedTuple):
    """What a builder says of an engine, see ``specexport.backends.trt_report``."""

    aliased: tuple[tuple[str, str], ...]  # input and output of each cache that is updated in place
    attention_nodes: int  # of the network
    profiles: tuple[ProfileReport, ...]
    layers_from: str  # who listed the kernels: "builder"; earlier bundles may say "inspector"
    weight_bytes: int | None
    engine_bytes: int
    build_seconds: float
    peak_memory_bytes: int
    memory: Mapping[str, Mapping[str, int]]  # bytes of the building process, by stage: "own", "mapped"


@dataclass(frozen=True)
class EngineFile:
    """A model's engine for one GPU architecture."""

    path: InnerPath
    sm: str  # architecture, for example "sm89"; "any" for a portable engine
    builder: str  # package that built it and can load it: "tensorrt" or "tensorrt-rtx"
    builder_version: str  # an engine loads only under the version that built it
    memory_bytes: int | None = None  # device memory for the activations of the largest profile; None: not known
    report: EngineReport | None = None


class PaddedGraph(NamedTuple):
    """A graph for caches that hold padding entries, over the same weights."""

    path: InnerPath
    inputs: tuple[str, ...]  # step inputs that it takes


class EngineLimits(NamedTuple):
    """The step and cache sizes that an engine was built for."""

    profiles: tuple[Profile, ...]  # in the engine's order
    kv_capacity: Annotated[int, whole(1, MAX_MODEL_LEN + MAX_LOOKAHEAD + 1)]  # L, entries of a cache row
    max_num_seqs: NumSeqs  # cache rows


class Gates(NamedTuple):
    """The parts of a target that can be switched off, for drafting with the target itself."""

    kinds: tuple[GateKind, ...] = ()  # [G], what each is; empty where none can
    obstacle: str | None = None  # why no layer can be skipped exactly; None where not asked for, or one can


NO_GATES = Gates()


class WeightFormat(NamedTuple):
    """A format of packed weights."""

    name: str
    weights: int  # how many
    num_bytes: int  # of all of them


@dataclass(frozen=True)
class EngineEntry:
    """What a backend made of a model."""

    path: InnerPath  # engine file; the first of ``files`` where there are some
    inputs: tuple[str, ...]  # step inputs that the lowered graph takes (names of the contract)
    # What stands behind attention: "function" (ort-cpu), "paged" (ort-cuda), or for TensorRT "native" or "plugin".
    lowering: str = "function"
    padded: PaddedGraph | None = None
    files: tuple[EngineFile, ...] = ()  # by GPU architecture; empty where ``path`` is the one engine
    limits: EngineLimits | None = None  # None: any size runs, and the arena decides how long a cache row is
    gates: Gates = NO_GATES
    feature_size: Annotated[int, whole(0, 1 << 20)] = 0  # E: of what a target gives, and its draft head reads; 0: none
    fused: tuple[tuple[str, int], ...] = ()  # what the lowering fused: name, count
    # Of engines for CPUs, each format of the packed weights; with "keep" those of the checkpoint.
    weight_formats: tuple[WeightFormat, ...] = ()
    packed_bytes: tuple[int, int] | None = None  # of the packed weights, and what they would take in ``dtype``


class SourceEntry(NamedTuple):
    """The checkpoint that a model was built from."""

    name: str  # a hub id, or the name of a local folder or file
    sha256: str  # over its files
    architecture: str  # model class name


class ExpertSizes(NamedTuple):
    """The experts of a model, of all layers that have some."""

    parameters: int  # of all experts together
    per_token: Size  # how many of a layer's experts a token takes
    per_layer: Size  # how many experts a layer has


class Parameters(NamedTuple):
    """How many parameters a model has."""

    total: int  # tied ones counted once
    # Those that a step multiplies with each of its tokens: without an embedding that is only looked up, and without
    # what an LM head was cut by.
    step: int
    # Of those, the ones of which a step reads what its tokens chose; None where there are none, and where the backend
    # multiplies by copies of them.
    experts: ExpertSizes | None = None


class AttentionEntry(NamedTuple):
    """The attention layers of a model, and their KV caches."""

    layers: tuple[LayerGeometry, ...]  # cache sizes of each, in order
    cache_dtype: Annotated[str, one_of(*CACHE_BYTES)]  # numpy name
    query_heads: Annotated[int, whole(1, 1 << 16)] | None = None  # of a layer; None: the checkpoint does not say
    # Entries that a token of each layer sees, itself included, -1 for all; empty where all layers see all.
    windows: tuple[Annotated[int, whole(-1, 1 << 30)], ...] = ()
    target_layers: tuple[LayerNumber, ...] = ()  # of a draft head that reads the target's caches: whose


class DroppedLayer(NamedTuple):
    """A layer of its checkpoint that a draft was built without."""

    number: int
    similarity: Annotated[float, number(-1, 1)]  # mean cosine of its input and output


class Rope(NamedTuple):
    """Rotary tables that depend on a sequence's length."""

    text: str  # what they are, and which of them the engine has
    max_len: Length  # tokens of the longest sequence, which they were chosen for


class CutLmHead(NamedTuple):
    """A draft's LM head that was cut down to some token ids, see ``bundle.arrays``."""

    ids_path: InnerPath
    num_rows: VocabSize  # N, how many ids it has


class CorrectionEntry(NamedTuple):
    """How a parallel head corrects the logits of a place by the token in front of it (``drafters.correction``)."""

    rule: str
    tables: tuple[InnerPath, ...]  # its files; a file's name is its table's
    most: Annotated[int, whole(1, 1 << 24)]  # how many tokens of a place it looks at, the likeliest ones


class TokenMapEntry(NamedTuple):
    """What a draft with another vocabulary than its target's shares with it, see ``bundle.token_map``."""

    path: InnerPath
    num_shared: VocabSize  # tokens of equal bytes, or of an equal role
    of_draft: Share  # of the draft's tokens
    of_target: Share  # of the target's
    of_text: Share  # of the tokens that built-in texts have in the target's vocabulary


class DraftHeadEntry(NamedTuple):
    """What a draft head is, beside its layers."""

    kind: str  # what it computes, "eagle3" or another
    # The target's hidden states that features are made of, as transformers numbers them, and -1 for the one after its
    # last norm.
    taps: tuple[Annotated[int, whole(-1, 1 << 20)], ...] = ()
    guessed: Share | None = None  # share of first guesses that were right when it was built
    reading: str | None = None  # how it was read otherwise than its files say
    # How many heads it is, each for a place of a draft; 0 for a kind that is one head.
    num_draft_heads: Annotated[int, whole(0, MAX_LOOKAHEAD)] = 0
    mask_token_id: TokenId | None = None  # if it drafts all tokens in one step: stands for tokens not known yet
    mask_path: InnerPath | None = None  # the feature that comes with it, see ``bundle.arrays``; None: none does
    # If it fills blocks: most tokens of one, the newest and those to guess.
    block_size: Annotated[int, whole(2, 1 << 16)] | None = None
    reads_draft: bool = False  # each of its heads reads what those before it guessed
    # How many MTP modules it is, each for a token of a draft; 0 for a head that is run again and again.
    num_modules: Annotated[int, whole(0, MAX_LOOKAHEAD)] = 0
    from_anchor: bool = False  # the block's first place, that of the newest token, guesses too
    correction: CorrectionEntry | None = None  # of logits by the tokens drafted in front; None for none


class AdapterEntry(NamedTuple):
    """A LoRA adapter of a target."""

    name: str  # as requests call it
    source: str  # name of the folder that it came from
    sha256: str  # over its files
    rank: Size  # the largest r of its layers
    use: Literal["merged", "chosen"]  # a part of the weights, or requests choose it


class TriedForm(NamedTuple):
    """A form of a draft that a build tried."""

    quantize: str | None  # of its weights, as in ``ModelEntry``
    lm_head_rows: Size
    accepted: Share  # of the target's tokens that it guessed
    step: Ratio  # what a step costs, over a step of the target
    speed: Ratio  # tokens a second that it promises, over plain decoding


class FormTrial(NamedTuple):
    """How a build chose the form of a draft."""

    num_tokens: int  # tokens of the target that were to be guessed
    forms: tuple[TriedForm, ...]  # what was tried, the simplest first
    obstacle: str | None = None  # why nothing was tried, or not all of it; None where all was


@dataclass(frozen=True)
class ModelEntry:
    """One model of a bundle: target, draft or draft head."""

    backend: str  # that built it, for example "ort-cpu"
    dtype: Annotated[
        str, one_of(*ITEM_BYTES)
    ]  # numpy name: of activations, and of weights unless formats say otherwise
    vocab_size: VocabSize  # token ids of the model (V): rows of its LM head, unless that was cut
    max_positions: int | None  # None: no limit
    source: SourceEntry
    parameters: Parameters
    attention: AttentionEntry
    engine: EngineEntry
    states: tuple[StateGeometry, ...] = ()  # sizes of what each recurrence keeps of a row, in order
    # Of the linear layers' weights: a name of ``quant_kinds.KINDS``; None for float weights.
    quantize: str | None = None
    passes: tuple[tuple[str, int], ...] = ()  # what each compiler pass changed, in order: name, changes
    rope: Rope | None = None
    dropped_layers: tuple[DroppedLayer, ...] = ()  # in the order in which they were chosen
    cut_lm_head: CutLmHead | None = None
    token_map: TokenMapEntry | None = None  # of a draft model with another vocabulary
    draft_head: DraftHeadEntry | None = None
    # Of a target: the merged one, or the ones that requests may choose, in the order of their numbers, from 1.
    adapters: tuple[AdapterEntry, ...] = ()
    trial: FormTrial | None = None  # of a draft whose form the build chose

    @property
    def chosen_adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may choose, in the order of their numbers, from 1."""
        return tuple(adapter.name for adapter in self.adapters if adapter.use == "chosen")

    @property
    def approximation(self) -> str | None:
        """What makes it another function than its checkpoint: its quantization, else its caches; None for nothing."""
        cache_dtype = self.attention.cache_dtype
        return self.quantize or (None if cache_dtype == self.dtype else f"{cache_dtype} KV cache")

    @property
    def takes_trees(self) -> bool:
        """Whether it verifies drafts with branches."""
        return PARENTS.name in self.engine.inputs

    @property
    def lm_head_rows(self) -> int:
        """The width of the logits."""
        return self.vocab_size if self.cut_lm_head is None else self.cut_lm_head.num_rows

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Layers of the checkpoint that the model has, ascending."""
        dropped = {layer for layer, _ in self.dropped_layers}
        return tuple(i for i in range(len(self.attention.layers) + len(dropped)) if i not in dropped)
