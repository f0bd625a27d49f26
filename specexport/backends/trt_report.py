"""What TensorRT made of a graph: read from the network before the build, and from the builder's messages after it.

The engine inspector would need a GPU that the engine runs on.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_LAYER = re.compile(
    r"^Name: (?P<name>[^,]+), LayerType: (?P<type>\w+), Inputs: (?P<inputs>.*?), Constants: (?P<constants>.*?), "
    r"Outputs: (?P<outputs>.*?), TacticName",
    re.MULTILINE,
)
_TENSOR = re.compile(r"Name: (?P<name>[^,]*), Dimensions: \[(?P<dims>[-\d,]*)\].*?Datatype: (?P<dtype>\w+)")
_SUBGRAPH = re.compile(r"_myl(\d+)_\d+$")
_PROFILE = re.compile(r"\[profile (\d+)\]")
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")
_WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")
_LOW_BITS = {"Int4", "FP8"}
_APPEND_PLUGIN = ".kv_append"
_ITEM_BYTES = {"Half": 2, "BF16": 2, "BFloat16": 2, "Float": 4, "Int32": 4, "Int64": 8, "Bool": 1}


class Tensor(NamedTuple):
    """A tensor of an engine layer; -1 stands for a size that is not fixed."""

    name: str
    dims: tuple[int, ...]
    dtype: str

    @property
    def values(self) -> int:
        """Number of values, sizes that are not fixed counted as 1."""
        return math.prod(max(dim, 1) for dim in self.dims)


class Layer(NamedTuple):
    """A layer of a finished engine."""

    name: str
    kind: str  # the builder's type, for example ``gemm`` or ``kgen`` (a generated kernel)
    profile: int  # index of its profile
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...] = ()  # weights that it reads

    @property
    def is_attention(self) -> bool:
        """A fused attention kernel."""
        return "_mha_" in self.name

    @property
    def is_matmul(self) -> bool:
        """A matrix product: a library call, or the one inside fused attention."""
        return self.kind in ("gemm", "matmul", "CaskGemm") or self.is_attention


def parse_layers(texts: Iterable[str]) -> list[Layer]:
    """The layers in the builder's messages; tensors' names (``[profile 2]``) tell the profile of a subgraph."""
    found: list[tuple[str, Layer]] = []
    profiles: dict[str, int] = {}
    for text in texts:
        for match in _LAYER.finditer(text):
            number = _SUBGRAPH.search(match["name"])
            subgraph = number[1] if number else ""
            if mark := _PROFILE.search(match[0]):
                profiles[subgraph] = int(mark[1])
            tensors = (_tensors(match[part]) for part in ("inputs", "outputs", "constants"))
            layer = Layer(match["name"], match["type"], 0, *tensors)
            found.append((subgraph, layer))
    return [layer._replace(profile=profiles.get(subgraph, 0)) for subgraph, layer in found]


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            match["name"].partition(" [profile")[0],
            tuple(int(dim) for dim in match["dims"].split(",") if dim),
            match["dtype"],
        )
        for match in _TENSOR.finditer(text)
    )


def summarize(layers: Sequence[Layer], profiles: Sequence[str]) -> list[dict[str, Any]]:
    """For each profile: kernels, fused attention, float32 products, and bytes of KV cache that kernels copy."""
    rows = []
    for index, name in enumerate(profiles):
        own = [layer for layer in layers if layer.profile == index]
        rows.append(
            {
                "profile": name,
                "kernels": sum(layer.kind not in ("signal", "wait", "shape_call") for layer in own),
                "fused_attention": sum(layer.is_attention for layer in own),
                "float32_matmuls": [layer.name for layer in own if _is_float32_matmul(layer)],
                "kv_copy_bytes": sum(_count_copied_bytes(layer) for layer in own),
                "quantized_products": sum(_reads_low_bits(layer) and not _is_expansion(layer) for layer in own),
                "expanded_weights": sum(_reads_low_bits(layer) and _is_expansion(layer) for layer in own),
            }
        )
    return rows


def _is_float32_matmul(layer: Layer) -> bool:
    operands = [tensor for tensor in layer.inputs if len(tensor.dims) > 1 and tensor.values > 1]
    return layer.is_matmul and any(tensor.dtype == "Float" for tensor in operands[:2])


def _reads_low_bits(layer: Layer) -> bool:
    return any(tensor.dtype in _LOW_BITS for tensor in layer.constants)


def _is_expansion(layer: Layer) -> bool:
    """Whether a kernel reads nothing but weights: then it makes them float for a product in another kernel."""
    return not layer.inputs


def _count_copied_bytes(layer: Layer) -> int:
    if layer.is_attention or any(_is_cache(tensor) for tensor in layer.outputs):
        return 0
    copied = 0
    for cache in (tensor for tensor in layer.inputs if _is_cache(tensor)):
        capacity, size = cache.dims[-2:]
        for tensor in layer.outputs:
            # A size that is not fixed stands for rows times heads: at least what one row's cache holds.
            if {capacity, size} <= set(tensor.dims):
                copied += max(tensor.values, cache.values) * _ITEM_BYTES.get(tensor.dtype, 4)
    return copied


def _is_cache(tensor: Tensor) -> bool:
    return tensor.name.startswith(("k_cache", "v_cache"))


def describe_layers(layers: Sequence[Layer]) -> str:
    """The finished engine's layers for the build log, one a line: profile, kind, name, what it reads and writes."""

    def tensors(found: Sequence[Tensor]) -> str:
        return ", ".join(f"{t.name} {t.dtype}[{','.join(map(str, t.dims))}]" for t in found)

    lines = [f"[profile {x.profile}] {x.kind} {x.name}: {tensors(x.inputs)} -> {tensors(x.outputs)}\n" for x in layers]
    return "".join(lines)


