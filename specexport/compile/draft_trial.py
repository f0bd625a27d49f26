"""Which form of a draft promises most: 4 bits, 8 bits or the weights as they are, and how large an LM head.

The target writes some texts, and a draft of each form reads them (``draft_guesses``). What steps cost follows from
sizes, for one kind of machine, and never from a clock: the same build makes the same bundle everywhere.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specexport.compile.built import BuiltModel
from specexport.compile.draft_cuts import HeadCut
from specexport.compile.draft_guesses import count_right, held_out, write_texts
from specexport.compile.token_map import Shared
from specexport.progress import StageClock
from specexport.recipe import KEEP
from specexport_runtime.bundle.entry import FormTrial, ModelEntry, TriedForm
from specexport_runtime.bundle.quant_kinds import rounding_kinds
from specexport_runtime.costs.curves import StepCost
from specexport_runtime.costs.prior import DRAFTER_OF, prior_costs
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Int32Array

LEAST_BYTES = 32 << 20
"""Of a draft's checkpoint: a step of a smaller one is mostly what its layers cost whatever they hold."""
HEAD_SIZES = (65536, 32768, 16384, 8192)
"""LM heads that are tried, where the vocabulary has twice as many tokens."""
MARGIN = 0.03
"""A form must promise so much more than a simpler one: a few hundred tokens tell no less."""
_SMALLER = 0.8
"""A form is tried if its weights take so much of the next simpler one's: it guesses no better."""
_KERNELS = "avx512vnni"
"""What steps are priced for, whatever this machine has."""


class DraftForm(NamedTuple):
    """What becomes of a draft."""

    quantize: str | None  # of its weights; None for float ones
    head_ids: Int32Array | None  # token ids that its LM head keeps, int32 [N], ascending; None for all


class HeadSizes(NamedTuple):
    """What the cost of a draft's step can be told from, whatever its LM head keeps."""

    step_parameters: int  # that a step multiplies with each token, with the whole head
    num_heads: int | None  # query heads of a layer; None if the checkpoint does not say
    rows: int  # V, tokens of the whole head
    width: int  # inputs of the head
    tied: bool  # the embedding is the same weight
    kept_bytes: float | None  # of a weight of the head in a quantized checkpoint; None where it is float

    def step(self, head_ids: Int32Array | None) -> int:
        """Parameters that a step multiplies with each token, with an LM head of these ids."""
        return self.step_parameters - (0 if head_ids is None else (self.rows - len(head_ids)) * self.width)

    def only(self, head_ids: Int32Array) -> "HeadSizes":
        """Those of a model whose LM head has rows of these ids, beside its embedding, and no others."""
        return self._replace(step_parameters=self.step(head_ids), rows=len(head_ids), tied=False)

    def cut(self, entry: ModelEntry, size: int) -> ModelEntry:
        """What the entry of a form with the whole head would cost with ``size`` tokens: a tied table stays beside."""
        stored, before = entry.engine.packed_bytes or (self.step_parameters, self.step_parameters)
        each = self.kept_bytes if entry.quantize == KEEP and self.kept_bytes is not None else 4 * stored / before
        more = (size if self.tied else size - self.rows) * self.width
        gone = (self.rows - size) * self.width
        sizes = (int(stored + more * each), before + 4 * more)
        parameters = entry.parameters._replace(step=self.step_parameters - gone)
        return replace(entry, parameters=parameters, engine=replace(entry.engine, packed_bytes=sizes))


class DraftTrial(NamedTuple):
    """What is to be found out of a draft."""

    quantizes: bool  # try other weights than the simplest
    cuts: bool  # try smaller LM heads
    texts: tuple[str, ...]  # that tokens are counted on
    own_texts: bool  # they are a person's: if they are enough, the target goes on with some of them
    lookahead: int  # largest K
    target: BuiltModel | None = None  # what writes; None as long as it is not built
    folder: Path = Path()  # of its engine
    shared: Shared | None = None  # with a draft of another vocabulary; None where it has the target's

    def others(self, kept_bytes: float | None, backend: str) -> tuple[str, ...]:
        """Quantizations to try beside the simplest form, which takes so many bytes a weight; None for float weights."""
        found, last = [], kept_bytes or 2.0
        kinds = [kind for kind in rounding_kinds() if backend in kind.backends]
        for kind in sorted(kinds, key=lambda each: -each.stored_bytes):
            if self.quantizes and kind.stored_bytes <= _SMALLER * last:
                found.append(kind.name)
                last = kind.stored_bytes
        return tuple(found)


class Chosen(NamedTuple):
    """A form, and its entry with what was tried."""

    form: DraftForm
    entry: ModelEntry


