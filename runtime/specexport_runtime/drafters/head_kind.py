"""Which drafter drafts with a draft head: what its engine reads decides. A new one is a line here."""

from collections.abc import Callable

from specexport_runtime.drafters.base import NO_HEAD, Drafter, DrafterKind, DrafterParts, Obstacle
from specexport_runtime.drafters.head import HeadDrafter, HydraDrafter
from specexport_runtime.drafters.in_turn import ModulesDrafter
from specexport_runtime.drafters.last_feature import AssistantDrafter, MedusaDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Executor
from specexport_runtime.packing.batch import ModelRunner

_DRAFTERS: tuple[tuple[Callable[[Executor], bool], Callable[..., Drafter]], ...] = (
    (lambda head: head.reads_draft, HydraDrafter),
    (lambda head: head.num_draft_heads > 0, MedusaDrafter),
    (lambda head: head.borrows_cache, AssistantDrafter),
    (lambda head: head.num_modules > 0, ModulesDrafter),
)
"""What engines each of these drafts with; the first that fits. ``HeadDrafter`` takes all others."""


def _make_drafter(parts: DrafterParts) -> Drafter:
    if parts.head is None:
        raise SpecexportError("there is no draft head to draft with.")
    executor, common = parts.head.executor, {"vocab_size": parts.vocab_size, "cut_head": parts.cut_head}
    for fits, drafter in _DRAFTERS:
        if fits(executor):
            return drafter(parts.head, **common)
    return HeadDrafter(parts.head, mask=parts.mask, **common)


def head_obstacle(target: ModelRunner, has_head: bool) -> Obstacle | None:
    """Why no head can draft for a target; None if one can."""
    if not has_head:
        return NO_HEAD
    if not (target.unpad_kv and target.unpad_input):
        return Obstacle("drafter 'head' needs unpadded KV and unpadded input.", "leave unpad_kv and unpad_input on.")
    if not target.executor.gives_features:
        return Obstacle("drafter 'head' needs a target that gives features.", "build the bundle again with --head.")
    return None


KIND = DrafterKind(
    HeadDrafter.traits,
    _make_drafter,
    lambda offer: offer.head_obstacle,
    method="eagle3",
    config_keys=frozenset(["model"]),
    other_methods=("eagle", "mtp", "medusa", "dflash", "dspark"),
)
