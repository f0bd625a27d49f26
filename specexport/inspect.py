"""``specexport inspect``: what a bundle says about itself. Reads the manifest; needs no onnx and no onnxruntime."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from specexport.bench.subject import can_draft_itself
from specexport.compile.draft_cuts import describe_layers
from specexport.compile.draft_trial import describe_trial
from specexport.compile.head import describe_probe
from specexport.compile.token_map import describe_share
from specexport.report import print_json
from specexport_runtime.abi import (
    ADAPTER_IDS,
    AFTER_NORM,
    ALIGNED_STEP_INPUTS,
    CACHE_BYTES,
    CACHE_INPUTS,
    FEATURE_INPUTS,
    FEATURES,
    GATE_INPUTS,
    ITEM_BYTES,
    LOGITS,
    NEXT_FEATURES,
    OUTPUTS,
    PARENTS,
    SIMILARITY,
    STATE_INPUTS,
    STATE_OUTPUTS,
    STATE_STEPS,
    STEP_INPUTS,
    TOKEN_IDS,
    LayerGeometry,
    TensorSpec,
    kv_slack,
    num_pending,
    state_shapes,
)
from specexport_runtime.bundle.draft_layers import DraftLayers, load_draft_layers
from specexport_runtime.bundle.entry import AdapterEntry, DraftHeadEntry, EngineFile, Gates, ModelEntry
from specexport_runtime.bundle.files import check_files
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.bundle.opened import CHAT_TEMPLATE_NAME
from specexport_runtime.bundle.quant_kinds import KEPT, KINDS
from specexport_runtime.drafters.base import DraftOffer, Obstacle
from specexport_runtime.drafters.registry import KINDS as DRAFTERS
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.open import find_engine_backend
from specexport_runtime.executors.operators import kernels

_GPU_OUTPUTS = (TOKEN_IDS,)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--all", "show_all", is_flag=True, help="Also graphs, passes, files, recipe and tool versions.")
@click.option("--check-files", "whole", is_flag=True, help="Also check the hash of every file.")
def inspect(bundle: Path, *, as_json: bool, show_all: bool, whole: bool) -> None:
    """Show what is in BUNDLE: models, sizes, memory, how it can draft, whether it was verified."""
    manifest = load_manifest(bundle)
    if whole:
        check_files(bundle, manifest.files)
    layers = load_draft_layers(bundle, manifest)
    if as_json:
        print_json(describe_json(manifest, layers))
    elif show_all:
        click.echo("\n".join(describe(manifest, layers, files_checked=whole)))
    else:
        click.echo("\n".join(describe_briefly(manifest, layers, files_checked=whole)))


def describe_json(manifest: Manifest, layers: DraftLayers | None = None) -> dict[str, Any]:
    """The manifest as plain values, with what can be computed from it: the contract and the sizes in bytes."""
    data = manifest.to_json()
    data["draft_layers"] = None if layers is None else layers._asdict()
    data["total_bytes"] = sum(entry.size for entry in manifest.files.values())
    for role, entry in manifest.models.items():
        data["models"][role]["takes_trees"] = entry.takes_trees
        data["models"][role]["contract"] = [spec._asdict() for spec in list_contract_rows(entry)]
        data["models"][role]["kept_layers"] = list(entry.kept_layers)
        data["models"][role]["engine_bytes"] = _engine_bytes(manifest, role)
        data["models"][role]["kv_bytes_per_token"] = kv_bytes_per_token(entry)
        data["models"][role]["state_bytes_per_row"] = state_bytes_per_row(entry, manifest.lookahead)
        data["models"][role]["kernels"] = _kernels(entry)
    return data


def list_contract_rows(entry: ModelEntry) -> list[TensorSpec]:
    """Rows of the graph contract that a model's engine has; ``{i}`` stands for each layer."""
    optional = (*GATE_INPUTS, *FEATURE_INPUTS, ADAPTER_IDS, PARENTS, STATE_STEPS)
    known = dict.fromkeys((*STEP_INPUTS, *ALIGNED_STEP_INPUTS, *optional))
    backend = find_engine_backend(entry.backend)
    gates, attention = entry.engine.gates, entry.attention
    extra = (_GPU_OUTPUTS if backend is not None and backend.on_gpu else ()) + ((SIMILARITY,) if gates.kinds else ())
    caches = CACHE_INPUTS if attention.layers else ()  # heads over one feature have none
    outputs = OUTPUTS if attention.layers and not attention.target_layers else (LOGITS,)
    if entry.states:
        caches, outputs = (*caches, *STATE_INPUTS), (*outputs, *STATE_OUTPUTS)
    if entry.engine.feature_size:
        extra += (FEATURES if entry.draft_head is None else NEXT_FEATURES,)
    return [*(spec for spec in known if spec.name in entry.engine.inputs), *caches, *outputs, *extra]


