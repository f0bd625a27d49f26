"""Medians over repeats, ratios between methods that ran side by side, the fastest K and the best draft."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean, mean, median, pstdev, quantiles
from typing import Any, NamedTuple

from specexport.bench.methods import OWN_DRAFTERS, Cell
from specexport.bench.records import BenchResult, PromptRecord, RunRecord

TOLERANCE = 0.01
"""The smallest K within this share of the fastest is chosen: a longer draft must be worth it."""


class BenchSummary(NamedTuple):
    """One combination over all its repeats."""

    cell: Cell  # what was run
    tokens_per_second: float  # median over the repeats
    spread: float | None  # fastest less slowest repeat over the median: how far to trust it; None for one repeat
    decode_tokens_per_second: float | None  # the same median for verify rounds alone; None without one
    # over plain decoding: median of the ratios within each repeat; None if there is none to compare with
    speedup: float | None
    over_vanilla: float | None  # the same over the padded method with the same drafter and K
    over_static: float | None  # the same over static batching; None for static batching itself
    acceptance_rate: float | None  # accepted over drafted tokens; None if nothing was drafted
    branch_rate: float | None  # the same of tokens beside the chain; None without one
    mean_accepted_length: float | None  # tokens of a speculative round, the target's own included; None without one
    # tokens of the speculative rounds over the most they could give, the tokens of their chains and one more:
    # ``mean_accepted_length / (K + 1)`` if every draft has K tokens (Chen et al. 2023, figure 1); None without such a
    # round
    efficiency: float | None
    padding_ratio: float  # padding over accepted tokens (EMS-SD), padded or not
    input_padding: float  # share of padding in the tokens fed
    # of one more draft token of every sequence, without what the draft model spent on reading prompts: median over the
    # repeats; None without one
    draft_milliseconds: float | None
    verify_milliseconds: float | None  # of the target's step in a round: median over the repeats; None without a round
    moved: float  # cache entries of accepted branches that a round moved, and the share of its time
    moving: float
    overhead: float  # scheduling and packing over the time of the rounds: median over the repeats
    latency: float  # milliseconds of a text for each of its tokens: mean over the prompts
    latency_deviation: float  # standard deviation of the latency over the prompts
    latency_p50: float  # half of the prompts have no more
    latency_p99: float  # 99 of 100 prompts have no more; between the slowest two where there are fewer


def summarize(result: BenchResult) -> list[BenchSummary]:
    """Every combination, in the order of their first runs."""
    runs: dict[Cell, dict[int, RunRecord]] = {}
    for run in result.runs:
        runs.setdefault(run.cell, {})[run.repeat] = run
    prompts: dict[Cell, list[PromptRecord]] = {}
    for record in result.prompts:
        prompts.setdefault(record.cell, []).append(record)
    return [_summarize(cell, runs, prompts.get(cell, [])) for cell in _sort_cells(runs)]


def _sort_cells(cells: Iterable[Cell]) -> list[Cell]:
    """The methods of one comparison as neighbours, whichever engine they ran on; domain by domain."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        place = (cell.domain, cell.batch_size, cell.context, cell.temperature, cell.batching)
        groups.setdefault(place, []).append(cell)
    domains = list(dict.fromkeys(key[0] for key in groups))
    return [cell for key in sorted(groups, key=lambda key: domains.index(key[0])) for cell in groups[key]]


def _summarize(cell: Cell, runs: dict[Cell, dict[int, RunRecord]], prompts: list[PromptRecord]) -> BenchSummary:
    own = list(runs[cell].values())
    rates = [run.tokens_per_second for run in own]
    drafted, accepted = sum(p.drafted for p in prompts), sum(p.accepted for p in prompts)
    draft_rounds = sum(p.draft_rounds for p in prompts)
    branches = sum(p.branches for p in prompts)
    most = drafted - branches + draft_rounds
    length = 1 + accepted / draft_rounds if draft_rounds else None
    latency = list(_latency(prompts).values()) or [0.0]
    decode = [run.decode_tokens_per_second for run in own if run.decode_tokens_per_second is not None]
    padded = _padding(own, "input_padding")
    phases = [run.phases for run in own]
    drafting = [(each["draft"] - each["draft_prefill"]) / each["draft_steps"] for each in phases if each["draft_steps"]]
    verifying = [each["verify"] / each["rounds"] for each in phases if each["rounds"]]
    return BenchSummary(
        cell,
        tokens_per_second=median(rates),
        spread=(max(rates) - min(rates)) / median(rates) if len(rates) > 1 else None,
        decode_tokens_per_second=median(decode) if decode else None,
        speedup=_ratio(cell, cell.plain, runs),
        over_vanilla=_ratio(cell, cell.vanilla, runs) if cell.drafter != "none" else None,
        over_static=_ratio(cell, cell._replace(batching="static"), runs) if cell.batching != "static" else None,
        acceptance_rate=accepted / drafted if drafted else None,
        branch_rate=sum(p.accepted_branches for p in prompts) / branches if branches else None,
        mean_accepted_length=length,
        efficiency=(accepted + draft_rounds) / most if draft_rounds else None,
        padding_ratio=_share(_padding(own, "padding"), _padding(own, "accepted")),
        input_padding=_share(padded, _padding(own, "input_tokens") + padded),
        draft_milliseconds=1e3 * median(drafting) if drafting else None,
        verify_milliseconds=1e3 * median(verifying) if verifying else None,
        moved=_share(sum(each.get("moved", 0) for each in phases), sum(each["rounds"] for each in phases)),
        moving=_share(sum(each.get("move", 0.0) for each in phases), sum(each["total"] for each in phases)),
        overhead=median(_share(run.phases["schedule"] + run.phases["pack"], run.phases["total"]) for run in own),
        latency=mean(latency),
        latency_deviation=pstdev(latency),
        latency_p50=median(latency),
        latency_p99=quantiles(latency, n=100, method="inclusive")[-1] if len(latency) > 1 else latency[0],
    )


