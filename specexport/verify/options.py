"""What `specexport verify` is asked to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specexport_runtime.errors import InvalidRequestError


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify with; a number that is too small raises InvalidRequestError."""

    # by role (``"target"``, ``"draft"``); a missing role is looked for
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    # ``"NAME=FOLDER"``: the merged adapter, or one that requests choose; without a folder the target is not compared
    # with its checkpoint. None for none.
    lora: str | None = None
    require_checkpoint: bool = False  # a checkpoint that is not found is an error instead of a skipped part
    trust_remote_code: bool = False  # let Python code from the checkpoint run
    prompts: Sequence[str] | None = None  # None takes the built-in ones
    # to measure perplexity on; None takes built-in ones, and reads them for approximations only
    texts: Sequence[str] | None = None
    # float bundle of the same checkpoints to compare perplexity with; None takes the checkpoints
    reference: Path | None = None
    max_prompts: int = 8
    max_tokens: int = 64  # generated for each prompt in the greedy part
    num_samples: int = 4000  # draws of each sampling test on recorded logits; a tenth as many generations
    seed: int = 0  # of the sampled draws
    num_threads: int | None = None  # None takes the cores available
    spin: bool = False  # let idle threads spin; off, because torch and the engines share the cores here

    def __post_init__(self) -> None:
        for name, least in (("max_prompts", 1), ("max_tokens", 2), ("num_samples", 1000)):
            if getattr(self, name) < least:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}.", f"give a number of at least {least}.")
