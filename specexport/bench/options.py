"""What a benchmark is asked to do."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specexport.bench.methods import AUTO, Method
from specexport_runtime.bundle.opened import check_num_seqs
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.drafting import check_tree_size

BATCHINGS = ("continuous", "static")


@dataclass(frozen=True)
class BenchOptions:
    """All combinations are measured; a value out of its range raises InvalidRequestError."""

    methods: tuple[Method, ...]  # see :func:`specexport.bench.methods.resolve_methods`
    num_speculative_tokens: tuple[int, ...] | None = None  # values of K; None takes each drafter's default
    # most draft tokens of a round, branches included; 0 for chains, ``AUTO`` where K is chosen; None: what each takes
    tree_sizes: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] = (1,)  # cache rows; each value needs another engine
    temperatures: tuple[float, ...] = (0.0,)  # 0 is greedy
    contexts: tuple[int, ...] = ()  # tokens of each prompt, repeated or cut; none leaves prompts as they are
    batchings: tuple[str, ...] = ("continuous",)  # of ``"continuous"`` and ``"static"``
    # most tokens of a text, from the first to the second number; each prompt draws its own
    max_tokens: tuple[int, int] = (64, 64)
    ignore_eos: bool = False  # go on after an end token
    seed: int = 0  # of those lengths and of sampling
    repeats: int = 3  # runs of each combination; figures are medians over them
    warmup: int = 1  # short runs of each drafter after an engine is loaded, not counted

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            check_num_seqs(size, "a batch size")
        for size in self.tree_sizes or ():
            if size != AUTO:
                check_tree_size(size)
        _check_least("the number of repeats", [self.repeats], 1)
        _check_least("the number of warm-up runs", [self.warmup], 0)
        _check_least("the seed", [self.seed], 0)
        _check_least("the number of new tokens", self.max_tokens, 1)
        _check_least("a context", self.contexts, 1)
        _check_least("a temperature", self.temperatures, 0)
        if self.max_tokens[1] < self.max_tokens[0]:
            low, high = self.max_tokens
            raise InvalidRequestError(f"the lengths {low}:{high} run backwards.", f"write {high}:{low}.")

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        named = asdict(self) | {"methods": [method._asdict() for method in self.methods]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}


def _check_least(what: str, values: Sequence[float], least: float) -> None:
    for value in values:
        if not least <= value < float("inf"):  # also refuses NaN
            raise InvalidRequestError(f"{what} is {value:g}.", f"give {least:g} or more.")


def parse_lengths(text: str) -> tuple[int, int]:
    """``"64"`` or ``"16:128"`` as the least and the most; ValueError if it is neither."""
    low, colon, high = text.partition(":")
    return (int(low), int(high)) if colon else (int(low), int(low))
