"""The part of ``tensorrt`` that plugins meet: what its C++ side offers and asks for, as strict as its documentation."""

import enum
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

MAX_DIMS = 8
Sizes = Mapping[str, int]
DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 BOOL")
TensorFormat = enum.Enum("TensorFormat", "LINEAR HWC CHW32")
DimensionOperation = enum.Enum("DimensionOperation", "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV")
PluginFieldType = enum.Enum("PluginFieldType", "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 INT64 CHAR UNKNOWN")
QuickPluginCreationRequest = enum.Enum(
    "QuickPluginCreationRequest", "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT", start=0
)
TensorRTPhase = enum.Enum("TensorRTPhase", "BUILD RUNTIME", start=0)
PluginArgType = enum.Enum("PluginArgType", "INT", start=0)
PluginArgDataType = enum.Enum("PluginArgDataType", "INT8 INT16 INT32", start=0)
OPERATIONS: dict[DimensionOperation, Callable[[int, int], int]] = {
    DimensionOperation.SUM: lambda a, b: a + b, DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.MAX: max, DimensionOperation.MIN: min, DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.EQUAL: lambda a, b: int(a == b), DimensionOperation.LESS: lambda a, b: int(a < b),
    DimensionOperation.FLOOR_DIV: lambda a, b: a // b, DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}  # fmt: skip


class IDimensionExpr:
    """An int that is known once shapes are."""

    def __init__(self, value: Callable[[Sizes], int], constant: int | None = None) -> None:
        self.value, self.constant = value, constant

    def is_constant(self) -> bool:
        return self.constant is not None

    def get_constant_value(self) -> int:
        assert self.constant is not None
        return self.constant


class IExprBuilder:
    def constant(self, value: int) -> IDimensionExpr:
        assert type(value) is int
        return IDimensionExpr(lambda _: value, value)

    def operation(self, op: DimensionOperation, first: IDimensionExpr, second: IDimensionExpr) -> IDimensionExpr:
        assert isinstance(first, IDimensionExpr)
        assert isinstance(second, IDimensionExpr)
        return IDimensionExpr(lambda sizes: OPERATIONS[op](first.value(sizes), second.value(sizes)))

    def size(self, dim: str | int) -> IDimensionExpr:
        """An input's dimension; the builder's own."""
        return self.constant(dim) if isinstance(dim, int) else IDimensionExpr(lambda sizes: sizes[dim])


class DimsExprs(list[Any]):
    def __init__(self, given: int | Sequence[IDimensionExpr]) -> None:
        super().__init__([None] * given if isinstance(given, int) else given)


class Dims(list[int]):
    MAX_DIMS = MAX_DIMS

    def __init__(self, given: Sequence[int] | int = ()) -> None:
        super().__init__([0] * given if isinstance(given, int) else given)


class PluginTensorDesc:
    def __init__(self) -> None:
        self.dims, self.type, self.format, self.scale = Dims(), DataType.FLOAT, TensorFormat.LINEAR, 1.0


class DynamicPluginTensorDesc:
    def __init__(self) -> None:
        self.desc, self.min, self.opt, self.max = PluginTensorDesc(), Dims(), Dims(), Dims()


class ISymExpr:
    def __init__(self) -> None:
        self.type: Any = None
        self.dtype: Any = None
        self.expr: Any = None


class Empty:
    """Base classes of plugins have no behaviour of their own."""

    def __init__(self, *_: Any) -> None:
        pass


class PluginField(NamedTuple):
    name: str
    data: Any
    type: PluginFieldType


class PluginFieldCollection(list[PluginField]):
    pass


class Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        key = (creator.name, creator.plugin_version, namespace)
        assert key not in self.creators
        self.creators[key] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))


class Logger:
    WARNING = 2

    def log(self, severity: int, message: str) -> None:
        pass


def _base_module() -> types.ModuleType:
    module = types.ModuleType("tensorrt")
    registry = Registry()
    public = {name: value for name, value in globals().items() if isinstance(value, type)}
    public |= {"__version__": "11.4.0", "get_plugin_registry": lambda: registry}
    public |= {"float32": DataType.FLOAT, "float16": DataType.HALF, "int32": DataType.INT32, "int64": DataType.INT64}
    parts = ("", "QuickCore", "QuickBuild", "QuickAOTBuild", "QuickRuntime")
    bases = (*(f"IPluginV3{part}" for part in parts), "IPluginCreatorV3Quick", "ITensor")
    public |= {name: type(name, (Empty,), {}) for name in bases}
    for name, value in public.items():
        setattr(module, name, value)
    module.__path__ = []  # a package
    return module


def install(patch: pytest.MonkeyPatch, folder: str) -> types.ModuleType:
    """Make ``import tensorrt`` give this; ``folder`` holds NVIDIA's own ``tensorrt.plugin``, as ``plugin``."""
    module: Any = _base_module()
    for name in [name for name in sys.modules if name.startswith("tensorrt.")]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, "tensorrt", module)
    module.__path__ = [folder]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in their texts
        module.plugin = importlib.import_module("tensorrt.plugin")
    patch.setitem(sys.modules, "tensorrt.plugin", module.plugin)
    return module


class Given(NamedTuple):
    """A tensor of the network: element type and dimensions, as ints or as words that a profile gives sizes to."""

    dtype: DataType
    dims: tuple[str | int, ...]


