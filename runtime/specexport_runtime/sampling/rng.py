"""Counter-based random numbers: a pure function of (seed, position), whatever else is in the batch."""

from typing import NamedTuple

import numpy as np

from specexport_runtime.errors import InvalidRequestError

_BLOCK = 64  # positions generated at once: one generator call costs as much as hundreds of its numbers
_MAX_POSITION = 2**62
_MASK64 = 2**64 - 1


class Draws(NamedTuple):
    """The three independent uniforms in [0, 1) of one (seed, position)."""

    draft: float  # draws the draft token
    accept: float  # tests it
    resample: float  # draws the token that the round ends with (residual or bonus)


def check_seed(seed: int) -> int:
    """The seed as a plain int; InvalidRequestError outside the signed 128-bit range."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise InvalidRequestError(f"seed is {seed!r}, which is not an integer.", hint="give an integer.")
    if not -(2**127) <= seed < 2**127:
        raise InvalidRequestError(f"seed is {seed}.", hint="give an integer in [-2**127, 2**127).")
    return int(seed)


class RandomStream:
    """The random numbers of one request, addressed by position; for seeds see :func:`check_seed`.

    Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the seed is the key, the position
    the counter, and three of the four 64-bit words of each counter are used. Branches of a tree have counters of their
    own: the position is one more word of these.
    """

    def __init__(self, seed: int) -> None:
        key = check_seed(seed) % 2**128
        self._key = np.array([key & _MASK64, key >> 64], dtype=np.uint64)
        self._blocks: dict[int, list[Draws]] = {}
        self._branches: tuple[tuple[int, int], list[Draws]] = (-1, -1), []  # of one position

    def draws(self, position: int) -> Draws:
        """The uniforms of one absolute position in a sequence, from 0; ValueError beyond 2**62."""
        index = position // _BLOCK
        block = self._blocks.get(index)
        if block is None:
            block = self._generate(index * _BLOCK)
            while len(self._blocks) > 1:  # the current block and the one before it: a round can straddle the border
                del self._blocks[next(iter(self._blocks))]
            self._blocks[index] = block
        return block[position - index * _BLOCK]

    def branch(self, position: int, number: int) -> Draws:
        """Those of one more token that is tested there or after it, by its number from 0."""
        index, offset = divmod(number, _BLOCK)
        place, block = (position, index), self._branches
        if block[0] != place:
            block = self._branches = place, self._generate(index * _BLOCK, position + 1)
        return block[1][offset]

    def _generate(self, first: int, lane: int = 0) -> list[Draws]:
        if not 0 <= first <= _MAX_POSITION:
            raise ValueError(f"positions in [{first}, {first + _BLOCK}) are outside [0, 2**62]")
        counter = np.array([first, lane, 0, 0], dtype=np.uint64)
        words = np.random.Philox(key=self._key, counter=counter).random_raw(4 * _BLOCK).reshape(_BLOCK, 4)
        # 53 bits, as numpy's own doubles: the largest value is 1 - 2**-53, never 1.
        uniforms = ((words[:, :3] >> np.uint64(11)) * 2.0**-53).tolist()
        return [Draws(*row) for row in uniforms]


class RoundDraws:
    """The random numbers of a text that is made in rounds: those of each place in the round at hand.

    No number serves two rounds: a round begins after all that were looked at. So a draft may depend on all before it.
    Plain decoding and copies use all that they look at: the n-th token has the n-th numbers.
    """

    def __init__(self, stream: RandomStream) -> None:
        self._stream, self._start, self._seen = stream, 0, 0

    def __call__(self, place: int) -> Draws:
        """The uniforms of a place, from 0, of this round."""
        if place >= self._seen:
            self._seen = place + 1
        return self._stream.draws(self._start + place)

    def peek(self, place: int) -> Draws:
        """As calling it, for numbers that are perhaps not used: what is only peeked at counts as not looked at."""
        return self._stream.draws(self._start + place)

    def branch(self, number: int) -> Draws:
        """The uniforms of a branch of this round's tree, by its number: any, from 0, that no other branch has.

        No other round and no place has them. A drafter may number branches as it draws them (``draft``), and acceptance
        by their places in the end (``accept``): each of the two is one of three independent numbers.
        """
        return self._stream.branch(self._start, number)

    def end_round(self) -> None:
        """The next round begins."""
        self._start += self._seen
        self._seen = 0
