"""What a step of one engine costs, as a function of its tokens, its rows and the cache entries it reads.

A step reads all weights once and multiplies them with each of its tokens, of which some hides behind the reading. Of
experts it reads those that any of its tokens chose. A row's states are read and written once. A cache entry is read
once a step and multiplied with each new token of its row. Imports the standard library only.
"""

from dataclasses import dataclass, fields

_LEAST_PRODUCTS = 0.1
"""Share of the products that is felt however long the reading takes."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of one engine. Never falls with more tokens."""

    reading: float  # of all weights, once a step
    token: float  # multiplying all weights that a token meets with it
    fixed: float = 0.0  # whatever the step holds
    hidden: float = 0.0  # share of the reading behind which products cost next to nothing (0 to 1)
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
        products = max(products - self.hidden * reading, _LEAST_PRODUCTS * products if self.hidden else products)
        past = kv_entries * (self.kv + self.kv_token * num_tokens / num_rows)
        return self.fixed + reading + products + num_rows * self.row + num_tokens * self.row_token + past

    def scaled(self, share: float) -> "StepCost":
        """Of a part of the engine that takes this share of all."""
        kept = ("hidden", "unchosen_share")
        return StepCost(**{f.name: getattr(self, f.name) * (1 if f.name in kept else share) for f in fields(self)})
