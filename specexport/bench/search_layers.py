"""``specexport bench --search-layers``: find the layers that drafts of a target should leave out, and keep them.

Each choice drafts for the same prompts. What was accepted in each position, and what steps of this machine cost, say
how fast one sequence would be with it.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.bench.acceptance import count_positions, expected_tokens, judge, step_seconds
from specexport.bench.options import BenchOptions
from specexport.bench.prompts import BenchPrompt
from specexport.bench.runner import draw_lengths, encode_prompt
from specexport.compile.bundle import write_bundle_json
from specexport.progress import Progress, ProgressEvent
from specexport.report import Column, markdown_table
from specexport_runtime.bundle.draft_layers import DRAFT_LAYERS_NAME, DraftLayers
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import BundleError, InvalidRequestError, UserInputError
from specexport_runtime.executors.base import BoolArray
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specexport_runtime.engine import SpecEngine

MAX_TEXTS = 32
"""More prompts tell little more, and each choice decodes all of them."""
_DRAFTED, _MAX_K = 4, 8  # draft tokens that are tested a round, and the longest K that is weighed
_TAKEN = (
    *("search_layers", "bundles", "files", "num_prompts", "domains", "max_tokens", "temperature", "ignore_eos", "seed"),
    *("num_threads", "spin", "max_model_len", "max_num_batched_tokens", "lora", "json_file", "quiet"),
)
"""Options of ``bench`` that a search takes."""


class LayerSelection(NamedTuple):
    """A choice of layers, and what is expected of it."""

    mask: BoolArray  # [2N], the parts that are on
    speedup: float  # over plain decoding
    lookahead: int  # K that it has with
    tokens_a_round: float  # with that K, the target's own included


class LayerSearchResult(NamedTuple):
    """What a search found."""

    found: DraftLayers
    rivals: dict[str, LayerSelection]  # the best of each kind of choice, by name
    num_tried: int  # choices
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        rivals = {name: each._asdict() | {"mask": each.mask.tolist()} for name, each in self.rivals.items()}
        return self._asdict() | {"rivals": rivals, "found": self.found._asdict()}


def check_options(given: Sequence[str], bundles: Sequence[Path]) -> None:
    """Refuse options that a search has no use for, by their names, and more bundles than one."""
    if unused := [name for name in given if name not in _TAKEN]:
        raise InvalidRequestError(
            f"--search-layers takes no --{unused[0].replace('_', '-')}.", "leave it out, or measure without a search."
        )
    if len(bundles) != 1:
        raise InvalidRequestError(f"--search-layers takes one bundle, not {len(bundles)}.", "search one at a time.")


def search_layers(
    bundle: Path,
    engine_options: EngineOptions,
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,  # of it the lengths, the temperature and the seed
    progress: Progress | None = None,
) -> LayerSearchResult:
    """Search on texts that the target writes to ``prompts``, and keep the result in the bundle."""
    from specexport_runtime.engine import SpecEngine

    start, build_key = time.perf_counter(), load_manifest(bundle).build_key
    prompts = prompts[:: -(-len(prompts) // MAX_TEXTS)]
    with closing(
        SpecEngine.load(bundle, engine_options, max_num_seqs=len(prompts), enable_prefix_caching=False)
    ) as engine:
        engine.resolve_drafting(drafter="self")
        trial = _Trial(engine, prompts, options, progress)
        kinds = tuple(engine.target.gate_kinds) or ("attention", "MLP") * (engine.target.num_gates // 2)
        rivals = choose_parts(kinds, trial.judge)
    best = max(rivals.values(), key=lambda each: each.speedup)
    off = np.flatnonzero(~best.mask & np.array([bool(kind) for kind in kinds]))
    found = DraftLayers(
        num_layers=len(kinds) // 2,
        mixers=tuple((off[off % 2 == 0] // 2).tolist()),
        mlps=tuple((off[off % 2 == 1] // 2).tolist()),
        lookahead=best.lookahead,
        tokens_a_round=best.tokens_a_round,
        speedup=best.speedup,
        num_tokens=trial.num_tokens,
    )
    manifest = load_manifest(bundle)
    if manifest.build_key != build_key:
        raise BundleError(f"{bundle} was rebuilt during the search.", "search again.")
    try:
        write_bundle_json(bundle, manifest, DRAFT_LAYERS_NAME, found._asdict())
    except OSError as error:
        raise UserInputError(
            f"the layers cannot be kept in {bundle} ({error.strerror}).", "make it writable."
        ) from error
    return LayerSearchResult(found, rivals, trial.num_tried, time.perf_counter() - start)


class _Trial:
    """Decodes the prompts with drafts of one choice after another."""

    def __init__(
        self, engine: "SpecEngine", prompts: Sequence[BenchPrompt], options: BenchOptions, progress: Progress | None
    ) -> None:
        self.num_tried = 0
        self._engine, self._progress = engine, progress
        lengths = draw_lengths(prompts, options)
        self._params = [
            SamplingParams(
                temperature=options.temperatures[0],
                max_tokens=lengths[prompt.id],
                ignore_eos=options.ignore_eos,
                seed=seed,
            )
            for seed, prompt in enumerate(prompts, start=options.seed)
        ]
        self._prompts = [encode_prompt(engine, prompt) for prompt in prompts]
        self._report(f"writing {len(prompts)} texts")
        texts = engine.generate(self._prompts, self._params, speculation=False)
        self.num_tokens = sum(len(text.token_ids) for text in texts)
        self._context = sum(map(len, self._prompts), self.num_tokens) // len(prompts)
        # As it is known now: what is learned meanwhile would judge later choices by other costs.
        self._learned = None if engine.learned_costs is None else LearnedCosts(engine.learned_costs.to_json())

    def judge(self, mask: BoolArray) -> LayerSelection:
        """What is expected of a choice of parts."""
        engine, longest = self._engine, min(self._engine.lookahead, _MAX_K)
        self.num_tried += 1
        self._report(f"{self.num_tried} choices of layers")
        mixers, mlps = (tuple(np.flatnonzero(~part).tolist()) for part in (mask[::2], mask[1::2]))
        results = engine.generate(
            self._prompts,
            self._params,
            drafter="self",
            num_speculative_tokens=min(longest, _DRAFTED),
            layer_rules=LayerRules(None, None, None, mixers, mlps),
            trace=True,
            remember=False,
        )
        positions = count_positions([each for result in results for each in result.trace or ()], "self")
        if not positions:
            raise InvalidRequestError(
                "the texts are too short for a draft.", "give a larger --max-tokens, other prompts, or --ignore-eos."
            )
        assert engine.cost_curves is not None  # noqa: S101 - only engines without `auto` have none
        costs = step_seconds(engine.cost_curves, self._learned, "self", self._context, results[0].stats.layer_choice)
        speedups = judge("self", positions, longest, *costs).speedups
        best = max(range(1, longest + 1), key=speedups.__getitem__)
        return LayerSelection(mask, speedups[best], best, expected_tokens(positions, best))

    def _report(self, words: str) -> None:
        if self._progress is not None:
            self._progress(ProgressEvent("layers", "", 0, 1, words))


def choose_parts(kinds: Sequence[str], judge: Callable[[BoolArray], LayerSelection]) -> dict[str, LayerSelection]:
    """The best early exit (the first layers alone: LayerSkip, Elhoushi et al. 2024), and one greedy pass.

    Each part is left out alone first. In the order of that, each is left out for good if drafts get faster by it.
    ``kinds`` [2N] are what the parts are, empty where a layer has none.
    """
    whole: BoolArray = np.array([bool(kind) for kind in kinds])
    starts = (np.where(np.arange(len(whole)) < kept, whole, False) for kept in range(2, len(whole), 2))
    exits = [judge(mask) for mask in starts if mask.any() and not np.array_equal(mask, whole)]
    alone = {gate: judge(_skip_gate(whole, gate)) for gate in np.flatnonzero(whole).tolist()}
    first, *rest = sorted(alone, key=lambda gate: -alone[gate].speedup)
    best = alone[first]
    for gate in rest:
        if (mask := _skip_gate(best.mask, gate)).any() and (found := judge(mask)).speedup > best.speedup:
            best = found
    shortest = {"early exit": max(exits, key=lambda each: each.speedup)} if exits else {}
    return shortest | {"greedy": best}


def _skip_gate(mask: BoolArray, gate: int) -> BoolArray:
    return np.where(np.arange(len(mask)) == gate, False, mask)


def describe_search(result: LayerSearchResult) -> str:
    """The search for a reader: how each choice does, and what was kept."""
    columns: list[Column[tuple[str, LayerSelection]]] = [
        Column("layers", lambda row: row[0], left=True),
        Column("mixers kept", lambda row: int(row[1].mask[::2].sum())),
        Column("MLPs kept", lambda row: int(row[1].mask[1::2].sum())),
        Column("K", lambda row: row[1].lookahead),
        Column("tokens a round", lambda row: row[1].tokens_a_round, ".2f"),
        Column("over plain decoding", lambda row: row[1].speedup, ".2f", "x"),
    ]
    heading = (
        f"{result.num_tried} choices of layers, judged on {result.found.num_tokens} tokens in {result.seconds:.0f} s, "
        "one sequence at a time:"
    )
    lines = [heading, markdown_table(columns, list(result.rivals.items()))]
    lines.append(f"Kept in the bundle: {result.found.describe()}.")
    if result.found.speedup <= 1:
        lines[-1] += "\nNo choice promises more than plain decoding: `auto` will mostly decode plainly."
    return "\n\n".join(lines)
