"""A drafter of your own: guess each next token from the pairs of tokens in the text so far.

python examples/custom_drafter/bigrams.py engines/demo "def area(width, height):"
"""

import itertools
import sys

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.drafters.base import Drafter, DrafterTraits, Proposal


class BigramDrafter(Drafter):
    """Proposes the token that last followed the newest one, then the one that followed that, and so on."""

    traits = DrafterTraits(default_lookahead=4, is_free=True)

    def propose(self, sequences, lookaheads):
        """Up to ``lookaheads[i]`` tokens for each sequence, from its committed tokens alone."""
        return [self._draft(seq.tokens, limit) for seq, limit in zip(sequences, lookaheads, strict=True)]

    def _draft(self, tokens, limit):
        followers = dict(itertools.pairwise(tokens))
        draft = []
        while len(draft) < limit and (token := followers.get(draft[-1] if draft else tokens[-1])) is not None:
            draft.append(token)
        return Proposal(draft)


if __name__ == "__main__":
    with_bigrams = SpecEngine.load(sys.argv[1], drafters={"bigrams": lambda _parts: BigramDrafter()})
    for drafter in ("bigrams", "none"):
        result = with_bigrams.generate(sys.argv[2], SamplingParams(max_tokens=64), drafter=drafter)[0]
        print(f"{drafter}: {result.stats.rounds} rounds, accepted {result.stats.accepted} of {result.stats.drafted}")
