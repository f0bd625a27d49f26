"""Whether TensorRT for RTX runs on this GPU at all, and built for which architecture: found out with a tiny network.

Its list of architectures has gaps (no sm90 in 1.7). So each way to build is tried: for this very GPU, "current", and
the architectures nearest to it. The first whose engine computes the right numbers is what the other tasks build for.
"""

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np

from specexport_runtime.errors import CheckFailedError
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.needs import require_modules

CURRENT = "CURRENT"
PORTABLE = "portable"  # no architecture is set: one engine for several
_ROWS, _COLUMNS = 4, 64


def candidates(sm: str, known: list[str]) -> list[str]:
    """What to build for, to try on a GPU, best first: its own architecture, ``CURRENT``, the nearest, and any.

    ``sm`` is for example ``"90"``; ``known`` are the package's names, for example ``["CURRENT", "SM89"]``.
    """
    numbers = sorted((int(name[2:]) for name in known if re.fullmatch(r"SM\d+", name)), reverse=True)
    below = [f"SM{number}" for number in numbers if number < int(sm)]
    above = [f"SM{number}" for number in reversed(numbers) if number > int(sm)]
    wanted = [f"SM{sm}", CURRENT, *below[:3], *above[:1]]
    return [*(name for name in dict.fromkeys(wanted) if name in known), PORTABLE]


def probe(context: Context) -> None:
    """Try every candidate in a separate process, and remember the first architecture that runs."""
    require_modules("tensorrt_rtx", "cuda.bindings")
    import tensorrt_rtx as trt

    from tools.gpu_check_lib.bundles import sm_of_gpu

    sm = sm_of_gpu()
    known = list(trt.ComputeCapability.__members__)
    context.recorder.row("TensorRT-RTX", f"version {trt.__version__}; knows {', '.join(known)}; this GPU is sm{sm}")
    runs = []
    for name in candidates(sm, known):
        if not context.has_time(f"TensorRT-RTX built for {name}", 5):
            continue
        command = [sys.executable, "-m", "tools.gpu_check_lib.rtx_probe", name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=min(45.0, context.left), check=False, env=os.environ
            )
            works = done.returncode == 0
            logged = [line for line in done.stderr.splitlines() if "[E]" in line][:1]  # the first is the cause
            answer = "; ".join([*done.stdout.strip().splitlines()[-1:], *([] if works else logged)]) or "no words"
            if done.returncode < 0:
                answer = f"ended by signal {-done.returncode}"
        except subprocess.TimeoutExpired:
            answer, works = "it hung", False
        runs += [name] * works
        value = f"{'runs' if works else 'does not run'} on sm{sm}: {answer}"
        context.recorder.row(f"TensorRT-RTX engine built for {name}", value, data_name=name, runs=works)
    _conclude(context, sm, runs)


def _conclude(context: Context, sm: str, runs: list[str]) -> None:
    """Write down the answer; only numbered architectures can be asked of our own build."""
    numbered = [name.removeprefix("SM") for name in runs if name.startswith("SM")]
    if numbered:
        context.remember("rtx-sm", numbered[0])
        value, verdict = f"yes, with engines built for sm{numbered[0]}", "ok"
    elif runs:
        value, verdict = f"only built as {', '.join(runs)}; our build does not ask for that yet", "missed"
    else:
        value, verdict = "no: no engine for any architecture it knows loads and runs", "missed"
    context.recorder.row(f"does TensorRT-RTX run on sm{sm}?", value, target="yes", verdict=verdict)  # type: ignore[arg-type]


def run_candidate(name: str) -> str:
    """Build ``relu(x @ w)`` for an architecture, run it on this GPU, compare with numpy.

    CheckFailedError names the step that failed.
    """
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.WARNING)
    weights = np.random.default_rng(0).standard_normal((_COLUMNS, _COLUMNS), dtype=np.float32)
    plan = _build(trt, logger, name, weights)
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if engine is None:
        raise CheckFailedError("it builds, and the runtime refuses to load it here.")
    x = np.random.default_rng(1).standard_normal((_ROWS, _COLUMNS), dtype=np.float32)
    error = float(np.abs(_run(engine, x) - np.maximum(x @ weights, 0)).max())
    if not error < 1e-1:  # products may run in TF32
        raise CheckFailedError(f"it loads and computes wrong numbers (off by {error:.1e}).")
    return f"builds, loads, right to {error:.0e}"


def _build(trt: Any, logger: Any, name: str, weights: np.ndarray[Any, Any]) -> Any:
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    x = network.add_input("x", trt.float32, (_ROWS, _COLUMNS))
    w = network.add_constant(weights.shape, trt.Weights(weights)).get_output(0)
    product = network.add_matrix_multiply(x, trt.MatrixOperation.NONE, w, trt.MatrixOperation.NONE).get_output(0)
    y = network.add_activation(product, trt.ActivationType.RELU).get_output(0)
    y.name = "y"
    network.mark_output(y)
    config = builder.create_builder_config()
    if name != PORTABLE:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, name), 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CheckFailedError("it cannot be built.")
    return plan


def _run(engine: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    from specexport_runtime.executors.cuda_driver import CudaDriver

    driver = CudaDriver()
    context = engine.create_execution_context()
    if context is None:
        raise CheckFailedError("it loads, and no execution context can be made.")
    y = np.zeros((_ROWS, _COLUMNS), np.float32)
    addresses = {name: driver.allocate(x.nbytes, name) for name in ("x", "y")}
    driver.copy_in(addresses["x"], x.ctypes.data, x.nbytes)
    for name, address in addresses.items():
        context.set_tensor_address(name, address)
    if not context.execute_async_v3(driver.stream):
        raise CheckFailedError("it loads, and refuses to run.")
    driver.copy_out(y.ctypes.data, addresses["y"], y.nbytes)
    driver.synchronize()
    return y


if __name__ == "__main__":
    try:
        print(run_candidate(sys.argv[1]))
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}".splitlines()[0])
        sys.exit(1)
