"""A builder that times kernels feeds them whatever its buffers hold: nothing outside the tensors may be touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import chance

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tests.support.references.kernel_worker import mend_interpreter
from specexport.kernels import launch

mend_interpreter()
first, count = map(int, sys.argv[1:])
for seed in range(first, first + count):
    random = torch.Generator().manual_seed(seed)
    bound = 2**31 - 1 if seed % 2 else 50
    def numbers(count):
        return torch.randint(-bound, bound, (count,), generator=random, dtype=torch.int64).to(torch.int32)
    q = torch.randn(7, 64, generator=random).half()
    k = torch.randn(7, 32, generator=random).half()
    # One allocation around the caches: a write beside a cache row shows in its margins.
    memory = torch.zeros(9, 1, 2, 32, 16).half()
    k_cache, v_cache = memory[1:4], memory[5:8]
    lens, cu = numbers(3)[:, None].contiguous(), numbers(4)
    launch.kv_append(k, k, k_cache, v_cache, lens, cu)
    assert not memory[[0, 4, 8]].any(), f"seed {seed} wrote outside its cache"
    for splits in (1, 2):
        launch.ragged_attention(q, k_cache, v_cache, lens, cu, scale=0.25, num_splits=splits, new_tokens=3)
print("done")
"""


@pytest.mark.whole
@pytest.mark.fuzz
def test_meaningless_lengths_touch_nothing_outside() -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths.rstrip(os.pathsep)}
    command = [sys.executable, "-c", SCRIPT, str(chance.seed(0)), str(chance.many(24))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["done"]
