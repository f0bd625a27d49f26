"""Sessions, buffers and timing of one step, for ``self_draft_mechanisms.py``."""

from pathlib import Path
from typing import Any

import numpy as np
from common import median, timed

PAST = 64
CAPACITY = 128


def anonymous_bytes() -> int:
    """Anonymous memory of this process, after giving back what the allocator holds in vain (Linux, glibc)."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def open_session(path: Path, threads: int, *, mapped: bool = False) -> Any:
    """A session; ``mapped``: of a graph that is optimized and has its packed weights in a file."""
    import onnxruntime as ort

    from specexport_runtime.executors.operators import register

    options = ort.SessionOptions()
    register(options)
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # many sessions must not spin at a time
    if mapped:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Step:
    """Buffers of one step: what the host fills, the caches, and what passes from session to session."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)
        self.arrays: dict[str, np.ndarray] = {
            "input_ids": np.array([17]),
            "positions": np.array([PAST]),
            "logit_rows": np.array([0]),
            "kv_lens": np.array([[PAST]], np.int32),
            "cu_new_tokens": np.array([0, 1], np.int32),
            "row_starts": np.array([[0]]),
            "row_ends": np.array([[1]]),
            "row_totals": np.array([[PAST + 1]], np.int32),
            "pad_index": np.zeros((1, 1, 1), np.int64),
            "unpad_index": np.array([0]),
            "want_similarity": np.array([False]),
        }

    def cache(self, name: str, heads: int, head_dim: int) -> np.ndarray:
        """The cache of that name: the same numbers in every process."""
        if name not in self.arrays:
            values = np.random.default_rng(sum(map(ord, name))).standard_normal((1, 1, heads, CAPACITY, head_dim))
            self.arrays[name] = values.astype(np.float32)
        return self.arrays[name]

    def bind(self, session: Any, aliases: dict[str, str] | None = None) -> Any:
        """Bind everything of a session; ``aliases`` gives a value the buffer of another."""
        io, aliases = session.io_binding(), aliases or {}
        for value in session.get_inputs():
            if "_cache." in value.name:
                self.cache(value.name, value.shape[2], value.shape[4])
            array = self.arrays[aliases.get(value.name, value.name)]
            io.bind_input(value.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for value in session.get_outputs():
            name = value.name.replace("_cache_out.", "_cache.")
            array = self.arrays.get(aliases.get(name, name))
            if array is None:
                io.bind_output(value.name, "cpu")
            else:
                io.bind_output(value.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return io


def measure(step: Step, run: dict[str, Any], steps: int) -> dict[str, Any]:
    """Milliseconds of a full and a draft step, alternating, and the logits of both."""
    seconds: dict[str, list[float]] = {name: [] for name in run}
    logits = {}
    for name, function in run.items():
        for _ in range(3):
            function()
        logits[name] = step.arrays["logits"].copy()
    for _ in range(steps):
        for name, function in run.items():
            function()
            seconds[name].append(timed(function)[0])
    result = {f"{name}_ms": 1e3 * median(values) for name, values in seconds.items()}
    return result | {"logits": logits, "anonymous_mb": anonymous_bytes() / 2**20}  # while the sessions are there