class Embedded(NamedTuple):
    """What the engine would hold of one node for one profile; ``launch`` and ``ints`` await the shapes."""

    kernel: str
    code: bytes
    tactic: int
    output_types: list[DataType]
    output_shapes: Callable[[Sizes], list[list[int]]]
    aliases: list[int]
    launch: Callable[[Sizes], dict[str, int]]
    ints: Callable[[Sizes], list[int]]


class LaunchParams:
    """Takes expressions, and nothing else; not before they are complete."""

    NAMES = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in self.NAMES
        self.__dict__[name] = check_int32(value)


def check_int32(value: Any) -> IDimensionExpr:
    assert isinstance(value, ISymExpr)
    assert (value.type, value.dtype) == (PluginArgType.INT, PluginArgDataType.INT32)
    assert isinstance(value.expr, IDimensionExpr)
    return value.expr


class Arguments:
    """int32 arguments, in order."""

    def __init__(self) -> None:
        self.given: dict[int, IDimensionExpr] = {}
        self.nbSymExprs = 0

    def __setitem__(self, index: int, value: Any) -> None:
        assert 0 <= index < self.nbSymExprs
        self.given[index] = check_int32(value)

    def values(self, sizes: Sizes) -> list[int]:
        assert sorted(self.given) == list(range(self.nbSymExprs))
        return [self.given[index].value(sizes) for index in range(self.nbSymExprs)]


def find_creator(trt: Any, op_type: str, attributes: Mapping[str, Any]) -> Any:
    """What the ONNX parser does with an operator it does not know; returns the creator and the request."""
    known = {"plugin_version", "plugin_namespace", "aot"}
    version, namespace = attributes.get("plugin_version", "1"), attributes.get("plugin_namespace", "")
    creator = trt.get_plugin_registry().get_creator(op_type, version, namespace)
    assert creator is not None, "Plugin not found, are the plugin name, version, and namespace correct?"
    assert set(attributes) - known <= {field.name for field in creator.field_names}, "an attribute nobody reads"
    request = QuickPluginCreationRequest.UNKNOWN
    if "aot" in attributes:
        strict = (QuickPluginCreationRequest.STRICT_JIT, QuickPluginCreationRequest.STRICT_AOT)
        request = strict[bool(attributes["aot"])]
    return creator, request


def embed(
    trt: Any, op_type: str, attributes: Mapping[str, Any], inputs: Sequence[Given], profiles: Sequence[Sizes]
) -> list[Embedded]:
    """Build one node; a profile is the optimal size of each dimension word."""
    creator, request = find_creator(trt, op_type, attributes)
    fields = PluginFieldCollection()
    plugin = creator.create_plugin(op_type, attributes["plugin_namespace"], fields, TensorRTPhase.BUILD, request)
    builder = IExprBuilder()
    types_ = plugin.get_output_data_types([given.dtype for given in inputs], [len(given.dims) for given in inputs])
    exprs = [DimsExprs([builder.size(dim) for dim in given.dims]) for given in inputs]
    shapes = plugin.get_output_shapes(exprs, [], builder)
    assert len(types_) == len(shapes) == plugin.get_num_outputs()
    aliases = [plugin.get_aliased_input(index) for index in range(len(types_))]

    def output_shapes(sizes: Sizes) -> list[list[int]]:
        return [[dim.value(sizes) for dim in shape] for shape in shapes]

    return [_embed_for(plugin, inputs, exprs, profile, list(types_), output_shapes, aliases) for profile in profiles]


def _describe(dtype: DataType, dims: Sequence[str | int], opt: Sequence[int]) -> DynamicPluginTensorDesc:
    result = DynamicPluginTensorDesc()
    result.desc.dims = Dims([dim if isinstance(dim, int) else -1 for dim in dims])
    result.desc.type = dtype
    result.min, result.opt, result.max = Dims([1] * len(opt)), Dims(opt), Dims(opt)
    return result


def _embed_for(
    plugin: Any,
    inputs: Sequence[Given],
    exprs: list[DimsExprs],
    profile: Sizes,
    types_: list[DataType],
    output_shapes: Callable[[Sizes], list[list[int]]],
    aliases: list[int],
) -> Embedded:
    count = len(inputs)
    optima = [[dim if isinstance(dim, int) else profile[dim] for dim in given.dims] for given in inputs]
    descs = [_describe(given.dtype, given.dims, opt) for given, opt in zip(inputs, optima, strict=True)]
    descs += [_describe(t, ["?"] * len(s), s) for t, s in zip(types_, output_shapes(profile), strict=True)]
    offered = plugin.get_supported_format_combinations(descs, count)
    assert len(offered) == len(descs), "one combination, so that the builder times nothing"
    for desc, offer in zip(descs, offered, strict=True):
        assert (offer.type, offer.format) == (desc.desc.type, TensorFormat.LINEAR)
    plugin.configure_plugin(descs[:count], descs[count:])
    tactics = list(plugin.get_valid_tactics()) or [0]
    (tactic,) = tactics
    plugin.set_tactic(tactic)
    params, arguments = LaunchParams(), Arguments()
    plugin.get_launch_params(exprs, descs, count, params, arguments, IExprBuilder())
    static = [desc.desc for desc in descs]
    name, code = plugin.get_kernel(static[:count], static[count:])
    assert isinstance(name, str)
    assert isinstance(code, bytes)
    return Embedded(
        name, code, tactic, types_, output_shapes, aliases,
        lambda sizes: {key: expr.value(sizes) for key, expr in params.__dict__.items()}, arguments.values,
    )  # fmt: skip
