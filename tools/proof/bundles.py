"""Bundles of random models for the tests and commands that ``tools/gpu.sh`` runs: what is built, and how.

python -m tools.proof.bundles WORK SIZE BACKEND
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from specexport_runtime.bundle.profiles import Profile, ProfileKind
from tools.proof import checkpoints
from tools.proof.checkpoints import ensure_pair, write_prompts


class Size(NamedTuple):
    """A pair of models, and how it is built."""

    model: str  # its sizes, by name
    is_decisive: bool  # see ``make_tensors``
    rate: float  # see ``ensure_pair``
    lookahead: int  # K
    max_model_len: int  # most tokens of a sequence
    max_num_seqs: int  # cache rows


SIZES = {
    "tiny": Size("tiny", True, 0.8, 8, 256, 8),
    "small": Size("small", False, 1.0, 4, 8704, 8),
    **{f"large-{rate:g}": Size("large", True, rate, 8, 8704, 8) for rate in (0.6, 0.8, 0.95)},
}
"""Long enough for 8,192 entries and what is decoded after them. With more rows the masks of folded attention would be
larger than a build allows (``MAX_MASK_BYTES``), and TensorRT would copy the caches."""
MAX_NUM_TOKENS = 128  # of a prefill, which those masks grow with too
# The large model's profiles are few, because each has kernels to be chosen; other steps are padded up to the next one.
LARGE_BATCHES = (1, 8, 32)
LARGE_VERIFY = (3, 5, 9)


def large_profiles(
    role: str, *, max_num_seqs: int = LARGE_BATCHES[-1], max_num_tokens: int = 1, fold: int = 1, **_: int
) -> tuple[Profile, ...]:
    """Profiles of the large model, instead of ``plan_profiles``, which see for the arguments."""
    batches = [rows for rows in LARGE_BATCHES if rows <= max_num_seqs]
    sizes: list[tuple[ProfileKind, int, int]] = [("decode", rows, 1) for rows in batches]
    if role == "target":
        sizes += [("verify", 1, new) for new in LARGE_VERIFY] + [("verify", rows, 5) for rows in batches[1:]]
    else:
        sizes += [("catch-up", rows, 2) for rows in batches]
    fixed = [Profile(kind, rows, new, rows * new, rows * new, fold) for kind, rows, new in sizes]
    widest = max_num_seqs * LARGE_VERIFY[-1]  # where no fixed profile takes so many tokens of so many rows
    tokens = max(widest, max_num_tokens)
    return (*fixed, Profile("prefill", max_num_seqs, tokens, tokens, widest, fold))


def build(work: Path, size: str, backend: str, *, quantize: str | None = None) -> Path:
    """Build a bundle, unless it is there already; returns its folder. Prompts for the commands lie beside it."""
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    folder = work / "bundles" / "-".join(filter(None, (size, backend, quantize)))
    if (folder / "manifest.json").is_file():
        return folder
    plan, options = SIZES[size], dict[str, Any]()
    target, draft = ensure_pair(work / "checkpoints", plan.model, decisive=plan.is_decisive, rate=plan.rate)
    write_prompts(folder.with_name(f"{folder.name}.jsonl"), checkpoints.SIZES[plan.model].vocab)
    if backend.startswith("tensorrt"):
        options = {"max_num_seqs": plan.max_num_seqs, "max_num_tokens": MAX_NUM_TOKENS}
        options |= {"lowering": "plugin"} if backend == "tensorrt-plugin" else {}
    recipe = BuildRecipe(
        target=str(target), draft=str(draft), output=str(folder), backend=backend.removesuffix("-plugin"),
        lookahead=plan.lookahead, max_model_len=plan.max_model_len, quantize=quantize, check=False, **options,
    )  # fmt: skip
    with ExitStack() as stack:
        if plan.model == "large":
            stack.enter_context(mock.patch("specexport.backends.tensorrt.plan_profiles", large_profiles))
        build_bundle(recipe, use_cache=plan.model == "large", force=True)  # all rates have one target
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), *sys.argv[2:]))
