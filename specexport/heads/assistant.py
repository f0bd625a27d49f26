"""A Gemma-4 assistant in torch: loading it, what it computes, and the graph of it.

Its layers have no keys and values: they read two caches of the target (``read_assistant``), which hold the entries of
all verified tokens, all but the newest. A token goes in through the target's embedding, beside the target's last hidden
state or, while drafting, the state that the assistant itself gave. Its position is the newest token's throughout.

The reference is transformers: ``models/gemma4_assistant``, driven by ``SinglePositionMultiTokenCandidateGenerator``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specexport.heads.config import AssistantShape, HeadConfig
from specexport.heads.files import HeadFiles
from specexport.heads.loaded import LoadedHead, TargetTables, fill_module, load_projection
from specexport.heads.read_assistant import FULL, ORDERING, SLIDING, make_body
from specexport.trace.attention import AttentionContext, LayerCall, ScoreTerms, attention_hook, unpadded_attention
from specexport.trace.export import TracedModel, trace_step
from specexport_runtime.abi import LOGITS, NEXT_FEATURES, STEP_INPUTS, TOKEN_FEATURES
from specexport_runtime.errors import CheckpointError

Caches = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [1, H, n, D] of each cache that an assistant reads, in the order of ``AssistantShape``."""


class GroupedLmHead(nn.Module):  # type: ignore[misc]  # torch is not followed
    """An LM head that multiplies the tokens of a few groups only: those whose centroids the state is nearest to."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        shape = shape_of(config)
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


class AssistantHead(nn.Module):  # type: ignore[misc]
    """A Gemma-4 assistant: layers between two projections, the target's embedding, and an LM head."""

    def __init__(self, config: HeadConfig, name: str = "assistant") -> None:
        super().__init__()
        self.head_config = config
        width, hidden = config.target_hidden_size, config.hidden_size
        self.body = make_body(name, config.layer_config)  # transformers' model of its layers
        self.embed_tokens = nn.Embedding(config.vocab_size, width)  # the target's [V, E]
        self.pre_projection = nn.Linear(2 * width, hidden, bias=False)
        self.post_projection = nn.Linear(hidden, width, bias=False)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)  # [V, H]
        # chooses among the rows of ``lm_head``; None where all are multiplied
        self.masked_embedding = GroupedLmHead(config) if shape_of(config).num_centroids else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.lm_head.weight.dtype

    @property
    def step_parameters(self) -> int:
        """Parameters that a step multiplies with each of its tokens: without the embedding."""
        whole = sum(parameter.numel() for parameter in self.parameters()) - self.embed_tokens.weight.numel()
        shape, lm_head = shape_of(self.head_config), self.lm_head.weight.numel()
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
        shared = {kind: caches[at] for kind, at in zip(kinds, shape_of(self.head_config).reads, strict=True)}
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


def shape_of(config: HeadConfig) -> AssistantShape:
    """What an assistant's configuration has beside that of other heads."""
    if config.assistant is None:
        raise TypeError("an assistant's configuration is needed.")
    return config.assistant


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
        head, shape = self.model, shape_of(self.model.head_config)

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


def trace_assistant(head: AssistantHead) -> TracedModel:
    """Trace an assistant (eval mode) to ONNX IR: its attention has no keys, and reads the target's caches."""
    shape = shape_of(head.head_config)
    ir_model = trace_step(
        AssistantStep(head).eval(),
        head.dtype,
        shape.geometries,
        [*STEP_INPUTS, TOKEN_FEATURES],
        [LOGITS, NEXT_FEATURES],
        {"E": head.head_config.feature_size},
        reads_only=True,
    )
    return TracedModel(ir_model, shape.geometries)


class Places(NamedTuple):
    """Where drafts go on from in one text: at each place, all entries before it are known."""

    positions: Tensor  # of the newest token of each draft [A], at least 1
    caches: Caches  # of the whole text, see :data:`Caches`


def draft_steps(head: AssistantHead, tokens: Tensor, features: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """One draft step at many places of a text, with attention as transformers computes it.

    Each place is fed a token [A] and features [A, E]. Gives logits [A, V], and what the assistant hands on [A, E].
    """
    entries = torch.arange(places.caches[0][0].shape[2])[None]
    at = places.positions[:, None]
    known = entries < at
    near = entries >= at - entries_seen(head.body.config.sliding_window)
    seen = {FULL: known, SLIDING: known & near}
    masks = {kind: mask[None, None] for kind, mask in seen.items()}
    with torch.no_grad():
        logits, handed_on = head.read(head.states(tokens, places.positions, features, places.caches, **masks))
    return logits, handed_on


def read_caches(model: Any, ids: Tensor, config: HeadConfig) -> tuple[Tensor, Caches]:
    """The target's logits [T, V] of a text, and the caches that an assistant reads of it.

    ``model`` is a transformers causal language model, ``ids`` are the text's token ids [1, T].
    """
    from transformers import DynamicCache

    kept = DynamicCache()  # without a configuration it keeps what lies behind a window
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=kept, use_cache=True).logits[0]
    layers = [kept.layers[layer] for layer in shape_of(config).target_layers]
    return logits, [(layer.keys, layer.values) for layer in layers]


def load_assistant(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    """Load an assistant; see ``load.load_head``."""
    try:
        with torch.device("meta"):
            head = AssistantHead(config, files.name)
        rotary = head.body.rotary_emb
        head.body.rotary_emb = None
        head.to_empty(device="cpu")
        head.body.rotary_emb = type(rotary)(head.body.config)  # its buffers are in no file
    except CheckpointError:
        raise
    except Exception as error:  # sizes that do not fit one another, an unknown kind of rotary embedding
        raise CheckpointError(
            f"the head {files.name}: no layers can be made of its configuration ({type(error).__name__}: {error}).",
            "fetch the head again.",
        ) from error
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
