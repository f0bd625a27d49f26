"""The kinds of quantized weights: one record each, which everything that depends on a kind reads.

A kind is added by its record and, for each backend, a module that makes its passes. A bundle's manifest names the kind
(``ModelEntry.quantize``). Imports the standard library.
"""

from typing import NamedTuple

from specexport_runtime.errors import IncompatibleError


class Limits(NamedTuple):
    """What an engine may lose against the float model; ``docs/quantization.md`` has the measurements."""

    agreement: float  # least share of a text's decided positions with the same best token, in a build
    lost: float  # most of what the float model tells on a text, in a build
    perplexity: float  # largest relative rise, in ``verify``
    divergence: float  # largest mean divergence from the float model's distributions, in nats, in ``verify``
    tensor: float  # largest relative error of a tensor, in ``debug`` by default


class Flops(NamedTuple):
    """Products with such weights that two cores of a CPU compute in a second."""

    narrow: float  # 256 bits
    wide: float  # AVX-512 and VNNI


class BackendPasses(NamedTuple):
    """How a backend's engines get weights of a kind."""

    module: str  # of the compiler: its ``passes`` makes them, see ``specexport.passes.base.Quantizing``
    block: int = 0  # inputs that share a scale; 0 where the checkpoint says it
    weighs_inputs: bool = False  # weights are rounded by what a layer's measured inputs make of an error


class QuantKind(NamedTuple):
    """One way to store the weights of linear layers in fewer bits."""

    name: str  # as recipes and manifests have it
    limits: Limits
    flops: Flops
    backends: dict[str, BackendPasses]  # by name; others do not have the kind
    says: str = ""  # of the weights, in ``inspect``; empty: that they are quantized so
    bits: int | None = None  # of a code that a float weight is rounded to; None keeps those of the checkpoint
    stored_bytes: float = 0  # of a weight with scales and zero points, at most
    read_bytes: float | None = None  # the same for a step's price where an engine does not say; None: as float weights


INT8 = QuantKind(
    name="int8",
    limits=Limits(agreement=0.9, lost=0.05, perplexity=0.05, divergence=0.1, tensor=0.1),
    flops=Flops(narrow=2e11, wide=7e11),
    backends={"ort-cpu": BackendPasses("specexport.passes.quantize_ort_cpu", block=32)},
    bits=8,
    stored_bytes=34 / 32,
    read_bytes=1.0,
)
INT4 = QuantKind(
    name="int4",
    limits=Limits(agreement=0.65, lost=0.2, perplexity=1.0, divergence=1.0, tensor=0.5),
    flops=Flops(narrow=2.8e11, wide=5e11),
    backends={
        "ort-cpu": BackendPasses("specexport.passes.quantize_ort_cpu", block=32, weighs_inputs=True),
        # Loses least, and the only block that the tensor-core kernel of ONNX Runtime's wheels takes.
        "ort-cuda": BackendPasses("specexport.passes.quantize_ort_cuda", block=32),
        "tensorrt": BackendPasses("specexport.passes.quantize_tensorrt", block=64),
        # Twice as many scales lose a fifth less; that the full TensorRT takes them is not known.
        "tensorrt-rtx": BackendPasses("specexport.passes.quantize_tensorrt", block=32),
    },
    bits=4,
    stored_bytes=20 / 32,
    read_bytes=0.5625,
)
KEPT = QuantKind(
    name="keep",
    limits=Limits(agreement=0.9, lost=0.05, perplexity=0.02, divergence=0.02, tensor=0.1),
    flops=Flops(narrow=2.8e11, wide=5e11),
    backends={"ort-cpu": BackendPasses("specexport.passes.quantize_kept")},
    says="weights as the checkpoint has them",
)

KINDS = {
    kind.name: kind
    for kind in (
        INT8,
        INT4,
        KEPT,
    )
}
"""All kinds, in the order in which messages name them."""

CACHE_LIMITS = {"int8 KV cache": Limits(agreement=0.9, lost=0.05, perplexity=0.02, divergence=0.02, tensor=0.1)}
"""The same for float weights with narrow caches, by what ``ModelEntry.approximation`` says."""


def get_limits(approximation: str) -> Limits:
    """The limits of what ``ModelEntry.approximation`` says; IncompatibleError if none are known."""
    kind = KINDS.get(approximation)
    found = CACHE_LIMITS.get(approximation) if kind is None else kind.limits
    if found is None:
        raise IncompatibleError(f"no limit is known for {approximation}.", "upgrade specexport.")
    return found


def get_backend_passes(name: str | None, backend: str) -> BackendPasses | None:
    """How a backend's engines get weights of a kind; None where they stay float, or the backend does not have it."""
    kind = None if name is None else KINDS.get(name)
    return None if kind is None else kind.backends.get(backend)


def list_kinds(backend: str) -> tuple[str, ...]:
    """Names of the kinds that a backend has."""
    return tuple(name for name, kind in KINDS.items() if backend in kind.backends)


def list_rounding_kinds() -> tuple[QuantKind, ...]:
    """The kinds that round float weights."""
    return tuple(kind for kind in KINDS.values() if kind.bits is not None)


def either(*others: str) -> str:
    """The kinds that round float weights, and others, as a hint names them: ``int8, int4 or none``."""
    *most, last = [*(kind.name for kind in list_rounding_kinds()), *others]
    return f"{', '.join(most)} or {last}"
