"""What the steps of a bundle cost on this machine: by its sizes, mended by what was learned here."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.costs.step_cost import StepCost
from specexport_runtime.machine import machine_key
from specexport_runtime.user_cache import cache_folder, read_json, write_json

SCHEMA = "specexport.costs/7"


class LayerShares(NamedTuple):
    """What parts of a target take of its step, which price a draft of any set of its layers.

    Attributes:
        num_layers: layers (N); each has a gate for its mixer (attention, recurrences), and one for its MLP.
        mixer: share of one mixer, 0 to 1.
        mlp: share of one MLP.
    """

    num_layers: int
    mixer: float
    mlp: float


@dataclass(frozen=True)
class CostCurves:
    """What the steps of a bundle cost.

    Attributes:
        target: a step of the target.
        drafters: a step of a drafter that has an engine of its own (``"draft-model"``), or a step made for it
            (``"self"``, where the target's engine fixes its layers). Lookup has none: it costs microseconds.
        shares: of a target that can draft with its own layers; None for others.
    """

    target: StepCost
    drafters: Mapping[str, StepCost] = field(default_factory=dict)
    shares: LayerShares | None = None

    def self_draft_seconds(
        self, mixers_off: float, mlps_off: float, num_tokens: int, num_rows: int, kv_entries: float = 0
    ) -> float:
        """Seconds of a step of the target without some of its layers.

        Args:
            mixers_off: mixers that are left out.
            mlps_off: MLPs that are left out.
            num_tokens: new tokens of all rows together (T).
            num_rows: rows of the step (B).
            kv_entries: cache entries of its rows; layers that are left out do not read theirs.
        """
        whole = self.target.seconds(num_tokens, num_rows)
        if self.shares is None:
            return self.target.seconds(num_tokens, num_rows, kv_entries)
        past = self.target.seconds(num_tokens, num_rows, kv_entries) - whole
        left = 1 - mixers_off * self.shares.mixer - mlps_off * self.shares.mlp
        return whole * max(left, 0.0) + past * (1 - mixers_off / self.shares.num_layers)


class KnownCosts(NamedTuple):
    """What is known of a bundle's costs on this machine.

    Attributes:
        curves: what steps cost by their sizes.
        learned: by what they are mended, and where that is kept.
    """

    curves: CostCurves
    learned: LearnedCosts


def load_costs(prior: CostCurves, circumstances: Mapping[str, Any], *, cache: bool = True) -> KnownCosts:
    """The costs of a bundle on this machine: what its sizes promise, and what was learned earlier.

    A file that is damaged or of another form is replaced. A cache that cannot be written costs one warning.

    Args:
        prior: what the sizes promise.
        circumstances: what tells this bundle and how it is run from all others, as JSON.
        cache: False keeps nothing.
    """
    key = {"schema": SCHEMA, "machine": machine_key(), "prior": asdict(prior), **circumstances}
    key = json.loads(json.dumps(key))
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json"
    readable = cache_folder("costs", writable=False) if cache else None
    known = None if readable is None else read_json(readable / name)

    def keep(ratios: Mapping[str, Any]) -> None:
        folder = cache_folder("costs") if cache else None
        if folder is not None:
            write_json(folder / name, {"key": key, "learned": ratios})

    fits = isinstance(known, dict) and known.get("key") == key
    return KnownCosts(prior, LearnedCosts(known.get("learned") if fits and known else None, keep=keep))