def kv_bytes_per_token(entry: ModelEntry) -> int:
    """Bytes of KV cache that one token takes, over all layers; 0 of a head that reads the target's."""
    if entry.attention.target_layers:
        return 0
    values = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in entry.attention.layers)
    return values * CACHE_BYTES.get(entry.attention.cache_dtype, 4)


def state_bytes_per_row(entry: ModelEntry, lookahead: int) -> int:
    """Bytes that one row takes for states of recurrences, with what drafts leave beside them; 0 without recurrences."""
    shapes = state_shapes(entry.states, 1, num_pending(lookahead, drafts_itself=bool(entry.engine.gates.kinds)))
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES["float32"]


def _engine_bytes(manifest: Manifest, role: str) -> int:
    return sum(entry.size for name, entry in manifest.files.items() if name.startswith(f"{role}/"))


def describe_briefly(
    manifest: Manifest, layers: DraftLayers | None = None, *, files_checked: bool = False
) -> Iterator[str]:
    """What most want to know of a bundle, in a dozen lines."""
    models = dict(sorted(manifest.models.items(), key=lambda item: item[0] != "target"))
    target, length = models.get("target"), manifest.max_model_len
    if target is None:  # nothing can run it
        yield from describe(manifest, layers, files_checked=files_checked)
        return
    state = ", every hash checked" if files_checked else ""
    chosen = _kernels(target)
    operators = "" if chosen is None else f", operators run here with: {chosen}"
    total = _size(sum(entry.size for entry in manifest.files.values()))
    yield f"{manifest.name}: {total} in {len(manifest.files)} files{state}, for {target.backend}{operators}"
    for role, entry in models.items():
        words = f"{entry.source.name} ({entry.source.architecture}), {entry.parameters.total / 1e6:.1f} M parameters"
        yield f"{role + ':':<11} {words}, {_size(_engine_bytes(manifest, role))}"
        yield f"{'':<11} {_weights(manifest, role, entry)}"
        more = (*describe_trial(entry)[:1], *(_describe_adapter(adapter).strip() for adapter in entry.adapters))
        yield from (f"{'':<11} {line}" for line in more)
    rows = {
        role: length * kv_bytes_per_token(entry) + state_bytes_per_row(entry, manifest.lookahead)
        for role, entry in models.items()
    }
    memory = ", ".join(f"{role} {_size(size)}" for role, size in rows.items() if size)
    yield f"{'length:':<11} up to {length} tokens a sequence; the memory of one that long: {memory}"
    yield f"{'at a time:':<11} {manifest.default_num_seqs} sequences, unless --max-num-seqs says otherwise"
    lacking = Obstacle("", "")
    self_draft, head = (None if has else lacking for has in (can_draft_itself(manifest, layers), "head" in models))
    offer = DraftOffer("draft" in models, self_draft, head)
    names = ", ".join(name for name, kind in DRAFTERS.items() if kind.obstacle(offer) is None)
    shape = "chains or trees" if target.takes_trees else "chains, no trees"
    yield f"{'drafters:':<11} {names}; up to K={manifest.lookahead} tokens a round, {shape}"
    if layers is not None:
        yield f"{'':<11} {layers.describe()}"
    yield f"{'chat:':<11} {'has a' if CHAT_TEMPLATE_NAME in manifest.files else 'has no'} chat template"
    tools = ", ".join(f"{name} {manifest.tools[name]}" for name in _BUILDERS if name in manifest.tools)
    yield f"{'built by:':<11} {tools}"
    yield f"{'verified:':<11} {_verified(manifest)}"
    yield "--all shows graphs, passes, files and hashes; --json has everything."