class FormChoice(NamedTuple):
    """What a form is chosen from."""

    trial: DraftTrial  # what is to be found out
    others: Sequence[str]  # quantizations to try
    sizes: HeadSizes
    rank: Callable[[HeadCut], Int32Array]  # all token ids, in the order in which an LM head keeps them

    def settle(self, simplest: Chosen, folder: Path, make: Callable[..., ModelEntry]) -> Chosen:
        """Find the form that promises most, and leave its files in ``folder``, where those of the simplest are.

        ``make`` builds a form in a folder; ``last=True`` uses the traced graph up. What goes wrong fails no build: the
        simplest form stays, and the entry says why.
        """
        try:
            chosen, place, tried = self._choose(simplest, folder, make)
        except SpecexportError as error:
            chosen, place, tried = simplest, folder, FormTrial(0, (), error.message)
        if place != folder:
            for file in [file for file in folder.iterdir() if file.is_file()]:
                file.unlink()
            for file in place.iterdir():
                file.rename(folder / file.name)
        for left in [left for left in folder.iterdir() if left.is_dir()]:
            shutil.rmtree(left)
        return Chosen(chosen.form, replace(chosen.entry, trial=tried))

    def _choose(
        self, simplest: Chosen, folder: Path, make: Callable[..., ModelEntry]
    ) -> tuple[Chosen, Path, FormTrial]:
        """The chosen form, where it is, and what was tried: heads first, then other weights with the best of them."""
        trial, sizes = self.trial, self.sizes
        target, (form, entry), tried = trial.target, simplest, list[TriedForm]()
        assert target is not None  # noqa: S101 - it is built first
        counted, prompts = held_out(trial.texts) if trial.own_texts else (trial.texts, ())
        tokens = None if trial.shared is None else trial.shared.tokens
        num_ids = sizes.rows if tokens is None else target.entry.vocab_size
        texts = write_texts(trial.folder, target, prompts, num_ids=num_ids)
        count = sum(len(text.written) for text in texts)

        def add(found: ModelEntry, size: int, right: int) -> None:
            costs = prior_costs({"target": target.entry, "draft": found}, kernels=_KERNELS)
            step, accepted = costs.drafters[DRAFTER_OF["draft"]], right / count
            price = step.seconds(1, 1) / costs.target.seconds(1, 1)
            speed = promised_speed(accepted, costs.target, step, trial.lookahead)
            tried.append(TriedForm(found.quantize, size, accepted, price, speed))

        def heads_of(among: tuple[str, ...], wanted: Sequence[int]) -> dict[int, Int32Array]:
            ranked = self.rank(HeadCut(min(wanted), among, target.eos_token_ids)) if wanted else ()
            return {size: np.sort(ranked[:size]) for size in wanted}

        heads = heads_of(counted, [size for size in HEAD_SIZES if trial.cuts and 2 * size <= sizes.rows])
        rights = count_right(folder, entry, texts, form.head_ids, [None, *heads.values()], tokens)
        add(entry, entry.lm_head_rows, rights[0])
        for size, right in zip(heads, rights[1:], strict=True):
            add(sizes.cut(entry, size), size, right)
        best = pick(tried)
        ids = heads.get(best.lm_head_rows, form.head_ids)
        if best.lm_head_rows in heads and counted != trial.texts:
            ids = heads_of(trial.texts, [best.lm_head_rows])[best.lm_head_rows]
        built = {tried[0][:2]: (simplest, folder)}

        def build(quantize: str | None, *, last: bool = False) -> ModelEntry:
            place, other = folder / (quantize or "float"), DraftForm(quantize, ids)
            made = make(other, place, StageClock(None, 0), last=last)
            built[quantize, best.lm_head_rows] = Chosen(other, made), place
            return made

        obstacle = None
        for name in self.others:
            try:
                made = build(name)
                (right,) = count_right(folder / name, made, texts, ids, [heads.get(best.lm_head_rows)], tokens)
            except SpecexportError as error:  # a model of which this form cannot be had
                obstacle = error.message
            else:
                add(made, best.lm_head_rows, right)
        winner = pick(tried)
        if winner[:2] not in built:
            build(winner.quantize, last=True)
        return *built[winner[:2]], FormTrial(count, tuple(tried), obstacle)


def pick(tried: Sequence[TriedForm]) -> TriedForm:
    """The form to build: the simplest first, and each other one only if it promises clearly more."""
    best = tried[0]
    for form in tried[1:]:
        if form.speed > (1 + MARGIN) * best.speed:
            best = form
    return best


def promised_speed(accepted: float, target: StepCost, draft: StepCost, lookahead: int) -> float:
    """Tokens a second over plain decoding's at the best K of ``lookahead``, if ``accepted`` is the chance."""
    plain, step, best, expected = target.seconds(1, 1), draft.seconds(1, 1), 1.0, 1.0
    for k in range(1, lookahead + 1):
        expected += accepted**k
        best = max(best, expected * plain / (target.seconds(k + 1, 1) + k * step))
    return best


def describe_trial(entry: ModelEntry) -> list[str]:
    """How a draft got its form, in lines: the choice, and what else was tried; none where nothing was asked."""
    trial = entry.trial
    if trial is None:
        return []
    if not trial.forms:
        return [f"no forms were tried: {trial.obstacle}"]
    own = entry.quantize, entry.lm_head_rows
    lines = {}
    for name, size, accepted, step, speed in trial.forms:
        found = f"{accepted:.1%} accepted, a step takes {step:.2f} of the target's, promises {speed:.2f}x"
        lines[name, size] = f"{name or 'float'} with {size} tokens: {found}"
    chosen = f"form chosen on {trial.num_tokens} tokens of the target: {lines[own]}"
    rest = [f"  tried: {words}" for form, words in lines.items() if form != own]
    return [chosen, *rest, *([] if trial.obstacle is None else [f"  not tried: {trial.obstacle}"])]
