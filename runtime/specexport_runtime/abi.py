"""The graph contract: the one table that compiler, runtime, tests and documentation share.

One graph serves prefill, decode, verify and draft. Everything is token-major and packed: the new tokens of all
sequences are concatenated, and only the attention op knows about sequences. This module imports the standard library
only.

Dimension words:

====  ====================  ==========================================================
T     ``num_tokens``        new tokens in the step, all sequences together
B     ``num_seqs``          cache rows in use
Q     ``max_new_tokens``    most new tokens of one sequence in the step
R     ``num_logit_rows``    token rows that reach the LM head
V     ``vocab_size``        rows of the LM head; N of V tokens in a draft whose head was cut (``bundle.arrays``)
L     ``kv_capacity``       cache entries a row can hold (``max_model_len`` + slack)
P     ``kv_span``           cache entries that ``kv_positions`` describes (padded-KV graphs only)
K     ``lookahead``         draft tokens a round
H     ``kv_heads``          key/value heads of one layer
N     ``num_layers``        layers of the model, counted by their mixers: an attention, recurrences, or both
G     ``num_gates``         parts that can be switched off: a mixer and an MLP a layer, 2N
D     ``head_dim``          size of one key (or value) head of one layer
E     ``feature_size``      width of a feature: what a draft head reads of its target for each token
S     ``num_pending``       drafts of which a recurrence keeps its inputs until they are accepted, see ``num_pending``
Z     ``state_shape``       sizes of one recurrence's state; a convolution's are [taps - 1, channels], those of linear
                            attention [heads, key size, value size]
Y     ``pending_width``     what one token gives to one recurrence
====  ====================  ==========================================================
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from specexport_runtime.schema import whole

ABI_VERSION = 5

Role = Literal["token", "index", "padding", "cache", "gate", "output"]


class TensorSpec(NamedTuple):
    """One row of the contract.

    Attributes:
        name: graph input or output name; ``{i}`` stands for the layer number.
        dtype: numpy dtype name; ``"model"`` for the model's own dtype; ``"cache"`` for that of its KV cache, which is
            the same, or int8.
        shape: dimension words or fixed sizes.
        role: what the tensor is for.
        meaning: one sentence.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    role: Role
    meaning: str


