"""Section 3, second half: time of the attention kernel against the copy bandwidth."""
# mypy: disable-error-code="no-any-unimported"

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.kernels import Case, expected, make_inputs
from tools.gpu_check_lib.needs import require_gpu
from tools.gpu_check_lib.rows import judge
from tools.gpu_check_lib.timing import copy_bandwidth, gigabytes_per_second, kv_step_bytes, num_sets, time_rotating

if TYPE_CHECKING:
    from torch import Tensor

NUM_SEQS, NEW_TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 8, 5, 32, 8, 128
PASTS = (4096, 8192, 16384)
COPY_TARGET = 0.8
TOLERANCE = 3e-2  # bfloat16

Tensors = Mapping[str, "Tensor"]


def case_of(past: int) -> Case:
    """The step of the target: B=8, 5 new tokens, 32 query heads on 8 KV heads of 128."""
    return Case(rows=((past, NEW_TOKENS),) * NUM_SEQS, heads=HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE)


def measure_kernels(context: Context) -> None:
    """The table of the attention kernel."""
    import torch

    require_gpu()
    for past in PASTS:
        what = f"attention, B={NUM_SEQS}, {NEW_TOKENS} new tokens, {past} past, bfloat16"
        with context.part(what):
            if context.has_time(what, 10):
                measure_past(context, what, past)
        torch.cuda.empty_cache()


def measure_past(context: Context, what: str, past: int) -> None:
    """One length: our kernel, splits beside its choice, the copy bandwidth."""
    import torch

    device = torch.cuda.get_device_properties(0)
    cache_bytes = int(getattr(device, "L2_cache_size", 0)) or 64 * 2**20
    case = case_of(past)
    num_bytes = kv_step_bytes(NUM_SEQS, KV_HEADS, past + NEW_TOKENS, HEAD_SIZE, 2)
    sets = [filled(case) for _ in range(num_sets(num_bytes, cache_bytes))]
    right = expected(case, sets[0]["q"], sets[0]["k_cache"], sets[0]["v_cache"], HEAD_SIZE**-0.5)
    sm = 10 * device.major + device.minor
    chosen = _chosen_splits(sm, past, device.multi_processor_count)
    ours, how = time_rotating([call(tensors, chosen) for tensors in sets])
    require_right(call(sets[0], chosen)(), right)
    copied = copy_bandwidth(num_bytes, cache_bytes)
    achieved = gigabytes_per_second(num_bytes, ours)
    row = context.recorder.row
    row(what, f"{1e3 * ours:.1f} us, {achieved:.0f} GB/s of KV bytes with {chosen} splits ({how})",
        milliseconds=ours, kv_bytes=num_bytes, gb_per_s=achieved, splits=chosen)  # fmt: skip
    row(f"{what}: of the copy bandwidth ({copied:.0f} GB/s, read plus written)", f"{achieved / copied:.1%}",
        target=f"at least {COPY_TARGET:.0%}", verdict=judge(achieved / copied, at_least=COPY_TARGET),
        copy_gb_per_s=copied)  # fmt: skip
    _try_splits(context, what, sets, chosen)


def filled(case: Case) -> "dict[str, Tensor]":
    """Inputs whose caches hold the step's entries already, the rest zero: no NaN for kernels that do not mask loads."""
    inputs = make_inputs(case, "bfloat16", "cuda")
    for name in ("k_cache", "v_cache"):
        inputs[name] = inputs[name].normal_()
    return inputs


def _chosen_splits(sm: int, past: int, multiprocessors: int) -> int:
    from specexport.kernels.spec import KernelSpec

    spec = KernelSpec(
        kernel="ragged_attention", dtype="bfloat16", num_heads=HEADS, kv_num_heads=KV_HEADS, head_size=HEAD_SIZE,
        new_tokens=NEW_TOKENS,
    )  # fmt: skip
    return spec.with_splits(sm, num_seqs=NUM_SEQS, kv_len=past, multiprocessors=multiprocessors).num_splits


def call(tensors: Tensors, splits: int) -> "Callable[[], Tensor]":
    """Our kernel on the inputs of a step, from :func:`filled`, to be called."""
    from specexport.kernels import launch

    def run() -> "Tensor":
        names = ("q", "k_cache", "v_cache", "kv_lens", "cu_new_tokens")
        return launch.ragged_attention(
            *(tensors[name] for name in names), scale=HEAD_SIZE**-0.5, num_splits=splits, new_tokens=NEW_TOKENS,
        )  # fmt: skip

    return run


def require_right(output: "Tensor", right: "Tensor") -> None:
    """Refuse a result (CheckFailedError) that is off the reference's by more than rounding."""
    from specexport_runtime.errors import CheckFailedError

    error = float((output[: len(right)].float() - right).abs().max())
    if not error <= TOLERANCE:
        raise CheckFailedError(f"off by {error:.1e}")


def _try_splits(context: Context, what: str, sets: "list[dict[str, Tensor]]", chosen: int) -> None:
    """Other split counts, for tuning."""
    found = []
    for splits in (1, 2, 4, 8, 16):
        if splits != chosen and context.left > 8:
            milliseconds, _ = time_rotating([call(tensors, splits) for tensors in sets])
            found.append(f"{splits}: {1e3 * milliseconds:.1f} us")
    context.recorder.row(f"{what}: other splits", ", ".join(found) or "no time", is_detail=True)
