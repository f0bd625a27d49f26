"""Every drafter on fakes that show a wrong draft, a stale entry and a feature of another token; what each may do."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from specexport_runtime.bundle.arrays import MaskInput
from specexport_runtime.drafters.head import HeadDrafter, HydraDrafter
from specexport_runtime.drafters.last_feature import AssistantDrafter, MedusaDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.drafters.suffix import SuffixDrafter
from specexport_runtime.drafters.suffix_store import SuffixStore
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.packing.kv import BorrowedKv
from specexport_runtime.requests.layer_choice import LayerChoice
from specexport_runtime.requests.records import DraftStage
from tests.support.fakes.heads_on_fakes import decoder_with
from tests.support.fakes.loop import CAPACITY, VOCAB, make_decoder, make_target

LAYERS = 6
HEADS = 3
HYDRA_HEADS = {"num_draft_heads": HEADS, "reads_draft": True}
MASK = 9
NOISES = {"same": 0.0, "good": 0.4, "random": 30.0}
Made = tuple[Any, FakeExecutor, Any]
"""A decoder, its target's executor and the drafter."""


def head_decoder(lookahead, noise=0.0, rows=4, *, lm_head=None, kind=HeadDrafter, **options):
    return decoder_with(
        lambda runner: kind(runner, vocab_size=VOCAB, cut_head=lm_head), lookahead, noise, rows, **options
    )


def block_decoder(lookahead, noise=0.0, rows=4, *, block_size=8, kind=HeadDrafter, **options):
    """A head that fills blocks (DFlash): its guesses need the whole context, true and in order."""

    def make(runner):
        mask = MaskInput(MASK, np.zeros(runner.executor.feature_size, np.float32), block_size)
        return kind(runner, vocab_size=VOCAB, mask=mask)

    return decoder_with(make, lookahead, noise, rows, fake={"fills_blocks": True}, **options)


def hydra_decoder(lookahead=3, noise=0.0, rows=4, **options):
    return decoder_with(
        lambda runner: HydraDrafter(runner, vocab_size=VOCAB), lookahead, noise, rows, fake=HYDRA_HEADS, **options
    )


def medusa_decoder(lookahead, noise=0.0, rows=4, *, lm_head=None, **options):
    def make(runner):
        return MedusaDrafter(runner, vocab_size=VOCAB, cut_head=lm_head)

    return decoder_with(make, lookahead, noise, rows, fake={"num_draft_heads": HEADS}, **options)


def assistant_decoder(lookahead, noise=0.0, rows=4, *, kind=AssistantDrafter, stages=("head",), **options):
    """Its logits are computed from the target's cache: a stale entry shows."""
    target = make_target(rows, gives_features=True)
    decoder = make_decoder(target, None, 0, **options)
    head = FakeExecutor(VOCAB, rows, CAPACITY, noise=noise, reads_features=True, lender=target)
    drafter = kind(ModelRunner(head, kv=BorrowedKv(decoder.target.kv)), vocab_size=VOCAB)
    decoder.drafter.drafters["head"] = drafter
    decoder.plan = tuple(DraftStage(name, lookahead) for name in stages)
    return decoder, target, drafter


def gated(noise=0.4, rows=4, **options):
    return make_target(rows, num_gates=2 * LAYERS, gate_noise=noise, **options)


def self_decoder(target, lookahead, *, lookup=False, **options):
    decoder = make_decoder(target, None, 0, **options)
    decoder.drafter.drafters["self"] = SelfDrafter(decoder.target, vocab_size=VOCAB)
    decoder.plan = (*([DraftStage("lookup", lookahead)] if lookup else []), DraftStage("self", lookahead))
    return decoder


def chosen(bits: int) -> LayerChoice:
    """The choice whose mask has the binary digits of ``bits``."""
    mask = [bool(bits >> i & 1) for i in range(2 * LAYERS)]
    return LayerChoice(tuple(mask[::2]), tuple(mask[1::2]))


def of_self(lookahead, noise=0.0, rows=4, *, stages=("self",), **options):
    target = gated(noise, rows)
    decoder = self_decoder(target, lookahead, lookup="lookup" in stages, **options)
    return decoder, target, decoder.drafter.drafters["self"]


def of_model(lookahead, noise=0.0, rows=4, *, stages=("draft-model",), **options):
    target = make_target(rows)
    decoder = make_decoder(target, FakeExecutor(VOCAB, rows, CAPACITY, noise=noise), lookahead, **options)
    decoder.plan = tuple(DraftStage(name, lookahead) for name in stages)
    return decoder, target, decoder.draft_model


