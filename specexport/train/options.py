"""What ``specexport train-draft`` was asked for. Imports no torch, so that a bad flag is reported at once."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from specexport_runtime.errors import InvalidRequestError, UnsupportedModelError

HEAD_KINDS = ("eagle3", "mtp")
KINDS = (*HEAD_KINDS, "pruned")
DRAFT_STEPS = 3
_PLACES = ("target", "output", "prompts", "work", "bundle", "max_states_gb", "hours")
LAYER_SHARE, FEWEST_LAYERS = 4, 2
"""A pruned draft keeps one layer of so many, and at least so many, unless told otherwise."""
HEAD_LAYERS = 4
"""Fewest layers of a target that a head reads between."""

HINT = "train a head instead: --kind eagle3 or mtp."


@dataclass(frozen=True)
class TrainOptions:
    """How a draft is to be trained; InvalidRequestError if a value is out of its range."""

    target: str  # a checkpoint
    output: Path  # a folder, of the draft
    prompts: tuple[Path, ...]
    # ``"eagle3"``: a head that reads three hidden states of the target; ``"mtp"``: one that reads its last;
    # ``"pruned"``: a draft model of some of the target's own layers
    kind: Literal["eagle3", "mtp", "pruned"] = "eagle3"
    work: Path | None = None  # folder of texts, hidden states and the training's state, to be used again
    bundle: Path | None = None  # of the target, writes the texts; None builds one
    max_tokens: int = 192  # that are written for each prompt
    temperature: float = 0.7  # of every second group of texts; the others are greedy
    # tokens of a head's LM head; None: all of a small vocabulary, 16,384 of a large one
    draft_vocab_size: int | None = None
    keep_layers: int | None = None  # of a pruned draft; None: a quarter of the target's, and at least two
    steps: int | None = None  # draft steps of a head's training-time test; None: three
    batches: int | None = None  # to learn from; None goes over all texts ``epochs`` times
    epochs: int = 4
    batch_tokens: int = 2048  # most tokens of a batch
    max_states_gb: float = 8.0  # most disk for hidden states, GB
    rate: float = 0.003  # learning rate of the matrices
    seed: int = 0  # of everything random
    threads: int | None = None  # None: the cores there are
    hours: float | None = None  # of one run, which then saves and ends; None: until the draft is there

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequestError(f"kind is {self.kind!r}.", f"use one of: {', '.join(KINDS)}.")
        if not self.prompts:
            raise InvalidRequestError(
                "there are no prompts to train on.", 'give `--prompts FILE`, JSON lines like {"prompt": "…"}.'
            )
        for name, low, high in (
            ("max_tokens", 8, 4096),
            ("steps", 1, 8),
            ("epochs", 1, 1000),
            ("batches", 1, 1 << 30),
            ("batch_tokens", 64, 1 << 20),
            ("draft_vocab_size", 16, 1 << 24),
            ("keep_layers", 1, 1 << 10),
            ("seed", 0, 1 << 30),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequestError(f"{name} is {value}.", f"give {low} to {high:,}.")
        _check_kind(self)
        for name, most, fix in (
            ("temperature", 2.0, "give a number in (0, 2]."),
            ("max_states_gb", math.inf, "give the disk that may be used, in GB."),
            ("hours", math.inf, "give the time that the run may take."),
            ("rate", 1.0, "give a number in (0, 1]."),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise InvalidRequestError(f"{name} is {value:g}.", fix)

    @property
    def head_kind(self) -> Literal["eagle3", "mtp"]:
        """The kind, of a head."""
        return cast('Literal["eagle3", "mtp"]', self.kind)

    @property
    def draft_steps(self) -> int:
        """Draft steps of the training-time test."""
        return self.steps or DRAFT_STEPS

    def layers_kept(self, num_layers: int) -> int:
        """How many layers of a target a pruned draft keeps; InvalidRequestError if that is not fewer than it has."""
        kept = self.keep_layers or max(FEWEST_LAYERS, round(num_layers / LAYER_SHARE))
        if kept >= num_layers:
            raise InvalidRequestError(
                f"a pruned draft of {kept} layers cannot be made of a target that has {num_layers}: none would go.",
                f"give --keep-layers 1 to {num_layers - 1}." if num_layers > 1 else "draft with `lookup`.",
            )
        return kept

    def check_target(self, num_layers: int, *, keeps_state: bool) -> None:
        """Refuse a target of too few layers, and one whose layers keep a state and so cannot be taken out."""
        if self.kind == "pruned":
            self.layers_kept(num_layers)
            if keeps_state:
                raise UnsupportedModelError("no pruned draft can be made of a target whose layers keep a state.", HINT)
        elif num_layers < HEAD_LAYERS:
            raise UnsupportedModelError(
                f"the target has {num_layers} layers: there is little to read between them.",
                "draft with a model, or with `lookup`.",
            )

    @property
    def work_folder(self) -> Path:
        """Where work in progress lies."""
        return self.work or self.output.with_name(f"{self.output.name}.work")

    @property
    def states_folder(self) -> Path:
        """Where the hidden states lie that this kind of draft learns from."""
        return self.work_folder / f"{self.kind}-states"

    def text_settings(self) -> dict[str, Any]:
        """What decides the texts."""
        return {name: asdict(self)[name] for name in ("max_tokens", "temperature", "seed")}

    def flags(self) -> str:
        """What decides the draft, beside the target, the prompts and the bundle, as the command's flags."""
        chosen = {name: value for name, value in asdict(self).items() if name not in _PLACES and value is not None}
        if self.batches is not None:
            del chosen["epochs"]
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())


def _check_kind(options: TrainOptions) -> None:
    """Refuse options that the kind has no use for."""
    if options.kind != "pruned":
        if options.keep_layers is not None:
            raise InvalidRequestError(
                f"keep_layers is {options.keep_layers}, and {options.kind} keeps no layers of the target.",
                "leave it out, or train --kind pruned.",
            )
    elif options.draft_vocab_size is not None:
        raise InvalidRequestError(
            f"draft_vocab_size is {options.draft_vocab_size}, and a pruned draft keeps the target's LM head.",
            "leave it out here, and give `specexport build` its own --draft-vocab-size: it cuts any draft model.",
        )
    elif options.steps is not None:
        raise InvalidRequestError(
            f"steps is {options.steps}, and a pruned draft learns at every place of a text at once.",
            "leave it out: it is for heads.",
        )


def refuse_pruning(model: Any, reason: str) -> UnsupportedModelError:
    """The error for such a target (returned, not raised)."""
    name = f"{getattr(model.config, 'model_type', '?')} ({type(model).__name__})"
    return UnsupportedModelError(f"no pruned draft can be made of {name}: {reason}.", HINT)
