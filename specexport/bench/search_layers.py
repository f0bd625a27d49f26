"""``specexport bench --search-layers``: find the layers that drafts of a target should leave out, and keep them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.bench.options import BenchOptions
from specexport.bench.prompts import BenchPrompt
from specexport.bench.runner import draw_lengths, encode_prompt
from specexport.compile.bundle import put_json
from specexport.progress import Progress, ProgressEvent
from specexport.report import Column, markdown_table
from specexport_runtime.bundle.draft_layers import DRAFT_LAYERS_NAME, DraftLayers
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import BundleError, InvalidRequestError, UserInputError
from specexport_runtime.requests.layer_choice import LayerChoice, LayerRules, choose_layers

if TYPE_CHECKING:
    from specexport.bench.layer_agreement import WrittenText
    from specexport.bench.layer_costs import LayerCosts
    from specexport.bench.layer_search import LayerSelection
    from specexport_runtime.engine import SpecEngine

MOST_TEXTS = 32
"""More prompts tell little more, and each choice reads all texts."""
_MOST_LOOKAHEAD = 8  # of a draft that is weighed; longer ones hardly ever pay
_TAKEN = (
    *("search_layers", "bundles", "files", "num_prompts", "domains", "max_tokens", "temperature", "ignore_eos", "seed"),
    *("num_threads", "spin", "max_model_len", "max_num_batched_tokens", "lora", "json_file", "quiet"),
)
"""Options of ``bench`` that a search takes."""


class LayerSearchResult(NamedTuple):
    """What a search found."""

    layers: DraftLayers
    rivals: Mapping[str, "LayerSelection"]  # what else was judged, by name
    costs: "LayerCosts"
    num_tried: int  # choices
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        rivals = {name: found.promise._asdict() | {"mask": found.mask.tolist()} for name, found in self.rivals.items()}
        return {
            "found": self.layers._asdict(),
            "rivals": rivals,
            "costs": self.costs._asdict(),
            "num_tried": self.num_tried,
            "seconds": self.seconds,
        }


def check_options(given: Sequence[str], bundles: Sequence[Path]) -> None:
    """Refuse options that a search has no use for, by their names, and more bundles than one."""
    unused = [name for name in given if name not in _TAKEN]
    if unused:
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

    start = time.perf_counter()
    build_key = load_manifest(bundle).build_key
    prompts = prompts[:: -(-len(prompts) // MOST_TEXTS)]
    with closing(
        SpecEngine.load(bundle, engine_options, max_num_seqs=len(prompts), enable_prefix_caching=False)
    ) as engine:
        engine.resolve_drafting(drafter="self")
        _report(progress, f"writing {len(prompts)} texts")
        texts = _write(engine, prompts, options)
        result = _search(engine, texts, options.temperatures[0], lambda words: _report(progress, words))
    _keep(bundle, build_key, result.layers)
    return result._replace(seconds=time.perf_counter() - start)


def _write(engine: "SpecEngine", prompts: Sequence[BenchPrompt], options: BenchOptions) -> "list[WrittenText]":
    """What the target writes to each prompt, without drafts."""
    from specexport.bench.layer_agreement import WrittenText
    from specexport_runtime.sampling.params import SamplingParams

    lengths = draw_lengths(prompts, options)
    params = [
        SamplingParams(
            temperature=options.temperatures[0],
            max_tokens=lengths[prompt.id],
            ignore_eos=options.ignore_eos,
            seed=options.seed + number,
        )
        for number, prompt in enumerate(prompts)
    ]
    ids = [encode_prompt(engine, prompt) for prompt in prompts]
    results = engine.generate(ids, params, speculation=False)
    texts = [WrittenText(*pair) for pair in zip(ids, (result.token_ids for result in results), strict=True) if pair[1]]
    if not texts:
        raise InvalidRequestError("the target writes nothing to any prompt.", "give others, or --ignore-eos.")
    return texts


def _search(
    engine: "SpecEngine", texts: "Sequence[WrittenText]", temperature: float, report: Callable[[str], None]
) -> LayerSearchResult:
    from specexport.bench.layer_agreement import AgreementReader, tokens_a_round
    from specexport.bench.layer_costs import LayerPromise, measure_costs
    from specexport.bench.layer_search import LayerSearch
    from specexport_runtime.executors.base import BoolArray
    from specexport_runtime.packing.batch import ModelRunner

    runner, lookahead = ModelRunner(engine.target), min(engine.lookahead, _MOST_LOOKAHEAD)
    kinds = tuple(engine.target.gate_kinds) or ("attention", "MLP") * (engine.target.num_gates // 2)
    reader = AgreementReader(runner, texts, temperature)
    costs = measure_costs(runner, (texts[0].prompt * (lookahead + 1))[: lookahead + 1], lookahead)
    tried = 0

    def judge(masks: Sequence[BoolArray]) -> list[LayerPromise]:
        nonlocal tried
        tried += len(masks)
        report(f"{tried} choices of layers")
        return [
            costs.promise(mask, tokens_a_round(chances, lookahead))
            for mask, chances in zip(masks, reader.agree(masks), strict=True)
        ]

    search = LayerSearch(kinds, judge)
    rules = LayerRules() if reader.similarity else LayerRules(threshold=None)
    asd = choose_layers(reader.similarity, rules, len(kinds) // 2, kinds)
    rivals = {"ASD's rules": search.best([asd.mask] if asd.can_draft else [])}
    rivals["early exit"] = search.best(search.exits())
    found = search.run()
    runner.reset()
    choice = LayerChoice(tuple(found.mask[::2].tolist()), tuple(found.mask[1::2].tolist()), (), kinds)
    layers = DraftLayers(
        choice.num_layers,
        tuple(sorted({*choice.removed_attention, *choice.removed_recurrences})),
        choice.removed_mlp,
        found.promise.lookahead,
        found.promise.tokens_a_round,
        found.promise.speedup,
        reader.num_tokens,
    )
    named = {name: each for name, each in rivals.items() if each is not None} | {"searched": found}
    return LayerSearchResult(layers, named, costs, search.num_tried, 0.0)


def _keep(bundle: Path, build_key: str, layers: DraftLayers) -> None:
    manifest = load_manifest(bundle)
    if manifest.build_key != build_key:
        raise BundleError(f"{bundle} was rebuilt during the search.", "search again.")
    try:
        put_json(bundle, manifest, DRAFT_LAYERS_NAME, layers._asdict())
    except OSError as error:
        raise UserInputError(
            f"the layers cannot be kept in {bundle} ({error.strerror}).", "make it writable."
        ) from error


def _report(progress: Progress | None, words: str) -> None:
    if progress is not None:
        progress(ProgressEvent("layers", "", 0, 1, words))


def describe_search(result: LayerSearchResult) -> str:
    """The search for a reader: how each choice does, and what was kept."""
    columns: list[Column[tuple[str, Any]]] = [
        Column("layers", lambda row: row[0], left=True),
        Column("mixers kept", lambda row: int(row[1].mask[::2].sum())),
        Column("MLPs kept", lambda row: int(row[1].mask[1::2].sum())),
        Column("K", lambda row: row[1].promise.lookahead),
        Column("tokens a round", lambda row: row[1].promise.tokens_a_round, ".2f"),
        Column("over plain decoding", lambda row: row[1].promise.speedup, ".2f", "x"),
    ]
    slower = result.layers.speedup <= 1
    verdict = "No choice promises more than plain decoding: `auto` will mostly decode plainly." if slower else ""
    lines = [
        f"{result.num_tried} choices of layers, judged on {result.layers.num_tokens} tokens in {result.seconds:.0f} s, "
        "one sequence at a time:",
        "",
        markdown_table(columns, list(result.rivals.items())),
        "",
        f"Kept in the bundle: {result.layers.describe()}.",
        verdict,
    ]
    return "\n".join(lines).rstrip()
