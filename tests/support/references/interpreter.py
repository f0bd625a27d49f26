"""Runs plugins' kernels in Triton's interpreter, in a process of its own: it is chosen when Triton is imported."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from specexport.kernels.spec import KernelSpec


class InterpretedPlugins:
    """A worker process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.references.interpreter"],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, spec: KernelSpec, inputs: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Outputs of one launch; memory that a kernel does not write holds NaN."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((spec, inputs), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def ops(self) -> dict[str, Any]:
        """For ``evaluator.make_evaluator``."""
        return dict.fromkeys(("kv_append", "ragged_attention", "combine_splits"), self.run)

    def close(self) -> None:
        self._process.communicate()


def run_plugin(spec: KernelSpec, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Launch the kernel on the node's inputs, caches as the 5-D memory they are."""
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
    """Answer requests until the input ends."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(run_plugin(*request), answers)
        answers.flush()


if __name__ == "__main__":
    serve()
