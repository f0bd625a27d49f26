"""Int4 weights of ``ort-cuda``: what its engines compute, and what the kernel takes for steps of any width."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from specexport_runtime.bundle.quant_kinds import INT4
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.rows import judge

BLOCK = 32
WIDTHS = (1, 2, 5, 9, 16, 17, 32, 128)
"""Tokens of a step: one row, verify steps, both sides of the fused kernel's border, batches, a prefill."""
TENSOR_CORES = "ep.cuda.fpa_intb_gemm"
TOLERANCE = 2e-2


class Layers(NamedTuple):
    """Linear layers that are timed one after another: together their weights must exceed the L2 cache."""

    depth: int  # K
    width: int  # N
    copies: int  # how many layers
    dtype: str  # numpy name, of activations


LARGE = Layers(4096, 14336, 6, "float16")
TINY = Layers(64, 128, 2, "float32")


def check_int4(context: Context, backend: str = "ort-cuda") -> None:
    """Logits and greedy texts of int4 engines against ONNX Runtime's CPU with the same codes, in float32."""
    context.require_backend(backend)
    from specexport_runtime.bundle.opened import load_bundle
    from tools.gpu_check_lib.bundles import CPU, PLANS, build, open_executor
    from tools.gpu_check_lib.outputs import NUM_PROMPTS, check_greedy, check_logits

    name, opened = "tiny" if context.tiny else "small", []
    for each in (CPU, backend):
        with same_codes():
            folder = context.work / "bundles" / f"{name}-{each}-int4"
            build(context.work, name, each, output=folder, quantize="int4")
        bundle = load_bundle(folder, max_num_seqs=PLANS[name].max_num_seqs)
        opened.append(open_executor(bundle, "target", graphs=False, num_rows=NUM_PROMPTS))
    what, (reference, other) = f"{backend}, int4", opened
    with context.part(f"{what}: logits"):
        check_logits(context, what, reference, other, bundle.manifest.models["target"].dtype)
    with context.part(f"{what}: greedy texts"):
        check_greedy(context, what, reference, other)
    for executor in opened:
        executor.close()


@contextmanager
def same_codes() -> Iterator[None]:
    """Let builds for the CPU take the operator and the blocks of ``ort-cuda``."""
    with mock.patch.dict(INT4.backends, {"ort-cpu": INT4.backends["ort-cuda"]}):
        yield


def measure_int4(context: Context) -> None:
    """Microseconds of a layer by tokens: 16 bits, int4, and int4 with the tensor-core kernel that is off by default."""
    layers = TINY if context.tiny else LARGE
    if not context.tiny:
        context.require_backend("ort-cuda")
    given = np.random.default_rng(3).standard_normal((max(WIDTHS), layers.depth)).astype(layers.dtype)
    results = {}
    for what, int4, config in (
        (layers.dtype, False, {}),
        ("int4", True, {}),
        ("int4, tensor cores", True, {TENSOR_CORES: "1"}),
    ):
        with context.part(f"linear layers, {what}"):
            session = open_layers(layers, int4=int4, config=config, on_gpu=not context.tiny)
            found = {tokens: run_layers(session, given[:tokens], layers, on_gpu=not context.tiny) for tokens in WIDTHS}
            results[what] = {tokens: output for tokens, (_, output) in found.items()}
            times = {tokens: seconds * 1e6 for tokens, (seconds, _) in found.items()}
            context.recorder.row(
                f"{layers.depth} x {layers.width}, {what}: us a layer",
                ", ".join(f"{tokens}: {us:.1f}" for tokens, us in times.items()),
                microseconds={str(tokens): us for tokens, us in times.items()},
            )
    if "int4" in results and "int4, tensor cores" in results:
        pairs = [(results["int4"][tokens], results["int4, tensor cores"][tokens]) for tokens in WIDTHS]
        worst = max(float(np.abs(one - two).max() / np.abs(one).max()) for one, two in pairs)
        context.recorder.row(
            "int4: both kernels give the same",
            f"largest difference {worst:.1e} of the largest value",
            target=f"at most {TOLERANCE:.0e}",
            verdict=judge(worst, at_most=TOLERANCE),
        )


def open_layers(layers: Layers, *, int4: bool, config: dict[str, str], on_gpu: bool) -> Any:
    """A session of the layers, side by side over one input; the first layer's output is the result."""
    import onnxruntime as ort
    from onnx import helper, numpy_helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(layers.dtype))
    random, blocks = np.random.default_rng(4), layers.depth // BLOCK
    nodes, weights = [], []
    for number in range(layers.copies):
        names = [f"w{number}", f"s{number}"][: 1 + int4]
        if int4:
            codes = random.integers(0, 256, (layers.width, blocks, BLOCK // 2), np.uint8)
            scales = (random.uniform(0.5, 1, layers.width * blocks) * layers.depth**-0.5 / 8).astype(layers.dtype)
            scales[::2] *= -1  # the largest weight of a block may be positive
            arrays = [codes, scales]
            sizes = {"K": layers.depth, "N": layers.width, "bits": 4, "block_size": BLOCK}
            nodes.append(
                helper.make_node("MatMulNBits", ["a", *names], [f"y{number}"], domain="com.microsoft", **sizes)
            )
        else:
            part = random.standard_normal((layers.depth, 64)).astype(layers.dtype)
            arrays = [np.tile(part, (1, layers.width // 64))]
            nodes.append(helper.make_node("MatMul", ["a", *names], [f"y{number}"]))
        weights += [numpy_helper.from_array(array, name) for array, name in zip(arrays, names, strict=True)]
    values = [helper.make_tensor_value_info(f"y{i}", kind, ["T", layers.width]) for i in range(layers.copies)]
    given = helper.make_tensor_value_info("a", kind, ["T", layers.depth])
    graph = helper.make_graph(nodes, "layers", [given], values, weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CUDAExecutionProvider" if on_gpu else "CPUExecutionProvider"]
    )


def run_layers(session: Any, given: np.ndarray, layers: Layers, *, on_gpu: bool) -> tuple[float, np.ndarray]:
    """Seconds of a layer, the fastest of ten steps after three, and what the first layer gives, float32."""
    import onnxruntime as ort

    device = "cuda" if on_gpu else "cpu"
    binding = session.io_binding()
    binding.bind_ortvalue_input("a", ort.OrtValue.ortvalue_from_numpy(given, device, 0))
    for number in range(layers.copies):
        binding.bind_output(f"y{number}", device)
    seconds = []
    for _ in range(13):
        binding.synchronize_inputs()
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        seconds.append(time.perf_counter() - start)
    return min(seconds[3:]) / layers.copies, binding.get_outputs()[0].numpy().astype(np.float32)