def _ratio(cell: Cell, other: Cell, runs: dict[Cell, dict[int, RunRecord]]) -> float | None:
    """Median over the repeats that both have of the ratio of their tokens/s."""
    bases = runs.get(other, {})
    ratios = [
        run.tokens_per_second / bases[repeat].tokens_per_second for repeat, run in runs[cell].items() if repeat in bases
    ]
    return median(ratios) if ratios else None


def _padding(runs: Iterable[RunRecord], name: str) -> float:
    return sum(run.padding[name] for run in runs)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _latency(prompts: list[PromptRecord]) -> dict[str, float]:
    """Milliseconds a token of each prompt, by id: medians over the repeats, so that their spread is the texts' own."""
    each: dict[str, list[float]] = {}
    for record in prompts:
        each.setdefault(record.id, []).append(1e3 * record.wall_s / max(record.new_tokens, 1))
    return {prompt: median(values) for prompt, values in each.items()}


def choose_lookahead(rates: Mapping[int, float]) -> int:
    """The smallest K whose tokens/s are within ``TOLERANCE`` of the best."""
    best = max(rates.values())
    return min(k for k, rate in rates.items() if rate >= best * (1 - TOLERANCE))


class Fastest(NamedTuple):
    """One method in one place: at one batch size, context, domain, temperature and way of batching."""

    cell: Cell  # with a K of 0
    rows: Mapping[int, BenchSummary]  # of every K that was measured; 0 is plain decoding

    @property
    def rates(self) -> dict[int, float]:
        """Tokens/s of the rounds; of whole runs where every text ended with its first token."""
        return {k: row.decode_tokens_per_second or row.tokens_per_second for k, row in sorted(self.rows.items())}

    @property
    def lookahead(self) -> int:
        """The chosen K; 0 where plain decoding is faster than every draft."""
        return choose_lookahead(self.rates)

    @property
    def speedup(self) -> float:
        """Of the chosen K over plain decoding."""
        return self.rates[self.lookahead] / self.rates[0]

    @property
    def drafting(self) -> BenchSummary:
        """The chosen K; where that is 0 the fastest that drafts: its rounds say why it is not chosen."""
        return self.rows[self.lookahead or max(filter(None, self.rows), key=self.rates.__getitem__)]

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        rates = {str(k): rate for k, rate in self.rates.items()}
        chosen = {"num_speculative_tokens": self.lookahead, "speedup": self.speedup}
        return self.cell._asdict() | chosen | {"decode_tokens_per_second": rates}


def find_fastest(rows: Sequence[BenchSummary]) -> list[Fastest]:
    """Of each method with several values of K, and of every bundle that is compared, in each place."""
    plain = {row.cell: row for row in rows if row.cell.drafter == "none"}
    tried: dict[Cell, dict[int, BenchSummary]] = {}
    for row in rows:
        k, base = row.cell.num_speculative_tokens, plain.get(row.cell.plain)
        if k > 0 and base is not None:
            tried.setdefault(row.cell._replace(num_speculative_tokens=0), {0: base})[k] = row
    return [Fastest(cell, found) for cell, found in tried.items() if len(found) > 2 or cell.bundle]


class Pick(NamedTuple):
    """The best draft."""

    # of the draft with the largest speedup; None where plain decoding is faster than every draft everywhere
    bundle: str | None
    # of each bundle, over plain decoding: geometric mean over all places, each at the K chosen there. Where that is 0
    # the draft is not used, and the speedup is 1.
    speedups: Mapping[str, float]

    def describe(self) -> str:
        """One line: the pick, and the speedups of all."""
        if self.bundle is None:
            return "pick: plain decoding, no draft is faster anywhere"
        others = [f"{name} {speedup:.2f}×" for name, speedup in self.speedups.items() if name != self.bundle]
        return f"pick: {self.bundle} ({'; '.join([f'{self.speedups[self.bundle]:.2f}× plain', *others])})"


def pick_draft(found: Sequence[Fastest]) -> Pick | None:
    """Compare bundles by their draft models and heads; of equal ones the first counts. None for a single bundle."""
    own: dict[str, list[Fastest]] = {}
    for each in found:
        if each.cell.bundle and each.cell.method in OWN_DRAFTERS:
            own.setdefault(each.cell.bundle, []).append(each)
    if not own:
        return None
    speedups = {name: geometric_mean(each.speedup for each in of_one) for name, of_one in own.items()}
    drafting = [name for name, of_one in own.items() if any(each.lookahead for each in of_one)]
    return Pick(max(drafting, key=speedups.__getitem__, default=None), speedups)
