"""A GPU and a TensorRT engine in numpy, strict on purpose: for tests of everything above them.

The engine computes the graph of the contract over the GPU's memory. Its cache holds two "layers": token ids, and for
every entry a number made of all ids up to it, as attention saw them. Logits of a token come from the ids that its own
slot of attention saw, and are NaN where any number in the cache is not the one that belongs there.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specexport_runtime.abi import LayerGeometry, with_feature_size
from specexport_runtime.bundle.entry import EngineFile, ModelEntry
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.gpu import ALIGNMENT, GpuInfo
from specexport_runtime.executors.logit_rows import argmax_ids
from specexport_runtime.executors.trt import TrtExecutor
from specexport_runtime.executors.trt_engine import EngineTensor
from specexport_runtime.executors.trt_pack import SPECS
from tests.support.cases import entries
from tests.support.fakes import row_twin
from tools.proof.devices import HostGpu, memory_at

LAYERS = (LayerGeometry(1, 128, 128),)
PLUGIN = ("input_ids", "positions", "logit_rows", "kv_lens", "cu_new_tokens")
NATIVE = (*PLUGIN, "row_totals", "tile_index", "untile_index")
Array, Step, Seen = np.ndarray, dict[str, np.ndarray], list[np.ndarray | None]


def make_profiles(lookahead: int, rows: int, tokens: int = 64, *, draft: bool = False) -> tuple[Profile, ...]:
    """Profiles as the compiler plans them, for batches of 1, 2, 4 … rows."""
    batches = [count for count in (1, 2, 4, 8) if count < rows] + [rows]
    kind, width = ("catch-up", 2) if draft else ("verify", lookahead + 1)
    fixed = [Profile(k, b, q, b * q, b * q) for k, q in (("decode", 1), (kind, width)) for b in batches]
    sizes = [size for size in (16, 32) if size < tokens] + [tokens]
    ranged = [Profile("prefill", b, t, t, min(t, b * (lookahead + 1))) for t in sizes for b in batches]
    return (*fixed, *ranged)


def make_entry(lookahead: int = 4, rows: int = 4, max_model_len: int = 64, **changes: object) -> ModelEntry:
    draft = bool(changes.pop("draft", False))
    tokens = changes.pop("tokens", 64)
    fields = {
        "path": "target/model.sm89.engine", "backend": "tensorrt-rtx", "dtype": "float16", "layers": LAYERS,
        "inputs": NATIVE, "lowering": "native",
        "files": (EngineFile("target/model.sm89.engine", "sm89", "tensorrt-rtx", "1.7.1.116", 4096),),
        "profiles": make_profiles(lookahead, rows, tokens, draft=draft),
        "kv_capacity": max_model_len + 2 * (lookahead + 1), "max_num_seqs": rows,
    }  # fmt: skip
    return entries.make_entry(**{**fields, **changes})


class FakeGpu(HostGpu):
    """Counts what it is asked; recordings fail from ``fail_capture`` on; ``claims``: free bytes of ``info``."""

    def __init__(
        self, free: int = 1 << 24, sm: str = "sm89", fail_capture: int | None = None, claims: int | None = None
    ) -> None:
        super().__init__(free)
        self.calls: Counter[str] = Counter()
        self.log: list[str] = []
        self.copied: list[int] = []
        self.fail_capture, self._sm, self._claims = fail_capture, sm, claims
        self._pinned: set[int] = set()
        self.captures = 0
        self.closed = False

    @property
    def in_use(self) -> int:
        return len(self._memory) + len(self._graphs)

    def info(self) -> GpuInfo:
        free = self._total - self._used if self._claims is None else self._claims
        return GpuInfo("FakeGPU", self._sm, self._total, free)

    def allocate(self, num_bytes: int, what: str) -> int:
        self.calls["allocate"] += 1
        address = super().allocate(num_bytes, what)
        self._pinned.remove(address)
        self._used += self._memory[address].size
        return address

    def free(self, address: int) -> None:
        if address in self._pinned:  # of the host: no memory of the device
            self._pinned.remove(address)
            self._used += self._memory[address].size
        super().free(address)

    def allocate_host(self, num_bytes: int) -> np.ndarray:
        memory = super().allocate_host(num_bytes)
        self._pinned.add(memory.ctypes.data)
        self._used -= memory.size
        return memory

    def bytes(self, address: int, num_bytes: int, *, pinned: bool = False) -> np.ndarray:
        """Memory inside one allocation, of the device or of the host."""
        found = self._bytes(address, num_bytes)
        if pinned != any(start <= address < start + self._memory[start].size for start in self._pinned):
            raise SpecexportError(f"illegal address {address:#x}, pinned or not")
        return found

    def array(self, address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return self.bytes(address, int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    def note(self, name: str, operation: Callable[[], None] | None = None) -> None:
        """Count what was asked, and put it on the stream, or into the recording."""
        self.calls[name] += 1
        self.log.append(name)
        if operation is not None:
            self.put(self.stream, operation)

    def clear(self, address: int, num_bytes: int) -> None:
        self.note("clear", lambda: self.bytes(address, num_bytes).fill(0))

    def copy_in(self, destination: int, source: int, num_bytes: int, *, out: bool = False) -> None:
        def copy() -> None:
            self.bytes(destination, num_bytes, pinned=out)[:] = self.bytes(source, num_bytes, pinned=not out)

        self.copied.append(num_bytes)
        self.note("copy_out" if out else "copy_in", copy)

    def copy_out(self, destination: int, source: int, num_bytes: int) -> None:
        self.copy_in(destination, source, num_bytes, out=True)

    def copy_rows(self, destination: int, source: int, width: int, height: int, pitch: int) -> None:
        assert width <= pitch
        self.note("copy_rows")
        super().copy_rows(destination, source, width, height, pitch)

    def synchronize(self) -> None:
        self.note("synchronize")
        super().synchronize()

    def begin_capture(self) -> None:
        assert self._recording is None
        assert not self._queue, "a recording begins on an idle stream"
        self.log.append("begin_capture")
        super().begin_capture()

    def end_capture(self) -> int:
        assert self._recording is not None
        recorded, self._recording = self._recording, None
        self.captures += 1
        if self.fail_capture is not None and self.captures > self.fail_capture:
            raise SpecexportError("cudaErrorStreamCaptureInvalidated")
        self._graphs[self.captures] = recorded
        return self.captures

    def launch(self, graph: int) -> None:
        self.note("launch")
        super().launch(graph)

    def free_graph(self, graph: int) -> None:
        del self._graphs[graph]

    def launch_kernel(self, kernel: int, grid: tuple[int, int, int], threads: int, shared: int, arguments) -> None:
        twin = row_twin.KERNELS[self._kernels[kernel]]
        self.note("launch_kernel", lambda: twin(memory_at, grid, *arguments))

    def close(self) -> None:
        super().close()
        self.closed = True


class FakeEngine:
    """An engine whose weights are a ``FakeExecutor``'s. ``broken`` names a profile that fails when it is enqueued."""

    def __init__(self, gpu: FakeGpu, entry: ModelEntry, model: FakeExecutor) -> None:
        self.gpu, self.entry, self.model = gpu, entry, model
        self.activation_bytes = 4096
        inner = (1, entry.engine.limits.kv_capacity, 128)
        lead = (
            (-1, 1) if entry.engine.lowering == "plugin" else (-1,)
        )  # the plugin keeps the contract's five dimensions
        caches = [EngineTensor(f"{k}_cache{o}.0", (*lead, *inner), not o) for k in "kv" for o in ("", "_out")]
        steps = [EngineTensor(name, tuple(-1 for _ in SPECS[name].shape), True) for name in entry.engine.inputs]
        outputs = [EngineTensor("logits", (-1, entry.vocab_size), False), EngineTensor("token_ids", (-1,), False)]
        self.tensors = (*steps, *caches, *outputs)
        self.contexts: list[FakeContext] = []
        self.runs: list[Profile] = []
        self.capturable = True
        self.broken: str | None = None
        self.closed = False

    def make_context(self, profile: int, activations: int, stream: int, *, is_fixed: bool) -> "FakeContext":
        assert stream == self.gpu.stream
        assert is_fixed == self.entry.engine.limits.profiles[profile].is_fixed
        assert all(context.profile is not self.entry.engine.limits.profiles[profile] for context in self.contexts)
        self.gpu.bytes(activations, self.activation_bytes)
        self.contexts.append(FakeContext(self, self.entry.engine.limits.profiles[profile]))
        return self.contexts[-1]

    def close(self) -> None:
        self.closed = True


