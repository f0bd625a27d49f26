"""What a draft head computes, whatever file it came from. Imports the standard library."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from specexport_runtime.abi import LayerGeometry

HeadKind = Literal["eagle3", "eagle", "mtp", "medusa", "hydra", "dflash", "assistant"]


class MedusaShape(NamedTuple):
    """What stands side by side over one hidden state (Cai et al. 2024).

    Attributes:
        num_heads: how many heads there are: one for each place of a draft.
        num_blocks: residual blocks of each head.
        bias: whether the blocks' linear layers have one.
        one_lm_head: all heads share an LM head.
        logit_scale: what logits are multiplied by.
    """

    num_heads: int
    num_blocks: int
    bias: bool
    one_lm_head: bool = False
    logit_scale: float = 1.0


class HydraShape(NamedTuple):
    """Heads of which each reads the tokens that those before it guessed (Ankner et al. 2024).

    Attributes:
        num_heads: how many heads there are: one for each place of a draft.
        num_blocks: residual blocks of each head behind the one that joins what it reads.
        one_block: these are one and the same, run again and again, as their writer has them.
        has_prefix: a decoder layer reads the hidden states first (Hydra++).
    """

    num_heads: int
    num_blocks: int
    one_block: bool = False
    has_prefix: bool = False


class AssistantShape(NamedTuple):
    """What a Gemma-4 assistant has in the place of keys and values of its own, and of a plain LM head.

    Attributes:
        target_layers: layers of the target whose caches it reads, in the order in which its graph has them.
        geometries: sizes of each of these caches.
        reads: of each of its own layers: which of these caches it reads, by its place among them.
        num_centroids: groups of tokens that its LM head chooses from; 0 for an LM head over all tokens.
        chosen_centroids: how many it chooses.
    """

    target_layers: tuple[int, ...]
    geometries: tuple[LayerGeometry, ...]
    reads: tuple[int, ...]
    num_centroids: int = 0
    chosen_centroids: int = 0


@dataclass(frozen=True)
class HeadConfig:
    """A draft head, in terms of the arithmetic: which hidden states it reads, and where it has norms.

    Attributes:
        kind: ``"eagle3"`` joins a token's embedding and a feature at the input of its first attention (Li et al. 2025),
            ``"eagle"`` in a linear layer before its first decoder layer (Li et al. 2024), ``"mtp"`` both normed in a
            linear layer before a decoder layer of the target's own kind (DeepSeek-AI 2024). ``"medusa"`` has none
            (Cai et al. 2024), ``"hydra"`` none, or one over features alone (Ankner et al. 2024). ``"dflash"`` reads
            features as context of a block of tokens (Chen et al. 2026). ``"assistant"`` reads the target's own keys and
            values (Gemma 4).
        layer_config: transformers' configuration of its decoder layers, with ``model_type``.
        taps: hidden states of the target that it reads: ``i`` is what decoder layer ``i`` reads, and N (how many there
            are) what the last one gives; ``abi.AFTER_NORM`` is that behind the last norm.
        target_hidden_size: their width.
        vocab_size: V of the target.
        draft_vocab_size: rows of its LM head.
        norm_before_residual: the first layer's residual is the normed feature, not the feature.
        norm_before_fc: a norm over all hidden states together, before they are projected.
        fc_norm: a norm over each of them instead.
        norm_output: what it hands on is normed, as what its LM head reads is.
        feature_first: where it joins embedding and feature, the feature comes first.
        mask_token_id: it drafts all tokens in one step, and this one stands for those that are not known (P-EAGLE and
            DFlash).
        block_size: most tokens of a DFlash head's block, the newest and those to guess.
        causal_layers: which layers of a DFlash head hide the rest of the block from each of its tokens.
        source_format: which writer's names the file had, for reports.
        medusa: of ``"medusa"``: its heads. None for others.
        hydra: of ``"hydra"``, likewise.
        assistant: of ``"assistant"``: what it reads of the target's caches. None for others.
    """

    kind: HeadKind
    layer_config: Mapping[str, Any] = field(hash=False)
    taps: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    feature_first: bool = False
    mask_token_id: int | None = None
    block_size: int | None = None
    causal_layers: tuple[bool, ...] = ()
    source_format: str = ""
    medusa: MedusaShape | None = None
    hydra: HydraShape | None = None
    assistant: AssistantShape | None = None

    @property
    def num_draft_heads(self) -> int:
        """How many heads there are, each for a place of a draft; 0 for those that are one head."""
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