def of_copies(name: str, context: int):
    """A drafter without an engine; a target with a short memory repeats itself, so that copies are right at times."""

    def make(lookahead, noise=0.0, rows=4, *, stages=(), **options):
        target = make_target(rows, context=context)
        decoder = make_decoder(target, None, 0, **options)
        decoder.drafter.drafters["suffix"] = SuffixDrafter(SuffixStore(10_000))
        decoder.plan = tuple(DraftStage(stage, lookahead) for stage in stages or (name,))
        return decoder, target, decoder.drafter.drafters[name]

    return make


def hydra_steps(target: FakeExecutor, drafter: Any, lookahead: int) -> None:
    calls = drafter.runner.executor.calls
    assert max(shape.num_tokens for shape in calls if shape.num_seqs == 1) >= min(lookahead, HEADS)
    assert all(shape.num_logit_rows <= shape.num_seqs for shape in calls), "one head a row, of all that it reads"


def medusa_steps(target: FakeExecutor, drafter: Any, lookahead: int) -> None:
    shapes = drafter.runner.executor.calls
    assert len(shapes) <= len(target.calls), "a draft is one step"
    assert all(shape.num_tokens == shape.num_logit_rows for shape in shapes), "nothing is read but what drafts"


def assistant_steps(target: FakeExecutor, drafter: Any, lookahead: int) -> None:
    shapes = drafter.runner.executor.calls
    assert all(shape.num_tokens == shape.num_logit_rows and shape.max_new_tokens == 1 for shape in shapes)


def block_steps(target: FakeExecutor, drafter: Any, lookahead: int) -> None:
    assert drafter.traits.max_lookahead == 7


def self_steps(target: FakeExecutor, drafter: Any, lookahead: int) -> None:
    assert target.masks[-1] is None, "everything is on again"


def no_rule(target: FakeExecutor, drafter: Any, lookahead: int) -> None: ...


def cut_head(executor: FakeExecutor, ids: np.ndarray) -> None:
    after = executor.logits_after
    executor.logits_after = lambda tokens, mask=None: after(tokens, mask)[ids]


def cut_medusa(executor: FakeExecutor, ids: np.ndarray) -> None:
    guess = executor._run_parallel_heads
    executor._run_parallel_heads = lambda *given: {row: logits[ids] for row, logits in guess(*given).items()}


class Kind(NamedTuple):
    make: Callable[..., Made]
    """By lookahead, noise and rows; of names of ``stages`` and of options of a decoder."""
    stage: str
    lookaheads: Sequence[int] = (1, 3, 8)
    most: int = 8
    """Tokens of a draft."""
    good: float | None = 1 / 3
    """Least acceptance with the noise of that name; None for a drafter whose guesses know no noise."""
    steps: Callable[[FakeExecutor, Any, int], None] = no_rule
    held: str = ""
    """Where it keeps what it knows of a sequence."""
    sizes: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Strategies of options that ``make`` has beside the others'."""
    holds: bool = False
    """Features wait for it: at most ``MAX_HELD``."""
    cut: Callable[[FakeExecutor, np.ndarray], None] | None = None
    """Lets its executor's logits be of some ids only; None if its LM head is never cut here."""


KINDS: dict[str, Kind] = {
    "draft model": Kind(of_model, "draft-model"),
    "head": Kind(head_decoder, "head", held="_held", holds=True, cut=cut_head),
    "block head": Kind(
        block_decoder, "head", (1, 5, 8), 7, good=0.2, steps=block_steps, held="_held", holds=True,
        sizes={"block_size": st.integers(2, 9)},
    ),
    "hydra": Kind(hydra_decoder, "head", (1, 3, 5), HEADS, good=1 / 4, steps=hydra_steps, held="_held", holds=True),
    "medusa": Kind(
        medusa_decoder, "head", (1, 3, 5), HEADS, good=1 / 4, steps=medusa_steps, held="_last", cut=cut_medusa
    ),
    "assistant": Kind(assistant_decoder, "head", good=1 / 6, steps=assistant_steps, held="_last"),
    "self": Kind(of_self, "self", steps=self_steps, held="_sums"),
    "lookup": Kind(of_copies("lookup", 1), "lookup", good=None, held="_indexes"),
    "suffix": Kind(of_copies("suffix", 1), "suffix", good=None),
}  # fmt: skip
PLANS = {
    "plain": (),
    "draft-model": (DraftStage("draft-model", 4),),
    "lookup": (DraftStage("lookup", 7),),
    "chained": (DraftStage("lookup", 7), DraftStage("draft-model", 4)),
}
