"""The drafter of a draft model: which class it takes, and when there is none."""

from specexport_runtime.drafters.base import DrafterKind, DrafterParts, DraftOffer, Obstacle
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.other_tokens import OtherVocabularyDrafter
from specexport_runtime.errors import SpecexportError


def _make_drafter(parts: DrafterParts) -> ModelDrafter:
    if parts.draft is None:
        raise SpecexportError("there is no draft model to draft with.")
    if parts.token_map is not None and parts.cut_head is not None:
        return OtherVocabularyDrafter(parts.draft, parts.token_map, parts.cut_head, vocab_size=parts.vocab_size)
    return ModelDrafter(parts.draft, vocab_size=parts.vocab_size, cut_head=parts.cut_head)


def _find_obstacle(offer: DraftOffer) -> Obstacle | None:
    if offer.has_draft:
        return None
    return Obstacle(
        "this bundle has no draft model.", "build it with --draft, use drafter 'lookup', or do not speculate."
    )


KIND = DrafterKind(
    ModelDrafter.traits, _make_drafter, _find_obstacle, method="draft_model", config_keys=frozenset(["model"])
)
