"""A Gemma-4 assistant in torch: loading it, what it computes, and the graph of it.

Its layers have no keys and values: they read two caches of the target, which hold the entries of
all verified tokens, all but the newest. A token goes in through the target's embedding, beside the target's last hidden
state or, while drafting, the state that the assistant itself gave. Its position is the newest token's throughout.

The reference is transformers: ``models/gemma4_assistant``, driven by ``SinglePositionMultiTokenCandidateGenerator``.
A layer with a window reads the keys and values of the target's last layer with a window, any other those of the
target's last layer without one. Layers of the target that share keys themselves are not counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import CONFIG_NAME, OTHER_TARGET, HeadFiles, check_target, read_size
from specexport.heads.kind import Caches, HeadKind
from specexport.heads.loaded import LoadedHead, TargetTables, convert_module_errors, fill_module, load_projection
from specexport.heads.modules import HeadModule
from specexport.heads.reference import CHECK_CAPACITY, CheckedRow, HeadReference, LentRows
from specexport.heads.trace import trace_head_step
from specexport.trace.attention import AttentionContext, LayerCall, ScoreTerms, attention_hook, unpadded_attention
from specexport.trace.export import TracedModel
from specexport_runtime.abi import AFTER_NORM, STEP_INPUTS, LayerGeometry
from specexport_runtime.errors import CheckpointError, UnsupportedModelError

_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
SLIDING, FULL = "sliding_attention", "full_attention"
ORDERING = "masked_embedding.token_ordering"
_ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_FETCH = "fetch the assistant again."
_ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp", "vocab_size_per_layer_input")

_LENS = ((11, 7), (1, 31), (5, 0), (0, 20), (19, 8))
"""Entries of the target's two rows in each step of the build's proof; an idle row has none."""


class AssistantShape(NamedTuple):
    """What an assistant has in the place of its own keys and values, and of a plain LM head."""

    geometries: tuple[LayerGeometry, ...]  # sizes of each of the target's caches that it reads
    reads: tuple[int, ...]  # of each layer of the assistant, which of these caches it reads, by its place among them
    num_centroids: int = 0  # groups of tokens that its LM head chooses from; 0 for an LM head over all tokens
    chosen_centroids: int = 0  # how many it chooses


class LentCache(NamedTuple):
    """A KV cache of the target that an assistant may read."""

    layer: int  # which layer fills it
    geometry: LayerGeometry


class GroupedLmHead(nn.Module):  # type: ignore[misc]  # torch is not followed
    """An LM head that multiplies the tokens of a few groups only: those whose centroids the state is nearest to."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        shape: AssistantShape = config.shape
        self.chosen, self.vocab_size = shape.chosen_centroids, config.vocab_size
        self.centroids = nn.Linear(config.hidden_size, shape.num_centroids, bias=False)
        self.token_ordering = nn.Buffer(torch.zeros(config.vocab_size, dtype=torch.int64))

    def forward(self, state: Tensor, weight: Tensor) -> Tensor:
        """Logits [R, V] of states [R, H] by an LM head [V, H]; all other tokens get the row's least, less 1.

        Transformers takes the least of the whole batch, which is the same for one row. A row must not depend on others.
        """
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        chosen = torch.topk(self.centroids(state), self.chosen, dim=-1).indices
        ids = groups[chosen].flatten(1)
        logits = (weight[ids] @ state[:, :, None])[:, :, 0]
        rest = logits.amin(dim=-1, keepdim=True) - 1.0
        return rest.expand(-1, self.vocab_size).scatter(1, ids, logits)


