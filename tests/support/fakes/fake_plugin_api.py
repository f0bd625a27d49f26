"""``tensorrt.plugin`` from its documentation: decorators, descriptors and symbolic ints, with the rules they check.

Ahead-of-time plugins only. Stricter than NVIDIA's where that is lenient: annotations of tensors are always wanted, text
instead of a class is refused, and symbolic ints cannot be used once the builder has stopped asking for them.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union

from tests.support.fakes import fake_tensorrt as trt
from tests.support.fakes.fake_tensorrt import DimensionOperation, IDimensionExpr, IExprBuilder, ISymExpr

_RESERVED = {"", "trt", "tensorrt", "std"}
_builder: list[IExprBuilder] = []  # the one that asks at the moment


class SymInt32:
    """An int; a dummy outside of the builder's questions."""

    def __init__(self, value: Union[int, IDimensionExpr, "SymInt32", None] = None) -> None:
        if isinstance(value, bool) or not isinstance(value, int | IDimensionExpr | SymInt32 | None):
            raise TypeError(f"no int: {value!r}")
        if isinstance(value, int):
            value = _builder[0].constant(value) if _builder else None
        self.expr: IDimensionExpr | None = value.expr if isinstance(value, SymInt32) else value

    def _operate(self, op: DimensionOperation, other: "int | SymInt32") -> "SymInt32":
        second = other if isinstance(other, SymInt32) else type(self)(other)
        if not _builder or self.expr is None or second.expr is None:
            return type(self)()
        return type(self)(_builder[0].operation(op, self.expr, second.expr))

    def __add__(self, other: Any) -> "SymInt32":
        return self._operate(DimensionOperation.SUM, other)

    def __sub__(self, other: Any) -> "SymInt32":
        return self._operate(DimensionOperation.SUB, other)

    def __mul__(self, other: Any) -> "SymInt32":
        return self._operate(DimensionOperation.PROD, other)

    def __floordiv__(self, other: Any) -> "SymInt32":
        return self._operate(DimensionOperation.FLOOR_DIV, other)

    def __bool__(self) -> bool:
        raise RuntimeError("a symbolic int has no truth value")

    def __call__(self) -> ISymExpr:
        result = ISymExpr()
        result.type, result.dtype, result.expr = trt.PluginArgType.INT, trt.PluginArgDataType.INT32, self.expr
        return result


class ShapeExpr(SymInt32):
    pass