_BUILDERS = ("specexport", "torch", "transformers", "onnxruntime")


def _weights(manifest: Manifest, role: str, entry: ModelEntry) -> str:
    """How the weights are kept, without counts."""
    formats = ", ".join(name for name, *_ in entry.engine.weight_formats)
    return _describe_weight_source(manifest, role, entry) + (f": {formats}" if formats else "")


def _verified(manifest: Manifest) -> str:
    if manifest.verify is None:
        return "not yet; `specexport verify` proves that it decodes losslessly"
    found = {key: manifest.verify[key] for key in ("status", "date") if key in manifest.verify}
    return ", ".join(map(str, found.values()))


def describe(manifest: Manifest, layers: DraftLayers | None = None, *, files_checked: bool = False) -> Iterator[str]:
    """The bundle in lines for a reader."""
    total = sum(entry.size for entry in manifest.files.values())
    state = ", every hash checked" if files_checked else ""
    yield f"{manifest.name}: {len(manifest.files)} files, {_size(total)}{state}"
    yield f"  schema {manifest.schema_version}, ABI {manifest.abi_version}, build {manifest.build_key[:16]}"
    slack = kv_slack(manifest.lookahead)
    room = f"max_model_len {manifest.max_model_len} (+{slack} cache entries for drafts)"
    yield f"  lookahead K up to {manifest.lookahead}, {room}"
    tokens = "" if manifest.max_num_tokens is None else f", {manifest.max_num_tokens} tokens a step"
    yield f"  defaults for loading: {manifest.default_num_seqs} sequences at a time{tokens}"
    vocabulary = manifest.vocabulary
    ends = ", ".join(map(str, vocabulary.eos_token_ids)) or "none"
    yield f"  vocabulary: {vocabulary.size} tokens that may be drafted, bos {vocabulary.bos_token_id}, eos {ends}"
    for role, entry in sorted(manifest.models.items(), key=lambda item: item[0] != "target"):
        yield from _describe_model(manifest, role, entry)
        if role == "target" and layers is not None:
            yield f"  {layers.describe()}"
    yield "files"
    for name, file in manifest.files.items():
        yield f"  {name:<28} {_size(file.size):>10}  sha256 {file.sha256[:16]}"
    yield "recipe: " + ", ".join(f"{key}={value}" for key, value in sorted(manifest.recipe.items()))
    yield "tools: " + ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))
    yield from _describe_verify(manifest)


def _layers_line(entry: ModelEntry) -> str:
    if not entry.attention.layers:
        return "no attention layers"
    kind = "caches to read" if entry.attention.target_layers else "attention layers"
    return f"{len(entry.attention.layers)} {kind} ({_layers(entry.attention.layers)})"


def _describe_rope(entry: ModelEntry) -> Iterator[str]:
    if entry.rope is not None:
        yield f"  rope: {entry.rope.text}, for sequences of up to {entry.rope.max_len} tokens"


def _kv_cache(manifest: Manifest, entry: ModelEntry) -> str:
    attention = entry.attention
    if attention.target_layers:
        return f"none; it reads that of layers {', '.join(map(str, attention.target_layers))} of the target"
    windows = 0 if manifest.lends_caches else sum(window > 0 for window in attention.windows)
    behind = f"; {windows} of {len(attention.windows)} layers keep a window" if windows else ""
    return f"{attention.cache_dtype}, {kv_bytes_per_token(entry)} bytes a token{behind}"


def _experts(entry: ModelEntry) -> Iterator[str]:
    if entry.parameters.experts is not None:
        count, chosen, each = entry.parameters.experts
        yield f"  experts: {each} a layer, of which a token takes {chosen}; {count / 1e6:.1f} M of the parameters"


