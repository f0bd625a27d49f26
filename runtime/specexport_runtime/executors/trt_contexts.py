"""Execution contexts of one engine, one for each profile, and what is bound to them."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from specexport_runtime.abi import FEATURES, LOGITS, NEXT_FEATURES, QUERY, TOKEN_IDS, StepShape
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.trt_engine import Engine, EngineContext, EngineTensor, odd_tensors
from specexport_runtime.executors.trt_memory import CacheTensor, InputTensor, KvMemory


class DeviceAddresses(NamedTuple):
    """Where an executor's tensors lie on the device; ``queries`` and ``features`` are 0 where it gives none out."""

    activations: int
    inputs: int
    logits: int
    token_ids: int
    queries: int
    features: int


class ContextPool:
    """Contexts by profile, made when first used, and bound anew only where a step differs from the one before.

    All share one activation memory: only one of them runs at a time.
    """

    def __init__(self, engine: Engine, driver: GpuDriver, kv: KvMemory, at: DeviceAddresses) -> None:
        self._engine, self._driver, self._kv, self._at = engine, driver, kv, at
        self._shapes = {tensor.name: tensor.shape for tensor in engine.tensors}
        self._contexts: dict[int, EngineContext] = {}
        self._bound: dict[int, StepShape] = {}

    def bind(self, profile: int, shape: StepShape, tensors: Seq[InputTensor], *, is_fixed: bool) -> EngineContext:
        """The context of ``profile``, bound for a step of ``shape`` on the rows from its ``first_row`` on."""
        context = self._contexts.get(profile)
        if context is None:
            context = self._make(profile, is_fixed=is_fixed)
        before = self._bound.get(profile)
        if before == shape:
            return context
        self._bound.pop(profile, None)  # whatever happens below, nothing is known to be bound
        resized = before is None or before._replace(first_row=shape.first_row) != shape
        if resized:
            for tensor in tensors:
                context.set_shape(tensor.name, tensor.shape)
                context.set_address(tensor.name, self._at.inputs + tensor.offset)
        for cache, address in self._kv.addresses(shape.first_row):
            if resized:
                context.set_shape(cache.name, (shape.num_seqs, *self._shapes[cache.name][1:]))
            context.set_address(cache.name, address)
            context.set_address(cache.out_name, address)
        self._bound[profile] = shape
        return context

    def _make(self, profile: int, *, is_fixed: bool) -> EngineContext:
        context = self._engine.make_context(profile, self._at.activations, self._driver.stream, is_fixed=is_fixed)
        context.set_address(LOGITS.name, self._at.logits)
        context.set_address(TOKEN_IDS.name, self._at.token_ids)
        for tensor in query_tensors(self._engine):
            context.set_address(tensor.name, self._at.queries)
        for name in feature_outputs(self._engine):
            context.set_address(name, self._at.features)
        self._contexts[profile] = context
        return context

    def close(self) -> None:
        """Drop the contexts, which must not outlive their engine."""
        self._contexts.clear()
        self._bound.clear()


def query_tensors(engine: Engine) -> list[EngineTensor]:
    """The queries that an engine gives out, [B, Hq*F, W/F, D] each."""
    prefix = QUERY.name.format(i="")
    return [tensor for tensor in engine.tensors if tensor.name.startswith(prefix) and not tensor.is_input]


def feature_outputs(engine: Engine) -> list[str]:
    """The output that has features, if there is one."""
    names = (FEATURES.name, NEXT_FEATURES.name)
    return [tensor.name for tensor in engine.tensors if tensor.name in names and not tensor.is_input]


def check_tensors(engine: Engine, what: str, inputs: Seq[str], caches: Seq[CacheTensor]) -> None:
    """Refuse an engine whose names of tensors or sizes of caches are not the manifest's (IncompatibleError)."""
    names = [*inputs, LOGITS.name, TOKEN_IDS.name, *(tensor.name for tensor in query_tensors(engine))]
    names += feature_outputs(engine)  # whose sizes are compared by EngineFeatures
    for cache in caches:
        names += [cache.name, cache.out_name]
    odd = odd_tensors(engine, names)
    if odd:
        raise IncompatibleError(f"{what}: tensors differ from the manifest's: {', '.join(odd)}.", "build it again.")
    shapes = {tensor.name: tensor.shape for tensor in engine.tensors}
    for cache in caches:
        # [B, H, L, D], or with a 1 behind B: the same memory.
        sizes = tuple(size for size in shapes[cache.name][1:] if size != 1)
        if sizes != tuple(size for size in cache.shape if size != 1):
            raise IncompatibleError(
                f"{what}: {cache.name} is {list(shapes[cache.name])}, the manifest says [B, "
                f"{', '.join(map(str, cache.shape))}].",
                "build it again.",
            )
