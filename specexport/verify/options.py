"""What `specexport verify` is asked to do."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

from specexport_runtime.errors import InvalidRequestError


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify with.

    Attributes:
        checkpoints: checkpoint by role (``"target"``, ``"draft"``); a missing role is looked for.
        lora: LoRA adapter, ``"NAME=FOLDER"``: the merged one, or which of those that requests choose is verified;
            without a folder the target is not compared with its checkpoint. None for none.
        require_checkpoint: a checkpoint that is not found is an error instead of a skipped part.
        trust_remote_code: let Python code from the checkpoint run.
        prompts: prompt texts; None takes the built-in ones.
        texts: texts to measure perplexity on; None takes built-in ones, and reads them for approximations only.
        reference: a bundle of the same checkpoints that is no approximation, to compare perplexity with; None takes the
            checkpoints themselves.
        max_prompts: most prompts used.
        max_tokens: tokens generated for each prompt in the greedy part.
        num_samples: draws of each sampling test on recorded logits; a tenth as many generations.
        seed: of the sampled draws.
        num_threads: compute threads; None takes the cores available.
        spin: let idle threads spin; off, because torch and the engines share the cores here.
    """

    checkpoints: Mapping[str, str] = field(default_factory=dict)
    lora: str | None = None
    require_checkpoint: bool = False
    trust_remote_code: bool = False
    prompts: Seq[str] | None = None
    texts: Seq[str] | None = None
    reference: Path | None = None
    max_prompts: int = 8
    max_tokens: int = 64
    num_samples: int = 4000
    seed: int = 0
    num_threads: int | None = None
    spin: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_prompts", 1), ("max_tokens", 2), ("num_samples", 1000)):
            if getattr(self, name) < least:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}.", f"give a number of at least {least}.")