CONTEXT_ID = -1
"""In ``input_ids`` of heads that fill blocks, or read the draft: an entry that has a feature and no token."""
AHEAD_ID = -2
"""In ``input_ids`` of MTP modules in turn, less its id: a token that has no feature yet, after those that have."""
INPUT_IDS = TensorSpec(
    "input_ids",
    "int64",
    ("T",),
    "token",
    "the step's new tokens of all sequences, concatenated; of a draft head that fills blocks, or reads the draft, -1 "
    "for an entry that has a feature alone; of MTP modules in turn, -2 less its id for a token that has no feature",
)
POSITIONS = TensorSpec("positions", "int64", ("T",), "token", "absolute position of each token in its sequence")
LOGIT_ROWS = TensorSpec("logit_rows", "int64", ("R",), "token", "which of the T rows reach the LM head")
KV_LENS = TensorSpec("kv_lens", "int32", ("B", 1), "index", "committed cache entries of each row before the step")
CU_NEW_TOKENS = TensorSpec(
    "cu_new_tokens", "int32", ("B+1",), "index", "running sum of new-token counts: row b owns tokens [cu[b], cu[b+1])"
)
ROW_STARTS = TensorSpec("row_starts", "int64", ("B", 1), "index", "first token of each row (any token for an idle row)")
ROW_ENDS = TensorSpec(
    "row_ends", "int64", ("B", 1), "index", "one past the last token of each row; an idle row still names one token"
)
ROW_TOTALS = TensorSpec(
    "row_totals",
    "int32",
    ("B", 1),
    "index",
    "cache entries of each row after the step: kv_lens + row_ends - row_starts",
)
PAD_INDEX = TensorSpec(
    "pad_index",
    "int64",
    ("B", 1, "Q"),
    "index",
    "token of slot (b, j) of the attention tile; any token if j is padding",
)
UNPAD_INDEX = TensorSpec(
    "unpad_index", "int64", ("T",), "index", "slot b*Q + j of the attention tile that holds each token"
)
KV_POSITIONS = TensorSpec(
    "kv_positions",
    "int64",
    ("B", 1, "P"),
    "padding",
    "padded-KV graphs only: position of the token in each cache entry, this step's included; -1 for a padding entry",
)
TILE_INDEX = TensorSpec(
    "tile_index",
    "int64",
    ("B", "W"),
    "index",
    "TensorRT's own attention only: token of slot (b, j); rows are right-aligned, so slot W-1 holds a row's last token",
)
UNTILE_INDEX = TensorSpec(
    "untile_index", "int64", ("T",), "index", "TensorRT's own attention only: slot b*W + j of that tile for each token"
)
STATE_STEPS = TensorSpec(
    "state_steps",
    "int64",
    ("B", 4),
    "index",
    "models with recurrences only: of each row, how many pending entries enter the state for good before the step, how "
    "many after them stay drafts, how many of the step's tokens enter the state for good, and how many of them are "
    "drafts; all 0 for an idle row",
)
K_CACHE = TensorSpec(
    "k_cache.{i}",
    "cache",
    ("B", 1, "H", "L", "D"),
    "cache",
    "keys of layer i, updated in place (output bound to input)",
)
V_CACHE = TensorSpec(
    "v_cache.{i}",
    "cache",
    ("B", 1, "H", "L", "D"),
    "cache",
    "values of layer i, updated in place (output bound to input)",
)
STATE = TensorSpec(
    "state.{i}",
    "float32",
    ("B", 1, "Z"),
    "cache",
    "state of recurrence i after the last token that is no draft, updated in place",
)
PENDING = TensorSpec(
    "pending.{i}",
    "float32",
    ("B", 1, "S", "Y"),
    "cache",
    "what the drafts after that token gave to recurrence i, updated in place: those that are accepted enter the state "
    "in the next step",
)
LAYER_MASK = TensorSpec(
    "layer_mask",
    "bool",
    ("G",),
    "gate",
    "targets that can draft with themselves only: whether mixer (2i: attention, recurrences) and MLP (2i+1) of layer i "
    "run in this step",
)
WANT_SIMILARITY = TensorSpec(
    "want_similarity", "bool", (1,), "gate", "the same targets only: whether to compute `attention_similarity`"
)
SIMILARITY = TensorSpec(
    "attention_similarity",
    "float32",
    ("N", "T"),
    "output",
    "the same targets only: cosine similarity of each token's residual stream before and after mixer i; [N, 0] "
    "unless wanted",
)
WANT_FEATURES = TensorSpec(
    "want_features", "bool", (1,), "gate", "ort-cpu targets with a draft head only: whether to compute `features`"
)
FEATURES = TensorSpec(
    "features",
    "float32",
    ("T", "E"),
    "output",
    "targets with a draft head only: the hidden states that the head reads, through its first projection; [0, E] "
    "unless wanted. GPU engines compute them in every step",
)
TOKEN_FEATURES = TensorSpec(
    "token_features",
    "float32",
    ("T", "E"),
    "token",
    "draft heads only: for each token, the feature of the token before it: the target's, or the head's own; of a head "
    "that fills blocks, the target's for each entry that has a feature alone",
)
NEXT_FEATURES = TensorSpec(
    "next_features",
    "float32",
    ("R", "E"),
    "output",
    "draft heads only: the head's hidden state at the selected rows, which its next step reads as `token_features`",
)
ADAPTER_IDS = TensorSpec(
    "adapter_ids",
    "int64",
    ("T",),
    "token",
    "targets with LoRA adapters to choose from only: the adapter of each token, numbered from 1; 0 for none",
)
PARENTS = TensorSpec(
    "parents",
    "int64",
    ("T",),
    "token",
    "ort-cpu targets that verify trees only: how many places before each token its parent stands in its row: 1 in a "
    "chain, and for a row's first token. A token sees what is before the step, its ancestors and itself, and its "
    "position counts these",
)
LOGITS = TensorSpec("logits", "float32", ("R", "V"), "output", "raw logits of the selected rows")
TOKEN_IDS = TensorSpec(
    "token_ids", "int64", ("R",), "output", "GPU engines only: argmax of each row of logits; -1 for a row with a NaN"
)
QUERY = TensorSpec(
    "query.{i}",
    "model",
    ("B", "Hq*F", "W/F", "D"),
    "output",
    "TensorRT engines with folded attention only: queries of layer i, for the engine itself, which reads the caches in "
    "place if they are an output; all layers write to the same memory, one after the other",
)
K_CACHE_OUT = TensorSpec("k_cache_out.{i}", "cache", ("B", 1, "H", "L", "D"), "output", "same memory as k_cache.{i}")
V_CACHE_OUT = TensorSpec("v_cache_out.{i}", "cache", ("B", 1, "H", "L", "D"), "output", "same memory as v_cache.{i}")
STATE_OUT = TensorSpec("state_out.{i}", "float32", ("B", 1, "Z"), "output", "same memory as state.{i}")
PENDING_OUT = TensorSpec("pending_out.{i}", "float32", ("B", 1, "S", "Y"), "output", "same memory as pending.{i}")

