"""Putting a TensorRT executor together: planned, checked against free memory, then allocated, or all given back."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from specexport_runtime.abi import FEATURES, ITEM_BYTES, LOGITS, NEXT_FEATURES, QUERY, TOKEN_IDS, StepShape
from specexport_runtime.bundle.entry import EngineFile, ModelEntry
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.gpu_memory import GpuFeatures, HostBlock, HostOutput, InputTensor
from specexport_runtime.executors.trt_engine import (
    EngineContext,
    EngineTensor,
    TrtEngine,
    list_mismatched_tensors,
    load_engine,
    make_rebuild_hint,
)
from specexport_runtime.executors.trt_graphs import GraphPool
from specexport_runtime.executors.trt_memory import (
    CacheTensor,
    KvMemory,
    MemoryPlan,
    compute_swap_bytes,
    count_feature_rows,
    lay_out_caches,
    lay_out_inputs,
)
from specexport_runtime.executors.trt_pack import SPECS

EngineLoader = Callable[[Path, EngineFile, str], TrtEngine]


class DeviceAddresses(NamedTuple):
    """Where an executor's tensors lie on the device; ``queries`` and ``features`` are 0 where it gives none out."""

    activations: int
    inputs: int
    logits: int
    token_ids: int
    queries: int
    features: int


class ContextPool:
    """Contexts by profile, made when first used and bound anew where steps differ; one activation memory for all."""

    def __init__(self, engine: TrtEngine, driver: GpuDriver, kv: KvMemory, at: DeviceAddresses) -> None:
        self._engine, self._driver, self._kv, self._at = engine, driver, kv, at
        self._shapes = {tensor.name: tensor.shape for tensor in engine.tensors}
        self._contexts: dict[int, EngineContext] = {}
        self._bound: dict[int, StepShape] = {}

    def bind(self, profile: int, shape: StepShape, tensors: Sequence[InputTensor], *, is_fixed: bool) -> EngineContext:
        """The context of ``profile``, bound for a step of ``shape`` on the rows from its ``first_row`` on."""
        context = self._contexts.get(profile)
        if context is None:
            context = self._make_context(profile, is_fixed=is_fixed)
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

    def _make_context(self, profile: int, *, is_fixed: bool) -> EngineContext:
        context = self._engine.make_context(profile, self._at.activations, self._driver.stream, is_fixed=is_fixed)
        context.set_address(LOGITS.name, self._at.logits)
        context.set_address(TOKEN_IDS.name, self._at.token_ids)
        for tensor in find_query_tensors(self._engine):
            context.set_address(tensor.name, self._at.queries)
        for name in find_feature_outputs(self._engine):
            context.set_address(name, self._at.features)
        self._contexts[profile] = context
        return context

    def close(self) -> None:
        """Drop the contexts, which must not outlive their engine."""
        self._contexts.clear()
        self._bound.clear()


def find_query_tensors(engine: TrtEngine) -> list[EngineTensor]:
    """The queries that an engine gives out, [B, Hq*F, W/F, D] each."""
    prefix = QUERY.name.format(i="")
    return [tensor for tensor in engine.tensors if tensor.name.startswith(prefix) and not tensor.is_input]


def find_feature_outputs(engine: TrtEngine) -> list[str]:
    """The output that has features, if there is one."""
    names = (FEATURES.name, NEXT_FEATURES.name)
    return [tensor.name for tensor in engine.tensors if tensor.name in names and not tensor.is_input]


def check_tensors(
    engine: TrtEngine, what: str, inputs: Sequence[str], caches: Sequence[CacheTensor], hint: str
) -> None:
    """Refuse an engine whose names of tensors or sizes of caches are not the manifest's (IncompatibleError)."""
    names = [*inputs, LOGITS.name, TOKEN_IDS.name, *(tensor.name for tensor in find_query_tensors(engine))]
    names += find_feature_outputs(engine)  # whose sizes are compared by EngineFeatures
    for cache in caches:
        names += [cache.name, cache.out_name]
    odd = list_mismatched_tensors(engine, names)
    if odd:
        raise IncompatibleError(f"{what}: tensors differ from the manifest's: {', '.join(odd)}.", hint)
    shapes = {tensor.name: tensor.shape for tensor in engine.tensors}
    for cache in caches:
        # [B, H, L, D], or with a 1 after B: the same memory.
        sizes = tuple(size for size in shapes[cache.name][1:] if size != 1)
        if sizes != tuple(size for size in cache.shape if size != 1):
            raise IncompatibleError(
                f"{what}: {cache.name} is {list(shapes[cache.name])}, the manifest says [B, "
                f"{', '.join(map(str, cache.shape))}].",
                hint,
            )