class SymExprs:
    def __init__(self, length: int) -> None:
        self.exprs: list[Any] = [None] * length

    def __len__(self) -> int:
        return len(self.exprs)

    def __getitem__(self, index: int) -> Any:
        return self.exprs[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.exprs[index] = value

    def __iter__(self) -> Any:
        return iter(self.exprs)


class ShapeExprs(SymExprs):
    @classmethod
    def from_tuple(cls, given: Sequence[Any]) -> "ShapeExprs":
        if len(given) > trt.MAX_DIMS:
            raise ValueError("too many dimensions")
        result = cls(len(given))
        result.exprs = [size if isinstance(size, ShapeExpr) else ShapeExpr(size) for size in given]
        return result


class SymIntExprs(SymExprs):
    @classmethod
    def from_tuple(cls, given: Sequence[Any]) -> "SymIntExprs":
        result = cls(len(given))
        result.exprs = list(given)
        return result


class Shape(tuple[int, ...]):
    """Numbers of one profile; -1 for what varies."""

    opt: tuple[int, ...] = ()

    @property
    def is_dynamic(self) -> bool:
        return -1 in self


class TensorDesc:
    def __init__(self, shape_expr: ShapeExprs, dtype: trt.DataType) -> None:
        self.shape_expr, self.dtype = shape_expr, dtype
        self.alias: TensorDesc | None = None
        self.known: Shape | None = None

    @property
    def shape(self) -> Shape:
        if self.known is None:
            raise ValueError("no shape information at this stage")
        return self.known

    @property
    def has_shape(self) -> bool:
        return self.known is not None

    def aliased(self) -> "TensorDesc":
        result = TensorDesc(self.shape_expr, self.dtype)
        result.alias = self
        return result

    def get_aliased(self) -> "TensorDesc | None":
        return self.alias


def from_shape_expr(shape_expr: tuple[Any, ...] | ShapeExprs, dtype: trt.DataType) -> TensorDesc:
    assert isinstance(dtype, trt.DataType)
    return TensorDesc(ShapeExprs.from_tuple(shape_expr) if isinstance(shape_expr, tuple) else shape_expr, dtype)


class KernelLaunchParams:
    NAMES = trt.LaunchParams.NAMES

    def __init__(self) -> None:
        for name in self.NAMES:
            setattr(self, name, 0 if name == "shared_mem" else 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.NAMES:
            raise AttributeError(name)
        self.__dict__[name] = SymInt32(value)


class AutoTuneCombination:
    def __init__(self, io_types: str, layouts: str = "LINEAR") -> None:
        self.types = [_data_type(name.strip()) for name in io_types.split(",")]
        layouts_ = [trt.TensorFormat[name.strip()] for name in layouts.split(",")]
        self.layouts = layouts_ * len(self.types) if len(layouts_) == 1 else layouts_
        if len(self.layouts) != len(self.types):
            raise ValueError("as many layouts as types")
        self.custom: list[int] = []

    def tactics(self, tactics: Iterable[int]) -> None:
        self.custom = list(tactics)
        if not all(type(tactic) is int and tactic > 0 for tactic in self.custom):
            raise ValueError("custom tactics are positive integers")


def _data_type(name: str) -> trt.DataType:
    return trt.DataType[{"FP32": "FLOAT", "FP16": "HALF"}.get(name, name)]


class Definition:
    def __init__(self, describe: Callable[..., Any], tensors: list[str], num_outputs: int) -> None:
        self.describe, self.tensors, self.num_outputs = describe, tensors, num_outputs
        self.tune: Callable[..., Any] | None = None
        self.embed: Callable[..., Any] | None = None


class Namespace:
    pass


op = Namespace()
_definitions: dict[str, Definition] = {}


def reset() -> None:
    """A fresh process."""
    _definitions.clear()
    op.__dict__.clear()


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    for name, parameter in found.items():
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ValueError(f"Argument {name} is not a positional-or-keyword or keyword-only arg")
        if parameter.default is not inspect.Parameter.empty:
            raise ValueError(f"Argument {name} has a default value")
        if isinstance(parameter.annotation, str):
            raise TypeError("issubclass() arg 1 must be a class")  # what a postponed annotation ends in
    return {name: parameter.annotation for name, parameter in found.items()}


def register(plugin_id: str) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        namespace, name = plugin_id.split("::")
        if "." in plugin_id or namespace in _RESERVED:
            raise ValueError(f"{plugin_id} has a point or a reserved namespace")
        space = op.__dict__.setdefault(namespace, Namespace())
        if hasattr(space, name):
            raise ValueError(f"already has a definition for {name!r}")
        given = _parameters(function)
        if any(annotation is not TensorDesc for annotation in given.values()):
            raise ValueError("only tensors are supported here, each annotated")
        returns = inspect.signature(function).return_annotation
        outputs = typing.get_args(returns) if typing.get_origin(returns) is tuple else (returns,)
        if not outputs or any(output is not TensorDesc for output in outputs):
            raise ValueError("Return types can only be TensorDesc or Tuple[TensorDesc]")
        definition = Definition(function, list(given), len(outputs))
        _definitions[plugin_id] = definition
        setattr(space, name, definition)
        import tensorrt

        tensorrt.get_plugin_registry().register_creator(Creator(name, namespace, definition), namespace)
        return function

    return decorate


def _check_schema(plugin_id: str, function: Callable[..., Any], more: Sequence[str]) -> Definition:
    if plugin_id not in _definitions:
        raise ValueError(f"Plugin {plugin_id} is not registered")
    definition = _definitions[plugin_id]
    given = _parameters(function)
    if list(given) != [*definition.tensors, *more]:
        raise ValueError(f"{list(given)} does not match the expected input arg schema")
    for name in definition.tensors:
        if given[name] is not TensorDesc:
            raise ValueError(f"{name} must be annotated as TensorDesc")
    return definition


def autotune(plugin_id: str) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        definition = _check_schema(plugin_id, function, ["outputs"])
        returns = inspect.signature(function).return_annotation
        if typing.get_origin(returns) is not list or typing.get_args(returns) != (AutoTuneCombination,):
            raise ValueError("Return types can only be List[AutoTuneCombination]")
        definition.tune = function
        return function

    return decorate


def aot_impl(plugin_id: str) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        definition = _check_schema(plugin_id, function, ["outputs", "tactic"])
        returns = inspect.signature(function).return_annotation
        parts = typing.get_args(returns)
        if typing.get_origin(returns) is not tuple or len(parts) != 4:
            raise ValueError("tuple[str | bytes, str | bytes, KernelLaunchParams, SymIntExprs] expected")
        for part in parts[:2]:
            union = typing.get_origin(part) in (Union, types.UnionType)
            if not set(typing.get_args(part) if union else (part,)) <= {str, bytes}:
                raise ValueError("Expected 'str' or 'bytes'")
        if not issubclass(parts[2], KernelLaunchParams) or not issubclass(parts[3], SymExprs):
            raise ValueError("launch parameters and symbolic expressions expected")
        definition.embed = function
        return function

    return decorate


class Creator:
    plugin_version = "1"

    def __init__(self, name: str, namespace: str, definition: Definition) -> None:
        self.name, self.plugin_namespace, self.definition = name, namespace, definition
        self.field_names = trt.PluginFieldCollection()

    def create_plugin(self, name: str, namespace: str, fields: Any, phase: Any, request: Any) -> "Plugin":
        assert (name, namespace, phase) == (self.name, self.plugin_namespace, trt.TensorRTPhase.BUILD)
        assert not fields
        if request is trt.QuickPluginCreationRequest.STRICT_JIT or self.definition.embed is None:
            raise ValueError("no such implementation is defined")
        return Plugin(self.definition)


class Plugin:
    """The builder's view of one node."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    def get_num_outputs(self) -> int:
        return self.definition.num_outputs

    def _describe(self, inputs: list[TensorDesc]) -> tuple[TensorDesc, ...]:
        assert len(inputs) == len(self.definition.tensors)
        outputs = self.definition.describe(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert len(outputs) == self.definition.num_outputs
        return outputs

    def get_output_data_types(self, input_types: Sequence[trt.DataType], ranks: Sequence[int]) -> list[trt.DataType]:
        """Shapes are not known here: sizes are dummies."""
        inputs = [
            TensorDesc(ShapeExprs.from_tuple([ShapeExpr() for _ in range(rank)]), dtype)
            for dtype, rank in zip(input_types, ranks, strict=True)
        ]
        outputs = self._describe(inputs)
        self.input_types = list(input_types)
        self.aliases = [-1 if out.alias is None else [x is out.alias for x in inputs].index(True) for out in outputs]
        return [output.dtype for output in outputs]

    def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: IExprBuilder) -> list[Any]:
        _builder.append(builder)
        try:
            self.inputs = [
                TensorDesc(ShapeExprs.from_tuple([ShapeExpr(dim) for dim in dims]), dtype)
                for dims, dtype in zip(inputs, self.input_types, strict=True)
            ]
            self.outputs = self._describe(self.inputs)
            return [[dim.expr for dim in output.shape_expr] for output in self.outputs]
        finally:
            _builder.clear()

    def get_aliased_input(self, index: int) -> int:
        return self.aliases[index]

    def _know(self, in_out: Sequence[trt.DynamicPluginTensorDesc]) -> None:
        for desc, given in zip((*self.inputs, *self.outputs), in_out, strict=True):
            desc.known = Shape(given.desc.dims)
            desc.known.opt = tuple(given.opt)
            desc.dtype = given.desc.type

    def get_supported_format_combinations(self, in_out: Any, num_inputs: int) -> list[trt.PluginTensorDesc]:
        assert num_inputs == len(self.inputs)
        assert self.definition.tune is not None
        self._know(in_out)
        self.combinations = self.definition.tune(*self.inputs, self.outputs)
        offered = []
        for combination in self.combinations:
            assert len(combination.types) == len(in_out)
            for dtype, layout in zip(combination.types, combination.layouts, strict=True):
                desc = trt.PluginTensorDesc()
                desc.type, desc.format = dtype, layout
                offered.append(desc)
        return offered

    def configure_plugin(self, inputs: Any, outputs: Any) -> None:
        pass

    def get_valid_tactics(self) -> list[int]:
        return [tactic for combination in self.combinations for tactic in combination.custom]

    def set_tactic(self, tactic: int) -> None:
        self.tactic = tactic

    def get_launch_params(
        self, dims: Any, in_out: Any, num_inputs: int, params: Any, arguments: Any, builder: IExprBuilder
    ) -> None:
        assert self.definition.embed is not None
        self._know(in_out)
        _builder.append(builder)
        try:
            name, code, launch, ints = self.definition.embed(*self.inputs, self.outputs, self.tactic)
            assert isinstance(name, str | bytes)
            assert isinstance(code, str | bytes)
            assert isinstance(launch, KernelLaunchParams)
            assert isinstance(ints, SymExprs)
            for key in KernelLaunchParams.NAMES:
                setattr(params, key, getattr(launch, key)())
            arguments.nbSymExprs = len(ints)
            for index, value in enumerate(ints):
                assert isinstance(value, SymInt32)
                arguments[index] = value()
        finally:
            _builder.clear()
        self.kernel = name, code

    def get_kernel(self, inputs: Any, outputs: Any) -> tuple[str, bytes]:
        name, code = self.kernel
        return name, code.encode() if isinstance(code, str) else code


def as_module() -> types.ModuleType:
    """This, as ``tensorrt.plugin`` of a fresh process."""
    reset()
    module = types.ModuleType("tensorrt.plugin")
    public = (
        "AutoTuneCombination", "KernelLaunchParams", "ShapeExpr", "ShapeExprs", "SymExprs", "SymInt32", "SymIntExprs",
        "TensorDesc", "aot_impl", "autotune", "from_shape_expr", "op", "register",
    )  # fmt: skip
    for name in public:
        setattr(module, name, globals()[name])
    return module