STEP_INPUTS = (
    INPUT_IDS,
    POSITIONS,
    LOGIT_ROWS,
    KV_LENS,
    CU_NEW_TOKENS,
    ROW_STARTS,
    ROW_ENDS,
    ROW_TOTALS,
    PAD_INDEX,
    UNPAD_INDEX,
)
"""Inputs filled by the host on every step. A lowered graph keeps those that it uses."""

PADDED_STEP_INPUTS = (*STEP_INPUTS, KV_POSITIONS)
"""Step inputs of a padded-KV graph, where rows hold padding entries and only ``kv_positions`` tells them apart."""

ALIGNED_STEP_INPUTS = (INPUT_IDS, POSITIONS, LOGIT_ROWS, KV_LENS, CU_NEW_TOKENS, ROW_TOTALS, TILE_INDEX, UNTILE_INDEX)
"""Step inputs of TensorRT engines with TensorRT's own attention, which wants the queries of a row at the tile's end."""

GATE_INPUTS = (LAYER_MASK, WANT_SIMILARITY)
"""Inputs of a target whose layers can be switched off. They depend on no step shape."""

GateKind = Literal["attention", "recurrence", "attention and recurrence", "MLP", ""]
"""What a gate is for: a layer's mixer, which is one part even where it is both; its MLP; nothing, where it has none."""
ATTENTION, RECURRENCE, MLP = "attention", "recurrence", "MLP"

FEATURE_INPUTS = (WANT_FEATURES, TOKEN_FEATURES)
"""Inputs of a target with a draft head, and of the head."""

AFTER_NORM = -1
"""Stands for the hidden state after a target's last norm, among those that a draft head reads."""

CACHE_INPUTS = (K_CACHE, V_CACHE)
STATE_INPUTS = (STATE, PENDING)
STATE_OUTPUTS = (STATE_OUT, PENDING_OUT)
OUTPUTS = (LOGITS, K_CACHE_OUT, V_CACHE_OUT)

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one value of each dtype that models may have."""
CACHE_BYTES = {**ITEM_BYTES, "int8": 1}
"""The same of KV caches."""

OP_DOMAIN = "specexport"
OP_NAME = "UnpaddedAttention"
OP_VERSION = 1


def with_feature_size(spec: TensorSpec, feature_size: int) -> TensorSpec:
    """A row of the contract for an engine whose features have E values: no step decides that size."""
    return spec._replace(shape=tuple(feature_size if word == "E" else word for word in spec.shape))


class StepShape(NamedTuple):
    """Sizes of one packed step: everything that decides a binding, a profile or a CUDA graph.

    Attributes:
        first_row: first cache row of the step; rows ``[first_row, first_row + num_seqs)`` take part.
        num_seqs: B.
        num_tokens: T.
        max_new_tokens: Q.
        num_logit_rows: R.
        kv_span: P; 0 for graphs without padding in the KV cache.
        fold: slots of the attention tile come in groups of so many: W is Q, rounded up to a multiple of it.
    """

    first_row: int
    num_seqs: int
    num_tokens: int
    max_new_tokens: int
    num_logit_rows: int
    kv_span: int = 0
    fold: int = 1

    @property
    def tile_width(self) -> int:
        """W."""
        return -(-self.max_new_tokens // self.fold) * self.fold

    def dim(self, word: str | int) -> int:
        """Size of a dimension word (``B``, ``B+1``, ``T``, ``Q``, ``W``, ``R``, ``P``), or a size."""
        if isinstance(word, int):
            return word
        return {
            "B": self.num_seqs,
            "B+1": self.num_seqs + 1,
            "T": self.num_tokens,
            "Q": self.max_new_tokens,
            "W": self.tile_width,
            "R": self.num_logit_rows,
            "P": self.kv_span,
        }[word]

    def shape_of(self, spec: TensorSpec) -> tuple[int, ...]:
        """Concrete shape of a step input in this step."""
        return tuple(self.dim(word) for word in spec.shape)


LARGEST_SIZE = 1 << 20
Size = Annotated[int, whole(1, LARGEST_SIZE)]
"""Of a head, a state's axis, and the like: what a manifest may say."""


