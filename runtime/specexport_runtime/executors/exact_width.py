"""Where the length of a step changes the last bit of attention, and how drafts stay clear of it.

Rounding to int8 turns a difference of 1e-7 into one of half a step now and then, so in a quantized model a token's
numbers must not depend on the step it is in. The matrix product of ONNX Runtime's attention (MLAS) sums heads of up to
128 values in one piece; longer heads in pieces of 128 if there are more than 64 columns (cache entries that the step
sees), else in one. A step that sees 64 entries and one that sees 65 therefore differ. Plain decoding crosses that
border once in a text; a draft must not make it cross earlier.
"""

from specexport_runtime.bundle.manifest import ModelEntry

_WHOLE_HEAD = 128
_FEW_COLUMNS = 64


def sum_border(entry: ModelEntry) -> int:
    """Entries up to which a step sums otherwise than beyond; 0 where there is no such border, or it does not matter."""
    # The kernel for int8 caches adds up in one order at every width.
    exact = (
        entry.quantize is not None
        and entry.kv_dtype != "int8"
        and any(layer.k_dim > _WHOLE_HEAD for layer in entry.layers)
    )
    return _FEW_COLUMNS if exact else 0


def room_within(border: int, length: int, *, reads_prompt: bool) -> int | None:
    """Most draft tokens of a step that keep each token on the side of the border where plain decoding has it.

    Plain decoding of one token sees one entry more than the text is long: it runs each token twice (see the lowering).
    A step that ends a prompt sees the prompt.

    Args:
        border: from :func:`sum_border`, not 0.
        length: tokens of the sequence, the one that is not in the cache yet included.
        reads_prompt: the step ends the prompt.

    Returns:
        the most draft tokens; None for no limit.
    """
    if length > border - (not reads_prompt):
        return None
    return max(0, border - 1 - length)