def _recurrences(entry: ModelEntry, lookahead: int) -> Iterator[str]:
    if entry.states:
        size = state_bytes_per_row(entry, lookahead)
        yield f"  {len(entry.states)} recurrences, whose states take {size} bytes a row with K = {lookahead}"


def _describe_model(manifest: Manifest, role: str, entry: ModelEntry) -> Iterator[str]:
    yield f"{role}: {entry.source.architecture} from {entry.source.name} (sha256 {entry.source.sha256[:16]})"
    yield (
        f"  {entry.parameters.total / 1e6:.1f} M parameters, {entry.dtype}, backend {entry.backend}, "
        f"{entry.engine.path}, {_size(_engine_bytes(manifest, role))}"
    )
    limit = "no limit" if entry.max_positions is None else str(entry.max_positions)
    yield f"  {_layers_line(entry)}, V {entry.vocab_size}, positions: {limit}"
    yield from _describe_rope(entry)
    if entry.dropped_layers:
        yield f"  {describe_layers(entry)}"
    yield from map(_describe_adapter, entry.adapters)
    if (head := entry.draft_head) is not None:
        kind = f"{count} of {head.kind}" if (count := head.num_draft_heads or head.num_modules) else head.kind
        blocks = "" if head.block_size is None else f" with blocks of {head.block_size}"
        if head.correction is not None:
            blocks += f" and a {head.correction.rule} over {head.correction.most} tokens of a place"
        yield f"  draft head: {kind}{blocks}, features of {entry.engine.feature_size} from hidden states {_taps(head)}"
        if head.guessed is not None:
            yield f"  {describe_probe(head.guessed, head.reading)}"
    elif entry.engine.feature_size:
        when = "steps that want them" if entry.backend == "ort-cpu" else "every step"
        yield f"  gives features of {entry.engine.feature_size} values to a draft head, in {when}"
    if entry.token_map is not None:
        yield f"  another vocabulary than the target's: they share {describe_share(entry.token_map)}"
    if entry.cut_lm_head is not None:
        yield f"  LM head: {entry.lm_head_rows} of {entry.vocab_size} tokens"
    yield from map("  {}".format, describe_trial(entry))
    yield f"  KV cache: {_kv_cache(manifest, entry)}"
    yield from _experts(entry)
    yield from _recurrences(entry, manifest.lookahead)
    dtypes = {"model": entry.dtype, "cache": entry.attention.cache_dtype}
    yield "  graph: " + ", ".join(
        f"{spec.name}[{','.join(map(str, spec.shape))}] {dtypes.get(spec.dtype, spec.dtype)}"
        for spec in list_contract_rows(entry)
    )
    yield from _describe_engines(entry)
    if entry.engine.padded is not None:
        yield f"  padded-KV graph over the same weights: {entry.engine.padded.path}"
    if entry.quantize is not None or entry.engine.weight_formats:
        yield from _describe_weights(entry, _describe_weight_source(manifest, role, entry))
    if (chosen := _kernels(entry)) is not None:
        yield f"  operators run here with: {chosen}"
    if role == "target":
        yield f"  drafts for it: {'chains or trees' if entry.takes_trees else 'chains, no trees'}"
    yield from _self_drafting(entry.engine.gates)
    if entry.passes:
        yield "  passes: " + ", ".join(f"{name} {count}" for name, count in (*entry.passes, *entry.engine.fused))


def _self_drafting(gates: Gates) -> Iterator[str]:
    """How many blocks of each kind drafts can leave out."""
    counts = Counter(kind for kind in gates.kinds if kind)
    if counts:
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        yield f"  self-drafting: {counts.total()} blocks ({kinds}) can be skipped"
    elif gates.obstacle is not None:
        yield f"  no self-drafting: {gates.obstacle}"


def _describe_adapter(adapter: AdapterEntry) -> str:
    use = "merged into the weights" if adapter.use == "merged" else "for requests that choose it"
    source = f"{adapter.source} (sha256 {adapter.sha256[:16]})"
    return f"  LoRA adapter {adapter.name} from {source}, rank {adapter.rank}: {use}"


def _taps(head: DraftHeadEntry) -> str:
    return ", ".join("after the last norm" if tap == AFTER_NORM else str(tap) for tap in head.taps)


