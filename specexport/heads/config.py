"""What a draft head computes, whatever file it came from. Imports the standard library."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class TargetFacts(NamedTuple):
    """What a head is read for."""

    num_layers: int  # decoder layers
    hidden_size: int
    vocab_size: int  # V
    # transformers' configuration of the language model, for heads with parts that are made like it; None for none
    text: Any = None


@dataclass(frozen=True)
class HeadConfig:
    """A draft head, in terms of the arithmetic: which hidden states it reads, and where it has norms."""

    kind: str  # ``HeadKind.name``
    # transformers' configuration of its decoder layers, with ``model_type``
    layer_config: Mapping[str, Any] = field(hash=False)
    # hidden states of the target that it reads: ``i`` is what decoder layer ``i`` reads, the number of layers what the
    # last one gives; ``abi.AFTER_NORM`` is the state after the last norm
    taps: tuple[int, ...]
    target_hidden_size: int  # width of these hidden states
    vocab_size: int  # V of the target
    draft_vocab_size: int  # N, rows of its LM head
    projects: bool = False  # the target's hidden states go through a linear layer of the head before it reads them
    norm_before_residual: bool = False  # the first layer's residual is the normed feature, not the feature
    norm_before_fc: bool = False  # a norm over all hidden states together, before they are projected
    fc_norm: bool = False  # a norm over each of them instead
    norm_output: bool = False  # what it hands on is normed, as what its LM head reads is
    feature_first: bool = False  # where it joins embedding and feature, the feature comes first
    # it drafts all tokens in one step: this one stands for each unknown token; None for others
    mask_token_id: int | None = None
    block_size: int | None = None  # most tokens of a block that it fills, the newest and the ones to guess
    from_anchor: bool = False  # the block's first place, that of the newest token, guesses too
    num_draft_heads: int = 0  # how many heads there are, each for a place of a draft; 0 for a kind that is one head
    reads_draft: bool = False  # each of these reads what those before it guessed; layers are for the first one alone
    num_modules: int = 0  # how many MTP modules, each for a token of a draft; 0 for a head that is run again and again
    # layers of the target whose caches it reads, in the order in which its graph has them
    target_layers: tuple[int, ...] = ()
    source_format: str = ""  # which writer's names the file had, for reports
    shape: Any = None  # what its kind alone has; hashable

    @property
    def hidden_size(self) -> int:
        """Width of its hidden state."""
        return int(self.layer_config["hidden_size"])

    @property
    def feature_size(self) -> int:
        """E, the width of what it reads: its own, or the target's where nothing is projected."""
        return self.hidden_size if self.projects else self.target_hidden_size
