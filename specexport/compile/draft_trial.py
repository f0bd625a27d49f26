"""Which form of a draft promises most: 4 bits, 8 bits or the weights as they are, and how large an LM head.

The target writes some texts, and a draft of each form reads them (``draft_guesses``). What steps cost follows from
sizes, for one kind of machine, and never from a clock: the same build makes the same bundle everywhere. The texts are
few at first, and all that are to be had only where these leave a doubt (``draft_promise``).
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specexport.compile.built import BuiltModel
from specexport.compile.draft_cuts import HeadCut, hash_texts
from specexport.compile.draft_guesses import Text, measure_guesses, split_held_out, write_texts
from specexport.compile.draft_promise import MARGIN, PricedForm, is_sure, pick
from specexport.compile.token_map import SharedTokens
from specexport.progress import StageClock
from specexport.recipe import KEEP
from specexport_runtime.bundle.entry import FormTrial, ModelEntry, TriedForm
from specexport_runtime.bundle.quant_kinds import list_rounding_kinds
from specexport_runtime.bundle.token_map import TokenMap
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import BoolArray, Int32Array

MIN_BYTES = 32 << 20
"""Of a draft's checkpoint: a step of a smaller one is mostly what its layers cost whatever they hold."""
HEAD_SIZES = (65536, 32768, 16384, 8192)
"""LM heads that are tried, where the vocabulary has twice as many tokens."""
_SMALLER = 0.8
"""A form is tried if its weights take so much of the next simpler one's: it guesses no better."""


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
        stored, before = entry.engine.packed_bytes or (4 * self.step_parameters,) * 2
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
    shared: SharedTokens | None = None  # with a draft of another vocabulary; None where it has the target's

    def key(self) -> list[Any]:
        """What of it decides an engine, beside its target."""
        return [self.quantizes, self.cuts, hash_texts(self.texts), self.own_texts, self.lookahead]

    def others(self, kept_bytes: float | None, backend: str) -> tuple[str, ...]:
        """Quantizations to try beside the simplest form, which takes so many bytes a weight; None for float weights."""
        found, last = [], kept_bytes or 2.0
        kinds = [kind for kind in list_rounding_kinds() if backend in kind.backends]
        for kind in sorted(kinds, key=lambda each: -each.stored_bytes):
            if self.quantizes and kind.stored_bytes <= _SMALLER * last:
                found.append(kind.name)
                last = kind.stored_bytes
        return tuple(found)


class ChosenForm(NamedTuple):
    """A form, and its entry with what was tried."""

    form: DraftForm
    entry: ModelEntry


class FormChoice(NamedTuple):
    """What a form is chosen from."""

    trial: DraftTrial  # what is to be found out
    others: Sequence[str]  # quantizations to try
    sizes: HeadSizes
    rank: Callable[[HeadCut], Int32Array]  # all token ids, in the order in which an LM head keeps them

    def settle(self, simplest: ChosenForm, folder: Path, make: Callable[..., ModelEntry]) -> ChosenForm:
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
        return ChosenForm(chosen.form, replace(chosen.entry, trial=tried))

    def _choose(
        self, simplest: ChosenForm, folder: Path, make: Callable[..., ModelEntry]
    ) -> tuple[ChosenForm, Path, FormTrial]:
        """The chosen form, where it is, and what was tried: heads first, then other weights with the best of them."""
        trial, sizes = self.trial, self.sizes
        target, (form, entry), obstacle = trial.target, simplest, None
        assert target is not None  # noqa: S101 - it is built first
        counted, prompts = split_held_out(trial.texts) if trial.own_texts else (trial.texts, ())
        tokens = None if trial.shared is None else trial.shared.tokens
        num_ids = sizes.rows if tokens is None else target.entry.vocab_size

        def rank_heads(among: tuple[str, ...], wanted: Sequence[int]) -> dict[int, Int32Array]:
            ranked = self.rank(HeadCut(min(wanted), among, target.eos_token_ids)) if wanted else ()
            return {size: np.sort(ranked[:size]) for size in wanted}

        def price(found: ModelEntry, size: int) -> PricedForm:
            return PricedForm(found, size, target.entry, trial.lookahead)

        heads = rank_heads(counted, [size for size in HEAD_SIZES if trial.cuts and 2 * size <= sizes.rows])
        forms = [price(entry, entry.lm_head_rows), *(price(sizes.cut(entry, size), size) for size in heads)]
        readings = _GuessResults(partial(write_texts, trial.folder, target, prompts, num_ids=num_ids), tokens)
        readings.add(forms, _GuessingEngine(folder, simplest, (None, *heads.values())))
        best = pick(readings.settle())
        built = {(entry.quantize, entry.lm_head_rows): (simplest, folder)}

        def build(quantize: str | None, size: int, *, last: bool = False) -> ChosenForm:
            place, ids = folder / (quantize or "float"), heads.get(size, form.head_ids)
            if size in heads and counted != trial.texts:
                ids = rank_heads(trial.texts, [size])[size]
            other = DraftForm(quantize, ids)
            chosen = ChosenForm(other, make(other, place, StageClock(None, 0), last=last))
            built[quantize, size] = chosen, place
            return chosen

        size = best.lm_head_rows
        base = next(each for each in forms if each.size == size)
        for name in self.others:
            if base.rounded(name).speed(best.accepted) <= (1 + MARGIN) * pick(readings.tried()).speed:
                obstacle = f"{name}: steps would be so little cheaper that it cannot promise more."
                continue
            try:
                made = build(name, size)
                readings.add([price(made.entry, size)], _GuessingEngine(folder / name, made, (heads.get(size),)))
            except SpecexportError as error:  # a model of which this form cannot be had
                obstacle = error.message
        tried = readings.settle()
        winner = pick(tried)
        if winner[:2] not in built:
            build(*winner[:2], last=True)
        return *built[winner[:2]], FormTrial(readings.num_tokens, tuple(tried), obstacle)


class _GuessingEngine(NamedTuple):
    """An engine that guesses."""

    folder: Path
    built: ChosenForm
    heads: tuple[Int32Array | None, ...]  # ids of its LM head in each form that it stands for; None for all it has

    def guess(self, texts: Sequence[Text], tokens: TokenMap | None) -> BoolArray:
        return measure_guesses(self.folder, self.built.entry, texts, self.built.form.head_ids, self.heads, tokens)


class _GuessResults:
    """What forms guessed of the target's texts: of few, as long as these leave no doubt."""

    def __init__(self, write: Callable[..., list[Text]], tokens: TokenMap | None) -> None:
        self._write, self._tokens, self._few = write, tokens, True
        self._texts = write(few=True)
        self._forms: list[PricedForm] = []
        self._readers: list[_GuessingEngine] = []
        self._right: list[BoolArray] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that each form was to guess."""
        return sum(len(text.written) for text in self._texts)

    def add(self, forms: Sequence[PricedForm], reader: _GuessingEngine) -> None:
        """Forms that an engine stands for, the simplest first."""
        self._right += list(reader.guess(self._texts, self._tokens))
        self._readers.append(reader)
        self._forms += forms

    def tried(self) -> list[TriedForm]:
        """What is known of each form."""
        return [form.tried(right) for form, right in zip(self._forms, self._right, strict=True)]

    def settle(self) -> list[TriedForm]:
        """The same, once all have read more texts if few left a doubt."""
        if self._few and not is_sure(self._forms, np.stack(self._right)):
            self._few, self._texts = False, self._write()
            self._right = [right for reader in self._readers for right in reader.guess(self._texts, self._tokens)]
        return self.tried()


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
