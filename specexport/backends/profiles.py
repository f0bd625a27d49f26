"""Which optimization profiles an engine gets, and the shapes of every input in each."""

from collections.abc import Iterator, Mapping, Sequence

from specexport_runtime.abi import (
    ALIGNED_STEP_INPUTS,
    CACHE_INPUTS,
    STEP_INPUTS,
    TOKEN_FEATURES,
    LayerGeometry,
    StepShape,
    kv_slack,
    with_feature_size,
)
from specexport_runtime.bundle.profiles import HeadSteps, Profile, ProfileKind

SMALLEST_PREFILL = 64
"""Tokens of the smallest prefill bucket. Up to about this many tokens a step costs what reading the weights costs."""

_ROW_ENTRIES = 16

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, optimal and largest shape of an input in a profile."""


def buckets(largest: int, smallest: int = 1) -> list[int]:
    """Powers of two from ``smallest`` up to ``largest``, and ``largest`` itself: ``buckets(6)`` is 1, 2, 4, 6."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def plan_profiles(
    role: str,
    *,
    lookahead: int,  # K; the target's verify profile has exactly K+1 tokens a row
    max_num_seqs: int,  # the largest batch bucket
    max_num_tokens: int,  # the largest prefill bucket
    fold: int = 1,  # tokens of a row that the attention takes for heads, see ``lowering.trt_native``
    head: HeadSteps | None = None,  # steps of a draft head
) -> tuple[Profile, ...]:
    """Profiles of a model: decode and verify (or catch-up) for every batch bucket, prefill for any rows."""
    batches = buckets(max_num_seqs)
    kinds = _fixed_kinds(role, most_new_tokens(role, lookahead, head), head)
    fixed = [
        Profile(kind, rows, new, rows * new, rows * logits, fold) for kind, new, logits in kinds for rows in batches
    ]
    prefill = [
        Profile("prefill", max_num_seqs, tokens, tokens, min(tokens, max_num_seqs * (lookahead + 1)), fold)
        for tokens in buckets(max_num_tokens, min(SMALLEST_PREFILL, max_num_tokens))
    ]
    return (*fixed, *prefill)


def _fixed_kinds(role: str, width: int, head: HeadSteps | None) -> tuple[tuple[ProfileKind, int, int], ...]:
    """Kind, tokens a row and rows of logits a row of each fixed profile."""
    if head is not None:
        alone: tuple[tuple[ProfileKind, int, int], ...] = (("decode", 1, 1), ("catch-up", width, head.logits))
        return alone if head.steps_alone else (("draft", width, head.logits),)
    return (("decode", 1, 1), ("verify" if role == "target" else "catch-up", width, width))


def most_new_tokens(role: str, lookahead: int, head: HeadSteps | None = None) -> int:
    """Tokens a row in the widest step that is no prefill: a draft model is fed two after a fully accepted round."""
    if head is not None:
        return head.width
    return lookahead + 1 if role == "target" else 2


def engine_kv_capacity(max_model_len: int, lookahead: int, width: int | None = None) -> int:
    """L of an engine with fixed profiles: what a row needs, and entries that rows outside the step write to.

    Rounded up, so that every row begins at an address that TensorRT takes (a multiple of 256 bytes).
    """
    needed = max_model_len + kv_slack(lookahead) + (lookahead + 1 if width is None else width)
    return -(-needed // _ROW_ENTRIES) * _ROW_ENTRIES


def input_shapes(
    profile: Profile, names: Sequence[str], layers: Sequence[LayerGeometry], kv_capacity: int, feature_size: int = 0
) -> dict[str, Shapes]:
    """Smallest, optimal and largest shape of every input of an engine in ``profile``."""
    smallest = optimum = largest = profile.largest
    if not profile.is_fixed:
        smallest = StepShape(0, 1, 1, 1, 1, fold=profile.fold)
        optimum = largest._replace(num_seqs=1, num_logit_rows=1)
    features = with_feature_size(TOKEN_FEATURES, feature_size)
    specs = {spec.name: spec for spec in (*STEP_INPUTS, *ALIGNED_STEP_INPUTS, features)}
    found: dict[str, Shapes] = {}
    for name in names:
        low, best, high = (shape.shape_of(specs[name]) for shape in (smallest, optimum, largest))
        found[name] = (low, best, high)
    rows = (smallest.num_seqs, optimum.num_seqs, largest.num_seqs)
    for name, tail in _cache_shapes(layers, kv_capacity):
        low, best, high = ((count, *tail) for count in rows)
        found[name] = (low, best, high)
    return found


def _cache_shapes(layers: Sequence[LayerGeometry], kv_capacity: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for i, layer in enumerate(layers):
        for spec, dim in zip(CACHE_INPUTS, (layer.k_dim, layer.v_dim), strict=True):
            yield spec.name.format(i=i), (layer.kv_heads, kv_capacity, dim)


def kv_bytes(layers: Sequence[LayerGeometry], kv_capacity: int, num_rows: int, item_bytes: int) -> int:
    """Bytes of a KV arena of ``num_rows`` rows."""
    values = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in layers)
    return values * kv_capacity * num_rows * item_bytes


def describe_shapes(shapes: Mapping[str, Shapes]) -> str:
    """One line for the build log."""
    return ", ".join(f"{name} {low}..{high}" for name, (low, _, high) in shapes.items() if "cache" not in name)
