"""What the steps of a bundle cost on this machine: by its sizes, mended by what was learned here.

A step reads all weights once (of experts, those that its tokens chose) and multiplies them with each token. A row's
states are read and written once; a cache entry is read once and multiplied with each new token of its row.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.machine import machine_key
from specexport_runtime.user_cache import cache_folder, read_json, write_json

_MIN_PRODUCTS = 0.1
"""Share of the products that is felt however long the reading takes."""

SCHEMA = "specexport.costs/10"


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of one engine. Never falls with more tokens."""

    reading: float  # of all weights, once a step
    token: float  # multiplying all weights that a token meets with it
    fixed: float = 0.0  # whatever the step holds
    hidden: float = 0.0  # share of the reading after which products cost next to nothing (0 to 1)
    unchosen: float = 0.0  # of reading experts that no token chose, were there no token; part of ``reading``
    unchosen_share: float = 0.0  # of an expert, the chance that a token does not choose it
    row: float = 0.0  # of a row's states, and whatever else a row costs
    row_token: float = 0.0  # the same, for each new token of a row
    kv: float = 0.0  # for each cache entry that a step reads
    kv_token: float = 0.0  # for each cache entry and each new token of its row

    def seconds(self, num_tokens: float, num_rows: int, kv_entries: float = 0) -> float:
        """Seconds of a step of T new tokens in B rows, which read so many cache entries together."""
        reading, products = self.reading, num_tokens * self.token
        if self.unchosen:
            reading -= self.unchosen * self.unchosen_share**num_tokens
        products = max(products - self.hidden * reading, _MIN_PRODUCTS * products if self.hidden else products)
        past = kv_entries * (self.kv + self.kv_token * num_tokens / num_rows)
        return self.fixed + reading + products + num_rows * self.row + num_tokens * self.row_token + past


class LayerShares(NamedTuple):
    """Of a target's step, the shares of one mixer (attention, recurrences) and one MLP, of N layers."""

    num_layers: int
    mixer: float
    mlp: float


@dataclass(frozen=True)
class CostCurves:
    """What steps cost, of ``drafters`` those that have an engine of their own: lookup costs microseconds."""

    target: StepCost
    drafters: Mapping[str, StepCost] = field(default_factory=dict)
    shares: LayerShares | None = None  # of a target that can draft with any of its layers
    has_logits: bool = True  # those of a draft step are on the host, and may be looked at

    def self_draft_seconds(
        self, mixers_off: float, mlps_off: float, num_tokens: int, num_rows: int, kv_entries: float = 0
    ) -> float:
        """Seconds of a step of the target without so many mixers, whose caches are not read either, and MLPs."""
        whole = self.target.seconds(num_tokens, num_rows)
        if self.shares is None:
            return self.target.seconds(num_tokens, num_rows, kv_entries)
        past = self.target.seconds(num_tokens, num_rows, kv_entries) - whole
        left = 1 - mixers_off * self.shares.mixer - mlps_off * self.shares.mlp
        return whole * max(left, 0.0) + past * (1 - mixers_off / self.shares.num_layers)


class KnownCosts(NamedTuple):
    """What steps cost by their sizes, and by what that is mended."""

    curves: CostCurves
    learned: LearnedCosts | None = None  # None takes the curves as they are


def load_costs(prior: CostCurves, circumstances: Mapping[str, Any], *, cache: bool = True) -> KnownCosts:
    """What a bundle's sizes promise, and what was learned on this machine in the same ``circumstances`` (JSON)."""
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