class LayerGeometry(NamedTuple):
    """Cache sizes of one attention layer (keys and values may differ, as in multi-head latent attention)."""

    kv_heads: Size
    k_dim: Size
    v_dim: Size


class StateGeometry(NamedTuple):
    """Sizes of what one recurrence keeps of a row.

    Attributes:
        shape: Z, of its state.
        width: Y, of what one token gives to it.
    """

    shape: tuple[Size, ...]
    width: Size


def state_shapes(states: Sequence[StateGeometry], num_rows: int, num_pending: int) -> dict[str, tuple[int, ...]]:
    """Shape of the state [rows, 1, *Z] and of the pending entries [rows, 1, S, Y] of each recurrence, by input name."""
    shapes = {}
    for i, state in enumerate(states):
        shapes[STATE.name.format(i=i)] = (num_rows, 1, *state.shape)
        shapes[PENDING.name.format(i=i)] = (num_rows, 1, num_pending, state.width)
    return shapes


def cache_shapes(layers: Sequence[LayerGeometry], num_rows: int, kv_capacity: int) -> dict[str, tuple[int, ...]]:
    """Shape [rows, 1, heads, capacity, head size] of each cache input, by name."""
    return {
        spec.name.format(i=i): (num_rows, 1, layer.kv_heads, kv_capacity, head_dim)
        for i, layer in enumerate(layers)
        for spec, head_dim in zip(CACHE_INPUTS, (layer.k_dim, layer.v_dim), strict=True)
    }


def num_pending(lookahead: int, *, drafts_itself: bool) -> int:
    """S: tokens whose inputs wait beside a row's state, at most.

    A verify step leaves K drafts, all of which may be accepted. A target that drafts with its own layers has K steps
    before the next one, which may settle nothing: what they read waits until after those.
    """
    return kv_slack(lookahead) + (lookahead if drafts_itself else 0)


def kv_slack(lookahead: int) -> int:
    """Cache entries a row needs beyond ``max_model_len``: verify writes K+1 tokens before it knows which stay."""
    return lookahead + 1


def format_table() -> str:
    """The contract as a Markdown table (a test compares the copy in docs/contract.md with it)."""
    rows = ["| name | dtype | shape | meaning |", "| --- | --- | --- | --- |"]
    for spec in (
        *PADDED_STEP_INPUTS,
        TILE_INDEX,
        UNTILE_INDEX,
        *GATE_INPUTS,
        *FEATURE_INPUTS,
        STATE_STEPS,
        ADAPTER_IDS,
        PARENTS,
        *CACHE_INPUTS,
        *STATE_INPUTS,
        LOGITS,
        TOKEN_IDS,
        SIMILARITY,
        FEATURES,
        NEXT_FEATURES,
        QUERY,
        *OUTPUTS[1:],
        *STATE_OUTPUTS,
    ):
        shape = ", ".join(str(word) for word in spec.shape)
        rows.append(f"| `{spec.name}` | {spec.dtype} | [{shape}] | {spec.meaning} |")
    return "\n".join(rows)