class AssistantHead(HeadModule):
    """A Gemma-4 assistant: layers between two projections, the target's embedding, and an LM head."""

    def __init__(self, config: HeadConfig, name: str = "assistant") -> None:
        super().__init__(config)
        width, hidden = config.target_hidden_size, config.hidden_size
        self.body = _make_body(name, config.layer_config)  # transformers' model of its layers
        self.embed_tokens = nn.Embedding(config.vocab_size, width)  # the target's [V, E]
        self.pre_projection = nn.Linear(2 * width, hidden, bias=False)
        self.post_projection = nn.Linear(hidden, width, bias=False)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)  # [V, H]
        # chooses among the rows of ``lm_head``; None where all are multiplied
        self.masked_embedding = GroupedLmHead(config) if config.shape.num_centroids else None

    @property
    def step_parameters(self) -> int:
        """Parameters that a step multiplies with each of its tokens: without the embedding."""
        whole = sum(parameter.numel() for parameter in self.parameters()) - self.embed_tokens.weight.numel()
        shape, lm_head = self.head_config.shape, self.lm_head.weight.numel()
        spared = lm_head - lm_head * shape.chosen_centroids // shape.num_centroids if shape.num_centroids else 0
        return int(whole - spared)

    def states(self, input_ids: Tensor, positions: Tensor, features: Tensor, caches: Caches, **masks: Any) -> Tensor:
        """What its LM head reads [T, H], for token ids [T] and features [T, E].

        The features are the target's last hidden state before each token, or the assistant's own. ``positions`` [T] are
        of the token that each draft goes on from. ``masks`` are attention masks by kind of layer where attention is
        transformers' own; none otherwise.
        """
        embedded = self.embed_tokens(input_ids)
        embedded = embedded * torch.tensor(self.head_config.target_hidden_size**0.5, dtype=embedded.dtype)
        given = self.pre_projection(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        kinds = self.body.config.layer_types
        shared = {kind: caches[at] for kind, at in zip(kinds, self.head_config.shape.reads, strict=True)}
        output = self.body(
            inputs_embeds=given[None],
            position_ids=positions[None],
            attention_mask={kind: masks.get(kind) for kind in shared},
            shared_kv_states=shared,
            use_cache=False,
            logits_to_keep=None,  # all tokens, and no question asked of how many there are
        )
        return output.last_hidden_state[0]

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of states [R, H], and what the next step reads as features [R, E]."""
        if self.masked_embedding is None:
            return self.lm_head(state), self.post_projection(state)
        return self.masked_embedding(state, self.lm_head.weight), self.post_projection(state)


def entries_seen(window: int) -> int:
    """Entries that a layer with a window of ``window`` tokens reads: the newest so many, plus one.

    An assistant's mask reaches as far as the window says on either side, its border included (transformers,
    ``sliding_window_bidirectional_overlay``), and a draft's query stands at the newest entry.
    """
    return window + 1


class AssistantStep(nn.Module):  # type: ignore[misc]
    """An assistant as the contract sees it: packed tokens, features and the target's caches in; no cache out."""

    def __init__(self, head: AssistantHead) -> None:
        super().__init__()
        self.model = head

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step. Inputs: the step inputs, the features, then k and v of each cache."""
        input_ids, positions, logit_rows, *step = inputs[: len(STEP_INPUTS)]
        features, *caches = inputs[len(STEP_INPUTS) :]
        head, shape = self.model, self.model.head_config.shape

        def answer(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, terms: ScoreTerms) -> Tensor:  # noqa: ARG001
            at = shape.reads[call.index]
            window = entries_seen(call.window) if call.window > 0 else -1
            asked = replace(call, geometry=shape.geometries[at], window=window)
            pair = caches[2 * at], caches[2 * at + 1]
            return unpadded_attention(asked, q, None, None, pair, tuple(step), terms)[0]

        # Transformers wants keys to hand to attention, which is answered without them.
        unread = [
            q.new_zeros(1, sizes.kv_heads, 1, sizes.k_dim)
            for sizes, q in zip(shape.geometries, caches[::2], strict=True)
        ]
        with attention_hook(head.body, AttentionContext(answer)):
            state = head.states(input_ids, positions, features, [(each, each) for each in unread])
        logits, handed_on = head.read(state.index_select(0, logit_rows))
        return logits, handed_on.float()


def _trace(head: AssistantHead, *, fixed_sizes: bool, group_experts: bool) -> TracedModel:  # noqa: ARG001
    """Its attention has no keys, and reads the target's caches."""
    geometries = head.head_config.shape.geometries
    return TracedModel(trace_head_step(AssistantStep(head), geometries, reads_only=True), geometries)


def draft_steps(
    head: AssistantHead, tokens: Tensor, features: Tensor, positions: Tensor, caches: Caches
) -> tuple[Tensor, Tensor]:
    """One draft step at many places of a text, with attention as transformers computes it.

    Each place is fed a token [A] and features [A, E]. Gives logits [A, V], and what the assistant hands on [A, E].
    ``positions`` [A] are of the newest token of each draft, at least 1: all entries before it are known. ``caches`` are
    of the whole text.
    """
    entries = torch.arange(caches[0][0].shape[2])[None]
    at = positions[:, None]
    known = entries < at
    near = entries >= at - entries_seen(head.body.config.sliding_window)
    seen = {FULL: known, SLIDING: known & near}
    masks = {kind: mask[None, None] for kind, mask in seen.items()}
    with torch.no_grad():
        logits, handed_on = head.read(head.states(tokens, positions, features, caches, **masks))
    return logits, handed_on


def _read_caches(model: Any, ids: Tensor, config: HeadConfig) -> tuple[Tensor, Caches]:
    """See ``HeadKind.read_target``."""
    from transformers import DynamicCache

    kept = DynamicCache()  # without a configuration it keeps what lies after a window
    logits = model(input_ids=ids, past_key_values=kept, use_cache=True).logits[0]
    layers = [kept.layers[layer] for layer in config.target_layers]
    return logits, [(layer.keys, layer.values) for layer in layers]


