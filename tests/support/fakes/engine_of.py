"""Engines of executors that a test has: what is to be said of their parts and of options, in one call."""

from typing import Any

from tokenizers import Tokenizer

from specexport_runtime import SpecEngine
from specexport_runtime.costs.curves import CostCurves, KnownCosts
from specexport_runtime.engine_options import OPTIONS, EngineOptions
from specexport_runtime.engine_parts import EngineParts
from specexport_runtime.executors.base import Executor


def engine_of(
    target: Executor, tokenizer: Tokenizer, *, cost_curves: CostCurves | None = None, **given: Any
) -> SpecEngine:
    """An engine that can be used; ``given`` are engine options, and fields of ``EngineParts``."""
    options = {name: given.pop(name) for name in OPTIONS if name in given and name != "max_model_len"}
    costs = None if cost_curves is None else KnownCosts(cost_curves)
    return SpecEngine(EngineParts(target, tokenizer, costs=costs, **given), EngineOptions(**options))
