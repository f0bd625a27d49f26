"""Runs the kernels in Triton's interpreter, in a process of its own: Triton decides on import. Also the client."""

import functools
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]


class WorkerError(Exception):
    """The worker's request raised; ``kind`` is the name of its exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class InterpretedKernels:
    """A worker process. ``run`` sends it a step."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.references.kernel_worker"],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        try:
            kind, answer = pickle.load(self._process.stdout)
        except EOFError:  # memory that is not the kernel's
            status = self._process.wait()
            self._start()
            raise WorkerError("Crash", f"the worker ended with status {status}") from None
        if kind:
            raise WorkerError(kind, answer)
        return answer

    def run(self, step: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output of every token, and both caches, of append and attention."""
        return self.ask("run_step", step)

    def ops(self) -> dict[str, Any]:
        """For ``evaluator.make_evaluator``: operators of a graph of plugins."""
        names = ("kv_append", "ragged_attention", "combine_splits")
        return dict.fromkeys(names, lambda spec, inputs: self.ask("run_plugin", spec, inputs))

    def load(self, folder: Path | None) -> None:
        """Take the kernels' sources from a folder; None for the repository's."""
        self.ask("load_kernels", None if folder is None else str(folder))

    def close(self) -> None:
        self._process.communicate()


def mend_interpreter() -> None:
    """Make bf16 right (Triton 3.9 multiplies bits and truncates), and look up the language's functions once."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def widen(handle: Any) -> Any:
        return cast(builder, handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    def mended_cast(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits.reshape(source.data.shape), target.scalar)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    builtins = functools.cache(
        lambda module: [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]
    )

    def patch_builtins(module: Any, builder: Any, scope: Any) -> None:
        for name in builtins(module):
            member = getattr(module, name)
            if tl.core.is_builtin(member):  # not prepared yet
                interpreter._patch_attr(module, name, member, builder, scope)

    builder.cast_impl, builder.create_dot = mended_cast, mended_dot
    interpreter._patch_builtin = patch_builtins


def load_kernels(folder: str | None) -> None:
    """Forget the kernels' modules and let ``folder``, which holds a ``kernels`` package, provide them."""
    import specexport

    for name in [name for name in sys.modules if name.startswith("specexport.kernels")]:
        del sys.modules[name]
    if hasattr(specexport, "kernels"):
        del specexport.kernels
    specexport.__path__[:] = [folder, str(ROOT / "specexport")] if folder else [str(ROOT / "specexport")]


def run_step(step: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Append and attend; memory that the launcher allocates holds NaN."""
    import torch

    from specexport.kernels import launch
    from specexport.kernels.tuning import TileConfig

    case = step.case
    dtype = getattr(torch, case.dtype)
    given = {
        name: torch.from_numpy(array.copy()).to(dtype) if array.dtype == np.float32 else torch.from_numpy(array.copy())
        for name, array in step.arrays.items()
    }
    rows = [given[name] for name in ("k_cache", "v_cache", "kv_lens", "cu_new_tokens")]
    launch.kv_append(given["k"], given["v"], *rows)
    output = launch.ragged_attention(
        given["q"], *rows, tree_mask=given.get("tree_mask"), sinks=given.get("sinks"),
        scale=case.scale, window=case.window, softcap=case.softcap, num_splits=case.splits,
        new_tokens=max(count for _, count in case.rows),
        tiles=TileConfig(*case.tiles, 4, 1) if case.tiles else None,
    )  # fmt: skip
    return tuple(tensor.float().numpy() for tensor in (output, *rows[:2]))


def run_on_meaningless_lengths(seed: int) -> bool:
    """Append and attend with any integers as lengths. Whether memory beside the caches is as it was."""
    import torch

    from specexport.kernels import launch

    random = torch.Generator().manual_seed(seed)
    bound = 2**31 - 1 if seed % 2 else 50

    def numbers(count: int) -> torch.Tensor:
        return torch.randint(-bound, bound, (count,), generator=random, dtype=torch.int64).to(torch.int32)

    q, k = (torch.randn(7, size, generator=random).half() for size in (64, 32))
    # One allocation around the caches: a write beside a cache row shows in its margins.
    memory = torch.zeros(9, 1, 2, 32, 16).half()
    k_cache, v_cache = memory[1:4], memory[5:8]
    lens, cu = numbers(3)[:, None].contiguous(), numbers(4)
    launch.kv_append(k, k, k_cache, v_cache, lens, cu)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for splits in (1, 2):
            launch.ragged_attention(q, k_cache, v_cache, lens, cu, scale=0.25, num_splits=splits, new_tokens=3)
    return not memory[[0, 4, 8]].any()


def run_plugin(spec: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Launch the kernel on the node's inputs, caches as the 5-D memory they are; outputs hold NaN before."""
    import torch

    from specexport.kernels.launch import launch

    signature = spec.signature
    given = {item.name: torch.from_numpy(x.copy()) for item, x in zip(signature.inputs, inputs, strict=True)}
    given |= {name: tensor[:, None] for name, tensor in given.items() if "_cache" in name}
    sizes = {"T": len(inputs[0]), "Hq": spec.num_heads, "Dv": spec.v_head_size, "S": spec.num_splits}
    sizes |= {"Hq*Dv": spec.num_heads * spec.v_head_size}
    if spec.kernel == "combine_splits":
        sizes["T"] = inputs[0].shape[1]
    for item in signature.outputs:
        if item.aliases:
            given[item.name] = given[item.aliases]
            continue
        shape = [sizes[word] if isinstance(word, str) else word for word in item.shape]
        dtype = torch.float32 if item.dtype == "float32" else getattr(torch, spec.dtype)
        given[item.name] = torch.full(shape, float("nan"), dtype=dtype)
    launch(spec, given)
    outputs = [given[item.name] for item in signature.outputs]
    return [(x[:, 0] if item.aliases else x).numpy() for item, x in zip(signature.outputs, outputs, strict=True)]


def serve() -> None:
    import torch

    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    np.seterr(invalid="raise", over="ignore", under="ignore")  # a kernel must not even compute what is no number
    mend_interpreter()

    empty = torch.Tensor.new_empty

    def poisoned(self: Any, *size: Any, **options: Any) -> Any:
        tensor = empty(self, *size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    torch.Tensor.new_empty = poisoned
    while True:
        try:
            function, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = ("", globals()[function](*arguments))
        except Exception as error:
            cause = error.__cause__ or error
            answer = (type(error).__name__, f"{error} {cause}")
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