def _load(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    with convert_module_errors(files):
        with torch.device("meta"):
            head = AssistantHead(config, files.name)
        rotary = head.body.rotary_emb
        head.body.rotary_emb = None
        head.to_empty(device="cpu")
        head.body.rotary_emb = type(rotary)(head.body.config)  # its buffers are in no file
    names = {name: name.removeprefix("body.") for name in head.state_dict() if name != "embed_tokens.weight"}
    if "lm_head.weight" not in files.shapes:
        names["lm_head.weight"] = "embed_tokens.weight"  # they are tied, and only one is in the file
    fill_module(head, files, names)
    head.embed_tokens.weight = nn.Parameter(tables.embedding, requires_grad=False)
    head = head.to(dtype).eval().requires_grad_(False)
    _check_ordering(files, head)
    return LoadedHead(config, head, load_projection(files, config, dtype), None)


def _check_ordering(files: HeadFiles, head: AssistantHead) -> None:
    """Refuse an assistant whose groups do not hold each token once: they decide which logits are whose."""
    if head.masked_embedding is None:
        return
    head.masked_embedding.token_ordering = head.masked_embedding.token_ordering.long()
    ids = head.masked_embedding.token_ordering.numpy()
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise CheckpointError(
            f"the head {files.name}: {ORDERING} does not name each of {len(ids)} tokens once.", "fetch the head again."
        )


def _recognizes(files: HeadFiles) -> bool:
    """Whether a configuration says that it is of this kind."""
    named = files.values.get("architectures")
    architectures = named if isinstance(named, list) else []
    return files.values.get("model_type") in _MODEL_TYPES or any(name in _ARCHITECTURES for name in architectures)


def lent_caches(text: Any) -> dict[str, LentCache]:
    """The last cache of each kind of layer in a target that ``text`` configures; none if it has no kinds."""
    types = getattr(text, "layer_types", None) or []
    sharing = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    found = {}
    for layer, kind in enumerate(types[: len(types) - sharing]):
        own = text.per_layer_config[layer]
        size = int(getattr(own, "head_dim", 0) or own.hidden_size // own.num_attention_heads)
        found[kind] = LentCache(layer, LayerGeometry(int(own.num_key_value_heads), size, size))
    return found


def _read(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    values = files.values
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{files.name}: {CONFIG_NAME} has no text_config, which an assistant needs.", _FETCH)
    odd = next((key for key in _ABSENT if text.get(key)), None)
    if odd is not None:
        raise UnsupportedModelError(
            f"{files.name} sets {odd} to {text[odd]!r}, which an assistant of Gemma 4 does not have.",
            "give a plain assistant.",
        )
    width = read_size(files, values, "backbone_hidden_size")
    check_target(files, target, width=width, vocab_size=read_size(files, text, "vocab_size"))
    own = {**text, **dict.fromkeys(_ABSENT, 0), "enable_moe_block": False, "use_double_wide_mlp": False}
    own["model_type"] = text.get("model_type", "gemma4_text")
    own["num_hidden_layers"] = read_size(files, text, "num_hidden_layers")
    lent = {} if target.text is None else lent_caches(target.text)
    caches, shape = _shape(files, own, lent, target.vocab_size)
    return HeadConfig(
        kind="assistant",
        layer_config=own,
        taps=(AFTER_NORM,),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_layers=tuple(cache.layer for cache in caches),
        source_format="transformers",
        shape=shape,
    )


def _shape(
    files: HeadFiles, text: Mapping[str, Any], lent: Mapping[str, LentCache], vocab_size: int
) -> tuple[list[LentCache], AssistantShape]:
    """The target's caches that it reads, and what its configuration has beside that of other heads."""
    config = _body_config(files.name, text)
    kinds = list(config.layer_types)
    caches: list[LentCache] = []
    for layer, kind in enumerate(kinds):
        cache = lent.get(kind)
        if cache is None:
            raise CheckpointError(
                f"the head {files.name} has layers of kind {kind}, and the target has "
                f"{'layers of ' + ', '.join(lent) if lent else 'no kinds of layers'} to read from.",
                OTHER_TARGET,
            )
        own = config.per_layer_config[layer]
        if (int(own.num_key_value_heads), int(own.head_dim)) != cache.geometry[:2]:
            raise CheckpointError(
                f"the head {files.name}: its layer {layer} reads {own.num_key_value_heads} heads of {own.head_dim} "
                f"values, and layer {cache.layer} of the target, its last one of kind {kind}, has "
                f"{cache.geometry.kv_heads} of {cache.geometry.k_dim}.",
                OTHER_TARGET,
            )
        if cache not in caches:
            caches.append(cache)
    num_centroids, chosen = _centroids(files, vocab_size)
    reads = tuple(caches.index(lent[kind]) for kind in kinds)
    return caches, AssistantShape(tuple(cache.geometry for cache in caches), reads, num_centroids, chosen)


def _centroids(files: HeadFiles, vocab_size: int) -> tuple[int, int]:
    """Groups of tokens, and how many of them are chosen; 0 for an LM head over all tokens."""
    if not files.values.get("use_ordered_embeddings", False):
        return 0, 0
    count = read_size(files, files.values, "num_centroids")
    chosen = read_size(files, files.values, "centroid_intermediate_top_k")
    if vocab_size % count or chosen > count:
        raise CheckpointError(
            f"{files.name}: {count} groups, of which {chosen} are chosen, do not divide {vocab_size} tokens.", _FETCH
        )
    return count, chosen


def _body_config(name: str, text: Mapping[str, Any]) -> Any:
    """Configuration of an assistant's layers, by its ``text_config``, with a vocabulary of one token."""
    from transformers import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[text["model_type"]]
    except KeyError:
        raise UnsupportedModelError(
            f"{name}: transformers has no layers of {text['model_type']!r}.", "give an assistant of Gemma 4."
        ) from None

    # Transformers 5.23 counts layers that share keys against those of the same model that have some, and an assistant
    # has none.
    class AllShared(kind):  # type: ignore[misc, valid-type]
        @property
        def kv_sharing_modes(self) -> list[str]:
            """All layers read what another model has stored."""
            return ["reuse"] * int(self.num_hidden_layers)

    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # it has no vocabulary to have them in
    try:
        config = AllShared.from_dict({**text, **none, "vocab_size": 1, "num_kv_shared_layers": 0})
        config.num_kv_shared_layers = config.num_hidden_layers
        if len(config.layer_types) != config.num_hidden_layers:
            raise ValueError(f"{len(config.layer_types)} layer_types for {config.num_hidden_layers} layers")
    except Exception as error:  # values of the wrong type, sizes that do not fit one another
        raise CheckpointError(
            f"{name}: its text_config cannot be read ({type(error).__name__}: {error}).", _FETCH
        ) from error
    return config


def _make_body(name: str, text: Mapping[str, Any]) -> Any:
    """Transformers' model of an assistant's layers, without its embedding; see :func:`_body_config`."""
    from transformers import MODEL_MAPPING

    config = _body_config(name, text)
    body = MODEL_MAPPING[type(config).__mro__[1]]._from_config(config)
    del body.embed_tokens  # tokens come through the target's
    return body


def _reference(loaded: LoadedHead) -> HeadReference:
    """Steps of one token a row over random keys and values, and what transformers' own attention makes of them."""
    head, config, generator = loaded.head, loaded.config, np.random.default_rng(21)
    caches = {}
    for i, (heads, k_dim, v_dim) in enumerate(config.shape.geometries):
        for name, size in ((f"k_cache.{i}", k_dim), (f"v_cache.{i}", v_dim)):
            caches[name] = generator.standard_normal((2, 1, heads, CHECK_CAPACITY, size), np.float32)
    steps = []
    for lens in _LENS:
        rows = []
        for row, entries in enumerate(lens):
            tokens = generator.integers(0, config.vocab_size, min(entries, 1))
            fed = generator.standard_normal((len(tokens), config.feature_size), np.float32)
            own = [torch.from_numpy(cache[row]).to(head.dtype) for cache in caches.values()]
            positions, pairs = torch.full((len(tokens),), entries), list(zip(own[::2], own[1::2], strict=True))
            logits, handed_on = np.zeros((0, config.vocab_size), np.float32), fed
            if len(tokens):
                found = draft_steps(head, torch.from_numpy(tokens), torch.from_numpy(fed), positions, pairs)
                logits, handed_on = (each.float().numpy() for each in found)
            rows.append(CheckedRow(tokens, fed, 0, logits, handed_on))
        steps.append(rows)
    return HeadReference(steps, LentRows(caches, _LENS))


def _guesses(loaded: LoadedHead, tokens: Tensor, features: Tensor, caches: Caches) -> Iterator[tuple[Tensor, slice]]:
    for first in (1, 2):
        positions = torch.arange(1, len(tokens) - first + 1)
        logits, handed_on = draft_steps(loaded.head, tokens[first:], features, positions, caches)
        features = handed_on[:-1]
        yield logits, slice(first, None)


KIND = HeadKind(
    name="assistant",
    called="a Gemma-4 assistant",
    recognizes=_recognizes,
    read=_read,
    load=_load,
    trace=_trace,
    reference=_reference,
    guesses=_guesses,
    read_target=_read_caches,
    needs=frozenset(["lent caches"]),
)
