"""Bundles for the checks: found where they were built before, or built on the spot; and their executors."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from specexport_runtime.bundle.opened import Bundle, load_bundle
from specexport_runtime.bundle.profiles import Profile, ProfileKind
from specexport_runtime.executors.base import Executor
from specexport_runtime.executors.open import open_executor as open_engine
from tools.gpu_check_lib.context import Context, SkipTaskError
from tools.gpu_check_lib.models import ensure_pair

CPU = "ort-cpu"


class BundlePlan(NamedTuple):
    """One of the bundles."""

    model: str  # its sizes, by name
    is_decisive: bool  # see ``make_tensors``
    has_draft: bool  # a layer-skipping one
    lookahead: int  # K
    max_model_len: int  # most tokens of a sequence
    max_num_seqs: int  # cache rows


PLANS = {
    "tiny": BundlePlan("tiny", True, True, 4, 256, 4),
    "small": BundlePlan("small", False, False, 4, 8704, 8),
    "large-speed": BundlePlan("large", True, True, 8, 8704, 8),
}
"""Long enough for 8,192 entries and what is decoded behind them. With more rows the masks of folded attention would be
larger than a build allows (``MAX_MASK_BYTES``), and TensorRT would copy the caches."""
MAX_NUM_TOKENS = 128  # of a prefill, which those masks grow with too
# The large model's profiles are few, because each has kernels to be chosen; other steps are padded up to the next one.
LARGE_BATCHES = (1, 8, 32)
LARGE_VERIFY = (3, 5, 9)


def sm_of_gpu() -> str:
    """Architecture of the GPU, for example ``"90"``; SpecexportError if there is none."""
    from specexport_runtime.executors.cuda_driver import CudaDriver

    driver = CudaDriver()
    try:
        return driver.info().sm.removeprefix("sm")
    finally:
        driver.close()


def choose_sm() -> str:
    """The architecture to build for TensorRT-RTX, the GPU's; SkipTaskError where the package has no kernels for it."""
    from specexport.backends.trt_package import TENSORRT_RTX, known_architectures

    sm = sm_of_gpu()
    if sm not in known_architectures(TENSORRT_RTX):
        raise SkipTaskError(f"TensorRT-RTX has no kernels for sm {sm}")
    return sm


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


def build(
    context_work: Path,  # folder of checkpoints and bundles
    name: str,  # one of ``PLANS``
    backend: str,
    *,
    sm: Sequence[str] = (),  # TensorRT architectures; empty for the GPU's own
    lowering: str = "auto",  # of TensorRT
    output: Path | None = None,  # None for a folder in ``context_work``
    quantize: str | None = None,  # how the target's weights are quantized
) -> Path:
    """Build a bundle, unless it is there already; returns its folder."""
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    plan = PLANS[name]
    target, draft = ensure_pair(context_work / "checkpoints", plan.model, decisive=plan.is_decisive)
    limits: dict[str, Any] = {"max_num_seqs": plan.max_num_seqs, "max_num_tokens": MAX_NUM_TOKENS, "sm": tuple(sm)}
    options = limits | {"lowering": lowering} if backend.startswith("tensorrt") else {}
    folder = output or context_work / "bundles" / _folder_name(name, backend, lowering)
    recipe = BuildRecipe(
        target=str(target), draft=str(draft) if plan.has_draft else None, output=str(folder), backend=backend,
        lookahead=plan.lookahead, max_model_len=plan.max_model_len, quantize=quantize, check=False, **options,
    )  # fmt: skip
    with ExitStack() as stack:
        if name == "large-speed":
            stack.enter_context(mock.patch("specexport.backends.tensorrt.plan_profiles", large_profiles))
        build_bundle(recipe, use_cache=False, force=True)
    return folder


def _folder_name(name: str, backend: str, lowering: str) -> str:
    """Name of a bundle's folder: one for each lowering, where there are several."""
    is_plain = lowering == "auto" or not backend.startswith("tensorrt")
    return f"{name}-{backend}" if is_plain else f"{name}-{backend}-{lowering}"


def get_bundle(context: Context, name: str, backend: str) -> Bundle:
    """A bundle, one of ``PLANS``, built now if it is not there."""
    start = time.monotonic()
    sm = (choose_sm(),) if backend == "tensorrt-rtx" else ()
    folder = build(context.work, name, backend, sm=sm, lowering=context.lowering)
    seconds = time.monotonic() - start
    context.recorder.row(
        f"bundle {name} for {backend}", f"built here in {seconds:.1f} s", is_detail=True, seconds=seconds
    )
    return load_bundle(folder, max_num_seqs=PLANS[name].max_num_seqs)


def open_executor(bundle: Bundle, role: str, *, graphs: bool, num_rows: int = 0) -> Executor:
    """The executor of one model; with ``graphs`` CUDA graphs are recorded.

    ``num_rows`` are cache rows; 0 stands for all that the bundle takes.
    """
    if num_rows:
        bundle = bundle._replace(max_num_seqs=num_rows)
    on_gpu = bundle.manifest.models[role].backend != "ort-cpu"
    return open_engine(bundle, role, num_threads=None, spin=False, cuda_graphs=graphs if on_gpu else None)
