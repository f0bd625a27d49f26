"""Which drafter drafts with a draft head: the kind of its engine decides."""

from specexport_runtime.drafters.base import NO_HEAD, Drafter, DrafterKind, DrafterParts, Obstacle
from specexport_runtime.drafters.head import HeadDrafter, HydraDrafter
from specexport_runtime.drafters.last_feature import AssistantDrafter, MedusaDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.batch import ModelRunner


def _make(parts: DrafterParts) -> Drafter:
    if parts.head is None:
        raise SpecexportError("there is no draft head to draft with.")
    executor = parts.head.executor
    if executor.reads_draft:
        return HydraDrafter(parts.head, vocab_size=parts.vocab_size, head=parts.draft_head)
    if executor.num_draft_heads:
        return MedusaDrafter(parts.head, vocab_size=parts.vocab_size, head=parts.draft_head)
    if executor.borrows_cache:
        return AssistantDrafter(parts.head, vocab_size=parts.vocab_size, head=parts.draft_head)
    return HeadDrafter(parts.head, vocab_size=parts.vocab_size, head=parts.draft_head, mask=parts.mask)


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
    _make,
    lambda offer: offer.head_obstacle,
    method="eagle3",
    config_keys=frozenset(["model"]),
    other_methods=("eagle", "mtp", "medusa", "dflash"),
)