def make_report(
    trt: Any, network: Any, texts: Sequence[str], layers: Sequence[Layer], profiles: Sequence[str]
) -> dict[str, Any]:
    """Everything the manifest keeps of a build, from the builder's ``texts`` and the ``layers`` in them."""
    activations = [int(size) for text in texts for size in _ACTIVATIONS.findall(text)]
    weights = [int(size) for text in texts for size in _WEIGHTS.findall(text)]
    return {
        "aliased": [list(pair) for pair in find_aliased_caches(trt, network)],
        "attention_nodes": _count(trt, network, "ATTENTION_INPUT"),
        "profiles": summarize(layers, profiles),
        "layers_from": "builder",
        "activation_bytes": max(activations, default=None),
        "weight_bytes": max(weights, default=None),
    }


def find_aliased_caches(trt: Any, network: Any) -> list[tuple[str, str]]:
    """(input, output) of every cache that is updated in place: the input's memory is the output's."""
    pairs = []
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == getattr(trt.LayerType, "KV_CACHE_UPDATE", None):
            pairs.append((str(layer.get_input(0).name), str(layer.get_output(0).name)))
        elif str(layer.name).endswith(_APPEND_PLUGIN):  # k, v, then the two caches; its outputs are their memory
            pairs += [(str(layer.get_input(2 + j).name), str(layer.get_output(j).name)) for j in range(2)]
    return pairs


def _count(trt: Any, network: Any, kind: str) -> int:
    wanted = getattr(trt.LayerType, kind, None)
    return sum(network.get_layer(i).type == wanted for i in range(network.num_layers))


def find_network_problems(trt: Any, network: Any, num_layers: int, float32_products: Sequence[str] = ()) -> list[str]:
    """What is wrong with a parsed network; empty if nothing is: caches not in place, matrix products in float32."""
    problems = []
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name for i in range(network.num_outputs)}
    aliased = find_aliased_caches(trt, network)
    if len(aliased) != 2 * num_layers:
        problems.append(f"{len(aliased)} of {2 * num_layers} caches are updated in place")
    problems += [
        f"{source} is not updated in place" for source, out in aliased if source not in inputs or out not in outputs
    ]
    halves = {trt.DataType.HALF, trt.DataType.BF16}
    if any(tensor.dtype in halves for name, tensor in inputs.items() if name.startswith("k_cache")):
        for i in range(network.num_layers):
            layer = network.get_layer(i)
            if layer.type != trt.LayerType.MATRIX_MULTIPLY or layer.get_input(0).dtype != trt.DataType.FLOAT:
                continue
            if layer.name not in float32_products:
                problems.append(f"{layer.name} multiplies matrices in float32")
    return problems
