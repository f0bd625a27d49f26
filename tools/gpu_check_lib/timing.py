"""Times of GPU work by CUDA events: buffers rotate so that the L2 cache never holds what comes next."""
# mypy: disable-error-code="no-any-unimported"

import math
import statistics
from collections.abc import Callable, Sequence

WORKING_SET = 4  # times the size of the L2 cache


def kv_step_bytes(num_seqs: int, kv_heads: int, entries: int, head_size: int, item_bytes: int) -> int:
    """Bytes of keys and values that one attention step must read: every entry of every row, once for each KV head.

    ``entries`` are those of each row, the step's own included; ``head_size`` is D of keys and of values.
    """
    return num_seqs * kv_heads * entries * 2 * head_size * item_bytes


def gigabytes_per_second(num_bytes: float, milliseconds: float) -> float:
    """10^9 bytes a second."""
    return num_bytes / milliseconds / 1e6


def num_sets(bytes_of_one: int, cache_bytes: int) -> int:
    """Buffer sets to rotate among, so that each was evicted from the cache before it is read again; at least two."""
    return max(2, math.ceil(WORKING_SET * cache_bytes / bytes_of_one))


def time_rotating(calls: Sequence[Callable[[], object]], *, repeats: int = 20, warm_up: int = 3) -> tuple[float, str]:
    """Median milliseconds of one call, and how it was measured.

    All calls, the same work on different buffers, are recorded into one CUDA graph, which is replayed: so the time
    between launches is the GPU's, not Python's. Where recording fails they are launched one by one. ``repeats`` replays
    are timed, each by a pair of events, behind ``warm_up`` others.
    """
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    replay, how = _record(calls)
    for _ in range(warm_up):
        replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times), how


def _record(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], str]:
    import torch

    def run_all() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run_all()
    except Exception as error:  # some calls synchronize or allocate in ways that cannot be recorded
        torch.cuda.synchronize()
        return run_all, f"launched one by one ({type(error).__name__})"
    return graph.replay, "replayed from a graph"


def copy_bandwidth(num_bytes: int, cache_bytes: int) -> float:
    """GB/s of torch copying a buffer of ``num_bytes`` to another, bytes read plus bytes written."""
    import torch

    pairs = [
        (
            torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(),
            torch.empty(num_bytes, dtype=torch.uint8, device="cuda"),
        )
        for _ in range(num_sets(2 * num_bytes, cache_bytes))
    ]
    calls = [lambda source=source, copy=copy: copy.copy_(source) for source, copy in pairs]
    milliseconds, _ = time_rotating(calls)
    return gigabytes_per_second(2 * num_bytes, milliseconds)