def _kernels(entry: ModelEntry) -> str | None:
    """The instruction set of our own operators on this machine, or why there is none; None on a GPU."""
    backend = find_engine_backend(entry.backend)
    if backend is None or backend.on_gpu:
        return None
    try:
        return kernels()
    except SpecexportError as error:  # what a bundle holds can be read anywhere
        return f"none: {error.message}"


def _describe_weight_source(manifest: Manifest, role: str, entry: ModelEntry) -> str:
    """What became of the weights of the checkpoint."""
    if entry.quantize is not None:
        kind = KINDS.get(entry.quantize)
        return (kind and kind.says) or f"quantized: {entry.quantize} weights"
    # A head keeps what its file has.
    dtype = str((None if role == "head" else manifest.recipe.get("dtype")) or entry.dtype)
    return "weights, exact" if dtype == entry.dtype else f"weights, rounded to {dtype}"


def _describe_weights(entry: ModelEntry, says: str) -> Iterator[str]:
    exact = ", exact" if entry.quantize == KEPT.name else ""
    formats = [
        f"{name} {count / 1e6:.1f} M ({8 * size / max(count, 1):.2f} bits each{exact})"
        for name, count, size in entry.engine.weight_formats
    ]
    yield f"  {says}{': ' if formats else ' in the linear layers'}{', '.join(formats)}{_saved(entry)}"


def _saved(entry: ModelEntry) -> str:
    """How much smaller the packed weights are, where that was counted."""
    if entry.engine.packed_bytes is None:
        return ""
    stored, before = entry.engine.packed_bytes
    return f", {_size(stored)} instead of {_size(before)} in {entry.dtype}, {stored / max(before, 1):.3f} of it"


def _describe_engines(entry: ModelEntry) -> Iterator[str]:
    if (limits := entry.engine.limits) is not None:
        rows = f"up to {limits.max_num_seqs} sequences of {limits.kv_capacity} cache entries"
        yield f"  lowering {entry.engine.lowering}, {rows}"
        yield "  profiles: " + ", ".join(profile.name for profile in limits.profiles)
    for engine in entry.engine.files:
        memory = "" if engine.memory_bytes is None else f", {_size(engine.memory_bytes)} of activations"
        yield f"  {engine.sm}: {engine.path}, {engine.builder} {engine.builder_version}{memory}"
        yield f"    {_attention(engine, len(entry.attention.layers))}"


def _attention(engine: EngineFile, num_layers: int) -> str:
    """What the builder said of caches, attention and precision, in one line."""
    rows = () if engine.report is None else engine.report.profiles
    aliased = 0 if engine.report is None else len(engine.report.aliased)
    fused = sum(row.fused_attention >= num_layers for row in rows)
    wide = sum(len(row.float32_matmuls) for row in rows)
    products = sorted({row.quantized_products for row in rows})
    expanded = sum(row.expanded_weights for row in rows)
    quantized = ""
    if products[-1:] > [0] or expanded:
        quantized = f"; {' to '.join(map(str, {products[0]: 0, products[-1]: 0}))} products of quantized weights a step"
        quantized += f", {expanded} weights made float by kernels of their own" if expanded else ""
    return (
        f"{aliased} of {2 * num_layers} caches in place; attention fused in {fused} of {len(rows)} profiles; "
        f"{wide} float32 matrix products{quantized}"
    )


def _layers(layers: tuple[LayerGeometry, ...]) -> str:
    kinds: dict[LayerGeometry, int] = {}
    for layer in layers:
        kinds[layer] = kinds.get(layer, 0) + 1
    return "; ".join(
        f"{count}x {layer.kv_heads} KV heads, key {layer.k_dim}, value {layer.v_dim}" for layer, count in kinds.items()
    )


def _describe_verify(manifest: Manifest) -> Iterator[str]:
    if manifest.verify is None:
        yield "verify: not verified yet; run `specexport verify`"
        return
    shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in manifest.verify.items()}
    yield "verify: " + ", ".join(f"{key}={value}" for key, value in shown.items())


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 10**6 else f"{count / 1e3:.1f} kB"