class EngineSizes(NamedTuple):
    """Sizes of one executor, from its manifest entry and the rows asked for."""

    arena_rows: int  # cache rows in memory: enough for the smallest batch bucket that holds the rows asked for
    kv_capacity: int  # entries of a row (L)
    scratch: int  # entries at a row's end that no sequence uses: fixed profiles pad rows with as many dummies at most
    profiles: tuple[tuple[int, Profile], ...]  # with their numbers in the engine: all that can run on ``arena_rows``
    max_logit_rows: int  # most rows of logits of a step


def size_engine(entry: ModelEntry, what: str, num_rows: int) -> EngineSizes:
    """Sizes of an executor of ``num_rows`` cache rows; IncompatibleError if the engine was built for fewer."""
    limits = entry.engine.limits
    if limits is None or not limits.profiles or entry.dtype not in ITEM_BYTES:
        raise IncompatibleError(
            f"{what}: the manifest does not describe a TensorRT engine.",
            f"build it again with `specexport build --backend {entry.backend}`.",
        )
    unknown = sorted(set(entry.engine.inputs) - set(SPECS))
    if unknown:
        raise IncompatibleError(
            f"{what}: the engine takes unknown inputs: {', '.join(unknown)}.", "upgrade specexport."
        )
    most = limits.max_num_seqs
    if num_rows > most:
        raise IncompatibleError(
            f"{what} was built for {most} sequences at a time; max_num_seqs is {num_rows}.",
            f"use --max-num-seqs {most} or less (--prefix-rows count), or build it again with a larger --max-num-seqs.",
        )
    fixed = [profile for profile in limits.profiles if profile.is_fixed]
    arena_rows = min((profile.num_seqs for profile in fixed if profile.num_seqs >= num_rows), default=num_rows)
    usable = tuple((i, p) for i, p in enumerate(limits.profiles) if not p.is_fixed or p.num_seqs <= arena_rows)
    return EngineSizes(
        arena_rows,
        limits.kv_capacity,
        max((profile.max_new_tokens for profile in fixed), default=0),
        usable,
        max(profile.num_logit_rows for _, profile in usable),
    )


class TrtParts(NamedTuple):
    """What a TensorRT executor is made of. ``resources`` gives all of it back, last made first."""

    resources: ExitStack
    sizes: EngineSizes
    driver: GpuDriver
    kv: KvMemory
    at: DeviceAddresses
    contexts: ContextPool
    graphs: GraphPool
    logits: HostOutput
    token_ids: HostOutput
    features: GpuFeatures
    blocks: dict[int, HostBlock]
    """By profile number; ranged profiles have the same one."""

    def make_host(self) -> tuple[HostBlock, HostOutput]:
        """Pinned memory for the inputs and ids of a step of any profile, given back with all else."""
        ids = HostOutput(self.driver, (), "int64", self.sizes.max_logit_rows)
        self.resources.callback(ids.close)
        return _make_block(max(len(block.memory) for block in self.blocks.values()), self.driver, self.resources), ids


def load_parts(
    entry: ModelEntry,
    file: EngineFile,
    folder: Path,
    num_rows: int,
    driver: GpuDriver,
    *,
    use_graphs: bool,
    load: EngineLoader = load_engine,
) -> TrtParts:
    """Load an engine and allocate everything around it, or IncompatibleError; takes over ``driver``."""
    with ExitStack() as stack:
        stack.callback(driver.close)
        sizes = size_engine(entry, str(folder / file.path), num_rows)
        parts = _allocate(entry, file, folder, sizes, driver, stack, use_graphs, load)
        return parts._replace(resources=stack.pop_all())


def plan_memory(entry: ModelEntry, sizes: EngineSizes, weights: int, activations: int) -> MemoryPlan:
    """Bytes that an executor will need on the device, of which the engine's weights and activations are given."""
    caches, kv_bytes = lay_out_caches(
        entry.attention.layers, sizes.arena_rows, sizes.kv_capacity, ITEM_BYTES[entry.dtype]
    )
    outputs = sizes.max_logit_rows * (4 * entry.lm_head_rows + 8)
    buffers = _input_bytes(entry, sizes) + outputs + _feature_bytes(entry, sizes) + compute_swap_bytes(caches)
    return MemoryPlan(weights, kv_bytes, activations, buffers, sizes.arena_rows)