def digest(ids: np.ndarray) -> int:
    """A number that float16 holds exactly, made of all ids in order."""
    value = 1
    for token in ids.tolist():
        value = (value * 31 + token + 7) % 2039
    return value


class FakeContext:
    def __init__(self, engine: FakeEngine, profile: Profile) -> None:
        self.engine, self.profile = engine, profile
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = next(tensor for tensor in self.engine.tensors if tensor.name == name and tensor.is_input)
        assert len(shape) == len(tensor.shape)
        assert all(known in (-1, size) for size, known in zip(shape, tensor.shape, strict=True)), (name, shape)
        if name in SPECS:
            most = self.profile.largest.shape_of(with_feature_size(SPECS[name], self.engine.entry.engine.feature_size))
            assert all(size <= limit for size, limit in zip(shape, most, strict=True)), (name, shape, self.profile)
            if self.profile.is_fixed:
                assert shape == most, (name, shape, self.profile)
        self.shapes[name] = shape

    def set_address(self, name: str, address: int) -> None:
        assert name in {tensor.name for tensor in self.engine.tensors}
        assert address % ALIGNMENT == 0
        self.addresses[name] = address

    def is_capturable(self, stream: int) -> bool:
        return self.engine.capturable

    def enqueue(self, stream: int) -> None:
        assert stream == self.engine.gpu.stream
        if self.engine.broken == self.profile.name:
            raise SpecexportError(f"TensorRT could not run the step: {self.profile.name}")
        assert set(self.addresses) == {tensor.name for tensor in self.engine.tensors}
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        self.engine.gpu.note("enqueue", lambda: self.run(shapes, addresses))

    def run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        engine, gpu = self.engine, self.engine.gpu
        engine.runs.append(self.profile)
        step = {
            name: gpu.array(addresses[name], shapes[name], SPECS[name].dtype) for name in engine.entry.engine.inputs
        }
        num_seqs, num_tokens = len(step["kv_lens"]), len(step["input_ids"])
        capacity = engine.entry.engine.limits.kv_capacity
        caches = []
        for kind in "kv":
            name = f"{kind}_cache.0"
            assert shapes[name][0] == num_seqs
            assert addresses[name] == addresses[f"{kind}_cache_out.0"]
            caches.append(gpu.array(addresses[name], (num_seqs, capacity, 128), "float16"))
        attend = self.attend_packed if engine.entry.engine.lowering == "plugin" else self.attend_native
        seen = attend(step, *caches, num_tokens)
        logits = np.full((len(step["logit_rows"]), engine.entry.vocab_size), np.nan, np.float32)
        for i, token in enumerate(step["logit_rows"].tolist()):
            assert 0 <= token < num_tokens
            ids = seen[token]
            if ids is not None:
                logits[i] = engine.model.logits_after(ids)
        gpu.array(addresses["logits"], logits.shape, "float32")[:] = logits
        gpu.array(addresses["token_ids"], (len(logits),), "int64")[:] = argmax_ids(logits)

    def write(self, step: dict[str, np.ndarray], keys: np.ndarray) -> list[tuple[int, int]]:
        """Layer 0: ids go to the cache. Returns the row and the entry of each token that has a row."""
        cu, kv_lens = step["cu_new_tokens"], step["kv_lens"][:, 0]
        assert cu[0] == 0
        assert (np.diff(cu) >= 0).all()
        places = []
        for row, kv_len in enumerate(kv_lens.tolist()):
            for j, token in enumerate(range(cu[row], cu[row + 1])):
                assert 0 <= kv_len + j < keys.shape[1], "beyond the cache"
                assert 0 <= step["input_ids"][token] < self.engine.entry.vocab_size
                keys[row, kv_len + j] = step["input_ids"][token]
                places.append((row, kv_len + j))
        return places

    def attend_native(self, step: Step, keys: Array, values: Array, num_tokens: int) -> Seen:
        """Right-aligned tiles: slot j of row b sees the first ``row_totals[b] - Q + j + 1`` entries."""
        tile, untile, totals = step["tile_index"], step["untile_index"], step["row_totals"][:, 0]
        assert step["cu_new_tokens"][-1] == num_tokens, "every token belongs to a row"
        assert ((tile >= 0) & (tile < num_tokens)).all()
        places = self.write(step, keys)
        assert np.isfinite(keys).all()
        assert np.isfinite(values).all()
        assert (totals >= 1).all()
        assert (totals <= keys.shape[1]).all()
        width = tile.shape[1]
        seen: Seen = []
        for token in range(num_tokens):
            row, slot = divmod(int(untile[token]), width)
            visible = int(totals[row]) - width + slot + 1
            same = (
                step["input_ids"][tile[row, slot]] == step["input_ids"][token]
                and step["positions"][tile[row, slot]] == step["positions"][token]
            )
            seen.append(self.check(step, token, places[token], row, visible if same else 0, keys, values))
        return seen

    def attend_packed(self, step: Step, keys: Array, values: Array, num_tokens: int) -> Seen:
        """Ragged attention: a token sees its row up to itself; tokens of no row see nothing."""
        places = self.write(step, keys)
        assert np.isfinite(keys).all()
        seen = [
            self.check(step, token, (row, entry), row, entry + 1, keys, values)
            for token, (row, entry) in enumerate(places)
        ]
        return [*seen, *[None] * (num_tokens - len(seen))]

    def check(
        self, step: Step, token: int, place: tuple[int, int], row: int, visible: int, keys: Array, values: Array
    ) -> Array | None:
        """Layer 1: what attention saw, or None if it was not the token's own row up to the token."""
        own_row, entry = place
        ids = keys[row, : max(visible, 0), 0].astype(np.int64)
        fits = row == own_row and visible == entry + 1 and step["positions"][token] == entry
        fits = fits and all(values[row, e, 0] == digest(ids[: e + 1]) for e in range(max(0, visible - 4), visible - 1))
        values[own_row, entry] = digest(ids) if fits else 2040
        return ids if fits else None


def open_fake(
    folder: Path, entry: ModelEntry, model: FakeExecutor, gpu: FakeGpu | None = None, **options: object
) -> tuple[TrtExecutor, FakeGpu, FakeEngine]:
    gpu = gpu or FakeGpu()
    engine = FakeEngine(gpu, entry, model)
    path = folder / entry.engine.files[0].path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"engine" * 100)
    options = {"num_rows": entry.engine.limits.max_num_seqs, "load": lambda *_: engine, **options}
    executor = TrtExecutor(entry, entry.engine.files[0], folder, driver=gpu, **options)
    return executor, gpu, engine
