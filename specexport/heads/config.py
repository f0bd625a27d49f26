"""What a draft head computes, whatever file it came from. Imports the standard library."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from specexport_runtime.abi import LayerGeometry

HeadKind = Literal["eagle3", "eagle", "mtp", "medusa", "hydra", "dflash", "assistant"]


class MedusaShape(NamedTuple):
    """Heads that stand side by side over one hidden state (Cai et al. 2024)."""

    num_heads: int  # one for each place of a draft
    num_blocks: int  # residual blocks of each head
    bias: bool  # the blocks' linear layers have one
    one_lm_head: bool = False  # all heads share an LM head
    logit_scale: float = 1.0  # what logits are multiplied by


class HydraShape(NamedTuple):
    """Heads of which each reads the tokens that those before it guessed (Ankner et al. 2024)."""

    num_heads: int  # one for each place of a draft
    num_blocks: int  # residual blocks of each head behind the one that joins what it reads
    one_block: bool = False  # these are one and the same, run again and again, as their writer has them
    has_prefix: bool = False  # a decoder layer reads the hidden states first (Hydra++)


class AssistantShape(NamedTuple):
    """What a Gemma-4 assistant has in the place of its own keys and values, and of a plain LM head."""

    # layers of the target whose caches it reads, in the order in which its graph has them
    target_layers: tuple[int, ...]
    geometries: tuple[LayerGeometry, ...]  # sizes of each of these caches
    reads: tuple[int, ...]  # of each layer of the assistant, which of these caches it reads, by its place among them
    num_centroids: int = 0  # groups of tokens that its LM head chooses from; 0 for an LM head over all tokens
    chosen_centroids: int = 0  # how many it chooses


@dataclass(frozen=True)
class HeadConfig:
    """A draft head, in terms of the arithmetic: which hidden states it reads, and where it has norms.

    ``"eagle3"`` joins a token's embedding and a feature at the input of its first attention (Li et al. 2025),
    ``"eagle"`` in a linear layer before its first decoder layer (Li et al. 2024), ``"mtp"`` both normed in a linear
    layer before a decoder layer of the target's own kind (DeepSeek-AI 2024). ``"medusa"`` has no decoder layer (Cai et
    al. 2024), ``"hydra"`` none, or one over features alone (Ankner et al. 2024). ``"dflash"`` reads features as context
    of a block of tokens (Chen et al. 2026). ``"assistant"`` reads the target's own keys and values (Gemma 4).
    """

    kind: HeadKind
    # transformers' configuration of its decoder layers, with ``model_type``
    layer_config: Mapping[str, Any] = field(hash=False)
    # hidden states of the target that it reads: ``i`` is what decoder layer ``i`` reads, the number of layers what the
    # last one gives; ``abi.AFTER_NORM`` is the state behind the last norm
    taps: tuple[int, ...]
    target_hidden_size: int  # width of these hidden states
    vocab_size: int  # V of the target
    draft_vocab_size: int  # N, rows of its LM head
    norm_before_residual: bool = False  # the first layer's residual is the normed feature, not the feature
    norm_before_fc: bool = False  # a norm over all hidden states together, before they are projected
    fc_norm: bool = False  # a norm over each of them instead
    norm_output: bool = False  # what it hands on is normed, as what its LM head reads is
    feature_first: bool = False  # where it joins embedding and feature, the feature comes first
    # P-EAGLE and DFlash draft all tokens in one step: this one stands for each unknown token; None for others
    mask_token_id: int | None = None
    block_size: int | None = None  # most tokens of a DFlash head's block, the newest and the ones to guess
    # which layers of a DFlash head hide the rest of the block from each of its tokens
    causal_layers: tuple[bool, ...] = ()
    source_format: str = ""  # which writer's names the file had, for reports
    medusa: MedusaShape | None = None  # of ``"medusa"``; None for others
    hydra: HydraShape | None = None  # of ``"hydra"``; None for others
    assistant: AssistantShape | None = None  # of ``"assistant"``; None for others

    @property
    def num_draft_heads(self) -> int:
        """How many heads there are, each for a place of a draft; 0 for a kind that is one head."""
        shape = self.medusa or self.hydra
        return 0 if shape is None else shape.num_heads

    @property
    def hidden_size(self) -> int:
        """Width of its hidden state."""
        return int(self.layer_config["hidden_size"])

    @property
    def feature_size(self) -> int:
        """E, the width of what it reads: its own, or the target's where nothing is projected."""
        return self.hidden_size if self.projects else self.target_hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.layer_config["num_hidden_layers"])

    @property
    def projects(self) -> bool:
        """Whether the target's hidden states go through a linear layer of the head before it reads them."""
        return self.kind in ("eagle3", "dflash")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """What EAGLE-3 reads of a target of ``num_layers`` layers where nothing else is said (as EAGLE has it)."""
    return 2, num_layers // 2, num_layers - 3