def _input_bytes(entry: ModelEntry, sizes: EngineSizes) -> int:
    largest = (profile.largest for _, profile in sizes.profiles)
    return max(lay_out_inputs(entry.engine.inputs, shape, entry.engine.feature_size)[1] for shape in largest)


def _feature_bytes(entry: ModelEntry, sizes: EngineSizes) -> int:
    """Of the features of the largest step."""
    return 4 * entry.engine.feature_size * count_feature_rows(entry, [profile for _, profile in sizes.profiles])


def _allocate(
    entry: ModelEntry,
    file: EngineFile,
    folder: Path,
    sizes: EngineSizes,
    driver: GpuDriver,
    stack: ExitStack,
    use_graphs: bool,
    load: EngineLoader,
) -> TrtParts:
    path = folder / file.path
    gpu = driver.info()
    plan_memory(entry, sizes, path.stat().st_size, file.memory_bytes or 0).check(str(path), gpu)
    engine = load(path, file, gpu.name)
    stack.callback(engine.close)
    caches, kv_bytes = lay_out_caches(
        entry.attention.layers, sizes.arena_rows, sizes.kv_capacity, ITEM_BYTES[entry.dtype]
    )
    check_tensors(engine, str(path), entry.engine.inputs, caches, make_rebuild_hint(file))

    def allocate(num_bytes: int, what: str) -> int:
        address = driver.allocate(num_bytes, f"{path}: {what}")
        stack.callback(driver.free, address)
        return address

    queries = _query_bytes(engine, sizes, ITEM_BYTES[entry.dtype])
    features = _feature_bytes(entry, sizes)
    arena, aside = allocate(kv_bytes, f"the KV cache of {sizes.arena_rows} rows"), compute_swap_bytes(caches)
    kv = KvMemory(driver, caches, kv_bytes, arena, allocate(aside, "room to exchange rows") if aside else 0)
    at = DeviceAddresses(
        allocate(engine.activation_bytes, "activations"),
        allocate(_input_bytes(entry, sizes), "step inputs"),
        allocate(sizes.max_logit_rows * entry.lm_head_rows * 4, "logits"),
        allocate(sizes.max_logit_rows * 8, "token ids"),
        allocate(queries, "queries") if queries else 0,
        allocate(features, "features") if features else 0,
    )
    logits = HostOutput(driver, (entry.lm_head_rows,), "float32", sizes.max_logit_rows)
    token_ids = HostOutput(driver, (), "int64", sizes.max_logit_rows)
    shapes = {tensor.name: tensor.shape for tensor in engine.tensors}
    rows = count_feature_rows(entry, [profile for _, profile in sizes.profiles])
    given = GpuFeatures(shapes, entry.engine.feature_size, path, driver, rows)
    for output in (logits, token_ids, given):
        stack.callback(output.close)
    contexts = ContextPool(engine, driver, kv, at)
    stack.callback(contexts.close)
    graphs = GraphPool(driver, enabled=use_graphs)
    stack.callback(graphs.close)
    blocks = _make_blocks(entry, sizes, driver, stack)
    return TrtParts(stack, sizes, driver, kv, at, contexts, graphs, logits, token_ids, given, blocks)


def _query_bytes(engine: TrtEngine, sizes: EngineSizes, item_bytes: int) -> int:
    """Bytes of the largest queries of any layer and profile. Layers run one after the other: they share the memory."""
    largest = [profile.largest for _, profile in sizes.profiles]
    slots = max(shape.num_seqs * shape.tile_width // shape.fold for shape in largest)
    return (
        max((tensor.shape[1] * tensor.shape[3] for tensor in find_query_tensors(engine)), default=0)
        * slots
        * item_bytes
    )


def _make_block(num_bytes: int, driver: GpuDriver, stack: ExitStack) -> HostBlock:
    memory = driver.allocate_host(num_bytes)
    stack.callback(driver.free_host, memory)
    return HostBlock(memory)


def _make_blocks(entry: ModelEntry, sizes: EngineSizes, driver: GpuDriver, stack: ExitStack) -> dict[int, HostBlock]:
    # One block for all ranged profiles: their steps have many sizes, and each is written whole.
    shared = _make_block(_input_bytes(entry, sizes), driver, stack)
    names, width = entry.engine.inputs, entry.engine.feature_size
    return {
        i: _make_block(lay_out_inputs(names, profile.largest, width)[1], driver, stack) if profile.is_fixed else shared
        for i, profile in sizes.profiles
    }
