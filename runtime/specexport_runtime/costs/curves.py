"""The cost curves of a bundle on this machine: what is known of them lies in the user's cache.

What the goodput controller weighs a longer draft with: seconds of a verification step against seconds of draft steps.
The curves depend on the machine, the bundle, the threads and the row count, and are kept for each of them.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specexport_runtime.abi import MLP
from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.costs.measure import CONTEXTS, MAX_NOISE, measure_step_cost
from specexport_runtime.costs.step_cost import StepCost
from specexport_runtime.executors.base import GatedExecutor, as_gated
from specexport_runtime.machine import machine_key
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.user_cache import cache_folder, read_json, write_json

SCHEMA = "specexport.costs/6"
DRAFT_WIDTH = 2
"""Tokens a row that a drafting step is measured with: one, and two after a draft that was accepted whole."""
_DRAFT_BUDGET_S = 0.25
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GateCost:
    """Steps of a target whose layers are switched off, which price a draft of any set of its layers.

    Attributes:
        num_layers: layers (N); each has a gate for its mixer (attention, recurrences), and one for its MLP.
        none: no layer is on: embedding, last norm and LM head.
        mlp: every MLP is on, no mixer.
        num_mlps: MLPs; None: each layer has one.
    """

    num_layers: int
    none: StepCost
    mlp: StepCost
    num_mlps: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "GateCost":
        """What ``CostCurves.to_json`` gave."""
        none, mlp = StepCost.from_json(data["none"]), StepCost.from_json(data["mlp"])
        mlps = data.get("num_mlps")
        return cls(int(data["num_layers"]), none, mlp, None if mlps is None else int(mlps))

    def share_of_mlps(self, count: float) -> float:
        """``count`` MLPs as a share of all, 0 to 1."""
        return count / max(1, self.num_layers if self.num_mlps is None else self.num_mlps)


@dataclass(frozen=True)
class CostCurves:
    """What the steps of a bundle cost on this machine.

    Attributes:
        target: a step of the target in which every token needs logits: plain decoding and verification.
        drafters: a step of a drafter that has an engine of its own (``"draft-model"``), or a step made for it
            (``"self"``, where the target's engine fixes its layers); the last token of each row needs logits. Lookup
            has none: it costs microseconds.
        gates: of a target that can draft with its own layers; None for others.
    """

    target: StepCost
    drafters: Mapping[str, StepCost] = field(default_factory=dict)
    gates: GateCost | None = None

    def self_draft_seconds(
        self, mixers_on: int, mlp_on: int, num_tokens: int, num_rows: int, kv_entries: float = 0
    ) -> float:
        """Seconds of a step of the target with some of its layers.

        Mixers (attention, recurrences) are taken to cost the same as one another, and MLPs likewise. They add up, so
        three measurements give both: nothing, the MLPs, everything.

        Args:
            mixers_on: mixers that are on.
            mlp_on: MLPs that are on.
            num_tokens: new tokens of all rows together (T).
            num_rows: rows of the step (B).
            kv_entries: cache entries of its rows; the layers that are off do not read theirs.
        """
        whole = self.target.seconds(num_tokens, num_rows, kv_entries)
        if self.gates is None:
            return whole
        none = self.gates.none.seconds(num_tokens, num_rows)
        mlp = max(self.gates.mlp.seconds(num_tokens, num_rows), none)
        shares = self.gates.share_of_mlps(mlp_on), mixers_on / self.gates.num_layers
        return none + (mlp - none) * shares[0] + max(whole - mlp, 0.0) * shares[1]

    @property
    def noise(self) -> float:
        """The noisiest of the curves, see ``StepCost``."""
        parts = [
            self.target,
            *self.drafters.values(),
            *([] if self.gates is None else [self.gates.none, self.gates.mlp]),
        ]
        return max(part.noise for part in parts)

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        gates = None
        if self.gates is not None:
            none, mlp = self.gates.none.to_json(), self.gates.mlp.to_json()
            gates = {"num_layers": self.gates.num_layers, "none": none, "mlp": mlp, "num_mlps": self.gates.num_mlps}
        drafters = {name: cost.to_json() for name, cost in self.drafters.items()}
        return {"target": self.target.to_json(), "drafters": drafters, "gates": gates}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CostCurves":
        """What :meth:`to_json` gave.

        Raises:
            ValueError: something is missing, of another type, or out of its range.
        """
        try:
            gates = data["gates"]
            return cls(
                StepCost.from_json(data["target"]),
                {str(name): StepCost.from_json(cost) for name, cost in data["drafters"].items()},
                None if gates is None else GateCost.from_json(gates),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no cost curves: {error!r}") from error


def measure_costs(
    target: ModelRunner,
    drafting: Mapping[str, ModelRunner],
    *,
    max_rows: int,
    lookahead: int,
    max_bytes: int | None = None,
) -> CostCurves:
    """Measure the curves of a bundle; all cache rows must be empty, and are empty afterwards.

    Args:
        target: the target.
        drafting: the models that draft, by the names of their drafters.
        max_rows: most rows of a step.
        lookahead: largest K.
        max_bytes: memory of the cache rows that are filled meanwhile; fewer rows are measured where they take more.
    """
    if max_bytes is not None:
        entries = CONTEXTS[1] + max(lookahead + 1, DRAFT_WIDTH)
        most = max(runner.row_bytes(min(entries, runner.kv.capacity)) for runner in (target, *drafting.values()))
        max_rows = max(1, min(max_rows, max_bytes // max(most, 1)))
    whole = measure_step_cost(target, max_rows=max_rows, max_tokens=lookahead + 1)
    drafters = {
        name: measure_step_cost(
            runner,
            max_rows=max_rows,
            max_tokens=DRAFT_WIDTH,
            all_logits=False,
            lookahead=lookahead,
            budget_s=_DRAFT_BUDGET_S,
        )
        for name, runner in drafting.items()
    }
    gated = as_gated(target.executor)
    if gated is not None and gated.fixed_layers is not None:
        drafters["self"] = _measure_fixed(target, gated, max_rows, lookahead)
        gated = None
    return CostCurves(whole, drafters, None if gated is None else _measure_gates(target, gated, max_rows, lookahead))


def _measure_fixed(target: ModelRunner, gated: GatedExecutor, max_rows: int, lookahead: int) -> StepCost:
    """A draft step of a target whose engine fixes the layers of its drafts: one token a row, nothing else."""
    try:
        return measure_step_cost(
            target,
            max_rows=max_rows,
            max_tokens=1,
            all_logits=False,
            lookahead=lookahead,
            budget_s=_DRAFT_BUDGET_S,
            filled=lambda: gated.set_layers(gated.fixed_layers),  # a past is read by all layers
        )
    finally:
        gated.set_layers(None)


def _measure_gates(target: ModelRunner, gated: GatedExecutor, max_rows: int, lookahead: int) -> GateCost:
    layers = gated.num_gates // 2
    mlps = np.arange(gated.num_gates) % 2 == 1
    found = []
    try:
        for mask in (np.zeros_like(mlps), mlps):
            gated.set_layers(mask)
            # Without mixers the past costs nothing, so a short one will do.
            cost = measure_step_cost(
                target,
                max_rows=max_rows,
                max_tokens=DRAFT_WIDTH,
                contexts=(1, 1),
                all_logits=False,
                lookahead=lookahead,
                budget_s=_DRAFT_BUDGET_S,
            )
            found.append(cost)
    finally:
        gated.set_layers(None)
    none, mlp = found
    kinds = gated.gate_kinds
    return GateCost(layers, none, mlp, sum(kind == MLP for kind in kinds) if kinds else None)


class KnownCosts(NamedTuple):
    """What is known of a bundle's costs on this machine.

    Attributes:
        curves: what steps cost.
        learned: by what they are mended, and where that is kept.
    """

    curves: CostCurves
    learned: LearnedCosts


def load_costs(
    target: ModelRunner,
    drafting: Mapping[str, ModelRunner],
    prior: CostCurves,
    *,
    measure: bool,
    bundle_key: str,
    kernels: str | None,
    max_rows: int,
    lookahead: int,
    num_threads: int | None = None,
    spin: bool = True,
    cuda_graphs: bool | None = None,
    max_bytes: int | None = None,
    cache: bool = True,
) -> KnownCosts:
    """The curves of a bundle on this machine: from the user's cache, measured and put there, or a prior.

    A file that is damaged or of another form is replaced. A cache that cannot be written costs a measurement at every
    load, and one warning. Timings that are too noisy, on a busy machine, are thrown away, and the prior is taken:
    what is wrong with it is learned from rounds, and kept in the cache likewise.

    Args:
        target: the target; all its cache rows must be empty.
        drafting: the models that draft, by the names of their drafters; likewise.
        prior: the curves where nothing was measured.
        measure: measure them where the cache has none that were.
        bundle_key: what tells this bundle from all others: the manifest's ``build_key``.
        kernels: the instruction set of the CPU's operators; None on a GPU.
        max_rows: most rows of a step.
        lookahead: largest K.
        num_threads: compute threads that were asked for; None if that was left to the runtime.
        spin: idle threads spin.
        cuda_graphs: whether steps are recorded on a GPU; None if that was left to the backend.
        max_bytes: memory of the cache rows while they are measured; None for no bound.
        cache: False measures and keeps nothing.
    """
    key: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine_key(),
        "bundle": bundle_key,
        "kernels": kernels,
        "max_rows": max_rows,
        "lookahead": lookahead,
        "threads": num_threads,
        "spin": spin,
        "cuda_graphs": cuda_graphs,
        "padded": [not target.unpad_kv, not target.unpad_input],
        "drafting": sorted(drafting),
        "gates": getattr(target.executor, "num_gates", 0),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json"
    readable = cache_folder("costs", writable=False) if cache else None
    known = None if readable is None else _read(read_json(readable / name), key)

    def keep(curves: CostCurves, measured: bool, learned: Mapping[str, Any]) -> None:
        folder = cache_folder("costs") if cache else None
        if folder is not None:
            data = {"key": key, "measured": measured, "learned": learned, **curves.to_json()}
            write_json(folder / name, data)

    curves, measured, learned = known or (prior, False, None)
    if not measured and curves != prior:
        curves, learned = prior, None  # what was learned mends another version's prior
    if measure and not measured:
        found = measure_costs(target, drafting, max_rows=max_rows, lookahead=lookahead, max_bytes=max_bytes)
        if found.noise <= MAX_NOISE:
            curves, measured, learned = found, True, None
            keep(curves, measured, {})
        else:
            _log.info(
                "This machine is busy: timings of the same step differ by %.0f %% or more. They are thrown away, and "
                "draft lengths are chosen by sizes and by what rounds take.",
                100 * found.noise,
            )
    return KnownCosts(
        curves, LearnedCosts(learned, is_measured=measured, keep=lambda ratios: keep(curves, measured, ratios))
    )


def _read(data: Any, key: Mapping[str, Any]) -> tuple[CostCurves, bool, Any] | None:
    if not isinstance(data, dict) or data.get("key") != key:
        return None
    try:
        return CostCurves.from_json(data), data.get("measured") is True, data.get("learned")
    except ValueError as error:
        _log.info("Cost curves in the cache are damaged (%s): they are made again.", error)
        return None
