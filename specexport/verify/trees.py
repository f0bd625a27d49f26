"""Ways to draft that a check asks an engine for: chains, and trees where its target takes them."""

from typing import NamedTuple

from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.drafting import RequestOptions


class Drafting(NamedTuple):
    """How drafts are made."""

    drafter: str  # by the engine's name
    lookahead: int  # K
    tree_size: int = 0  # most draft tokens of a round, branches included; 0 for chains

    @property
    def options(self) -> RequestOptions:
        """As a request takes them."""
        return {"drafter": self.drafter, "num_speculative_tokens": self.lookahead, "tree_size": self.tree_size}


def tree_drafting(engine: SpecEngine, lookahead: int) -> Drafting | None:
    """Trees of the first drafter, models before copies, twice as many branches as the chain; else None."""
    count = min(lookahead, engine.lookahead)
    for name in sorted(KINDS, key=lambda name: KINDS[name].traits.is_free):
        found = Drafting(name, count, 3 * count)
        try:
            engine.resolve_drafting(**found.options)
        except InvalidRequestError:  # the bundle has nothing to draft so, or its target takes no trees
            continue
        return found
    return None
