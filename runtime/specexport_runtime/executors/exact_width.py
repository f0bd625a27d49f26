"""Where the length of a step changes the last bit of attention, and how steps stay clear of it.

Rounding to int8 turns a difference of 1e-7 into one of half a step now and then, so in a quantized model a token's
numbers must not depend on the step it is in. The matrix product of ONNX Runtime (MLAS) packs a panel of 128 columns by
128 values. Where there are fewer columns (cache entries that the step sees) it halves the width and doubles the depth,
so that heads of more than 128 values are summed in one piece up to 64 columns and in two beyond; those of more than 256
have a border at 32 as well, those of more than 512 at 16. Plain decoding crosses each border once in a text; a draft
must not make it cross earlier, and a prompt must not be cut there. The product with the values has no border: what it
sums is cut at multiples of the depth, whatever the length.

Flash attention would have these borders in each of its tiles, whose size it takes from the processor's L2 cache: with
1 MB and heads of 256 values, at 64, 192, 320 and so on. So these models do without it (see ``flash_attention``).
"""

from specexport_runtime.abi import LONGEST_WHOLE
from specexport_runtime.bundle.manifest import ModelEntry

_BORDERS = ((16, 512), (32, 256), (64, LONGEST_WHOLE))
"""Columns up to which a head is summed in longer pieces, and the size of a head beyond which that matters."""


def sum_borders(entry: ModelEntry) -> tuple[int, ...]:
    """Entries up to which a step sums otherwise than beyond, ascending; none where there is no such border.

    None either where it does not matter.
    """
    # The kernel for int8 caches adds up in one order at every width.
    if entry.quantize is None or entry.kv_dtype == "int8":
        return ()
    longest = max([layer.k_dim for layer in entry.layers], default=0)
    return tuple(columns for columns, whole in _BORDERS if longest > whole)


def room_within(borders: tuple[int, ...], length: int, *, reads_prompt: bool) -> int | None:
    """Most draft tokens of a step that keep each token on the side of every border where plain decoding has it.

    Plain decoding of one token sees one entry more than the text is long: it runs each token twice (see the lowering).
    A step that ends a prompt sees the prompt.

    Args:
        borders: from :func:`sum_borders`.
        length: tokens of the sequence, the one that is not in the cache yet included.
        reads_prompt: the step ends the prompt.

    Returns:
        the most draft tokens; None for no limit.
    """
    for border in borders:
        if length <= border - (not reads_prompt):
            return max(0, border - 1 - length)
    return None


def chunk_bounds(borders: tuple[int, ...], prompt_tokens: int, start: int, end: int) -> tuple[int, int]:
    """Fewest and most tokens of the next step that reads a prompt, or what was generated behind it again.

    With these a token of a prompt sees what it sees where the prompt is read in one step, and one that was generated
    what it sees in plain decoding: two entries more than there are tokens before it.

    Args:
        borders: from :func:`sum_borders`.
        prompt_tokens: of the sequence.
        start: tokens that were read.
        end: tokens that are to be read, in this step or in later ones; more than ``start``.
    """
    least, most = start + 1, end
    if borders and start < prompt_tokens:
        least = min(prompt_tokens, max(least, borders[-1] + 1), end)
    for border in borders:
        last = max(prompt_tokens, border - 1)  # the first token that sees more than the border
        if prompt_tokens <= border and start < last:
            most = min(most, last)
    return least - start, most - start


def least_first_chunk(borders: tuple[int, ...]) -> int:
    """Tokens that the first step of a longer prompt must read, so that they see what they see in one step with all."""
    return borders[-1] + 1 if borders else 1
