"""Bundle metadata: the schema of ``manifest.json``, reading it, and refusing what does not fit.

The compiler writes manifests and the runtime reads them; both use these classes, so the schema exists once. Imports
the standard library only.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

from specexport_runtime.abi import (
    ABI_VERSION,
    ADAPTER_IDS,
    CACHE_BYTES,
    ITEM_BYTES,
    LARGEST_SIZE,
    READABLE_ABIS,
    GateKind,
    LayerGeometry,
    StateGeometry,
)
from specexport_runtime.bundle.files import FileEntry, file_fault
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.bundle.rules import (
    MisfitError,
    Rule,
    anything,
    inner_path,
    list_of,
    number,
    one_of,
    optional,
    record,
    table_of,
    text,
    tuple_of,
    whole,
)
from specexport_runtime.errors import BundleError, IncompatibleError

SCHEMA_VERSION = 12
READABLE_SCHEMAS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
"""Version 3 added the fields of engines that are built for a GPU, version 4 those of self-drafting and quantization,
version 5 the defaults for loading, and engines that are stored as a difference, version 6 those of a cut LM head,
version 7 the layers that a draft was built without, version 8 what a step's cost can be told from, version 9 the
dtype of KV caches, version 10 draft heads, version 11 the states of recurrences, windows, experts, LoRA adapters, and
which rotary table an engine has, version 12 engines for CPUs of our own operators, and how a draft got its form. An
older manifest is one without them."""
_GONE = {"full_path", "full_inputs", "one_token_path", "one_token_inputs"}  # of graphs that are not used any more
MANIFEST_NAME = "manifest.json"
DEFAULT_NUM_SEQS = 8
MAX_LOOKAHEAD = 64
MAX_MODEL_LEN = 1 << 24
MAX_NUM_SEQS = 4096
MAX_NUM_TOKENS = 1 << 20
MAX_ADAPTERS = 64
"""What a recipe may ask for, and a manifest may say."""
HYDRA = "hydra"
"""``ModelEntry.head_kind`` of heads that read what those before them guessed."""
SMALL_DRAFT_PARAMETERS = 20_000_000
"""Below this a draft's step is mostly fixed cost per operator: threads do not share it, fewer operators help."""
_REBUILD = "build it again with `specexport build`."


@dataclass(frozen=True)
class EngineFile:
    """A model's engine for one GPU architecture; its paths are relative to the bundle folder."""

    path: str
    sm: str  # architecture, for example "sm89"; "any" for a portable engine
    builder: str  # package that built it and can load it: "tensorrt" or "tensorrt-rtx"
    builder_version: str  # an engine loads only under the version that built it
    memory_bytes: int | None = None  # device memory for the activations of the largest profile; None: not known
    report: Mapping[str, Any] = field(default_factory=dict)  # of the builder, see ``specexport.backends.trt_report``
    # Engine in the same folder that ``path`` is the difference from (``bundle.delta``); None where ``path`` is whole.
    base: str | None = None


class ExpertSizes(NamedTuple):
    """The experts of a model, of all layers that have some."""

    parameters: int  # of all experts together
    per_token: int  # how many of a layer's experts a token takes
    per_layer: int  # how many experts a layer has


class TriedForm(NamedTuple):
    """A form of a draft that a build tried."""

    quantize: str | None  # of its weights, as in ``ModelEntry``
    head_size: int  # tokens of its LM head
    accepted: float  # share of the target's tokens that it guessed, 0 to 1
    step: float  # what a step costs, over a step of the target
    speed: float  # tokens a second that it promises, over plain decoding


class FormTrial(NamedTuple):
    """How a build chose the form of a draft."""

    num_tokens: int  # tokens of the target that were to be guessed
    forms: tuple[TriedForm, ...]  # what was tried, the simplest first
    obstacle: str | None = None  # why nothing was tried, or not all of it; None where all was


@dataclass(frozen=True)
class AdapterEntry:
    """A LoRA adapter of a target."""

    name: str  # as requests call it
    source: str  # name of the folder that it came from
    sha256: str  # over its files
    rank: int  # the largest r of its layers
    use: str  # "merged" where it is a part of the weights, "chosen" where requests choose it


@dataclass(frozen=True)
class ModelEntry:
    """One model of a bundle (target, draft or draft head) and its engine, or its engines by GPU architecture.

    Paths are relative to the bundle folder. Fields that an older bundle lacks have their defaults.
    """

    path: str  # engine file; the first of ``engines`` where there are some
    backend: str  # that built it, for example "ort-cpu"
    architecture: str  # model class name of the checkpoint
    dtype: str  # numpy name: of activations, and of caches and weights unless kv_dtype and weight_formats name others
    vocab_size: int  # token ids of the model (V): rows of its LM head, unless that was cut
    layers: tuple[LayerGeometry, ...]  # cache sizes of each attention layer, in order
    inputs: tuple[str, ...]  # step inputs that the lowered graph takes (names of the contract)
    num_parameters: int  # tied ones counted once
    max_positions: int | None  # None: no limit
    source: str  # of the checkpoint: a hub id, or the name of a local folder or file
    source_sha256: str  # over the checkpoint's files
    passes: tuple[tuple[str, int], ...] = ()  # what each compiler pass changed, in order: name, changes
    padded_path: str | None = None  # graph for caches that hold padding entries, over the same weights
    padded_inputs: tuple[str, ...] = ()  # step inputs that graph takes
    # What stands behind attention: "function" (ort-cpu), "paged" (ort-cuda), or for TensorRT "native-folded", "native"
    # or "plugin"; in older bundles "native-grouped" too.
    lowering: str = "function"
    engines: tuple[EngineFile, ...] = ()  # by GPU architecture; empty where ``path`` is the one engine
    profiles: tuple[Profile, ...] = ()  # step sizes the engines were built for, in their order; empty: any size runs
    kv_capacity: int | None = None  # L, entries of a cache row, where the engine fixes it; None: the arena decides
    max_num_seqs: int | None = None  # cache rows the engine was built for; None: any number
    num_gates: int = 0  # G, parts that can be switched off for drafting with the target itself; 0 where none can
    # What each of them is, see ``abi.GateKind``; empty in older bundles, where each layer has an attention and an MLP.
    gate_kinds: tuple[str, ...] = ()
    gate_obstacle: str | None = None  # why no layer can be skipped exactly; None where not asked for, or one can
    skipped_layers: tuple[int, ...] = ()  # that such drafts leave out, where the engine fixes them; else prompts decide
    # Of the linear layers' weights: "int8", "int4", or "keep" for the integers of a quantized checkpoint.
    quantize: str | None = None
    quantized_bytes: tuple[int, int] | None = None  # of the packed weights, and what they would take in ``dtype``
    fused: tuple[tuple[str, int], ...] = ()  # what the lowering fused: name, count
    head_ids_path: str | None = None  # token ids that a draft's LM head was cut down to, see ``bundle.cut_head``
    num_head_ids: int | None = None  # N, how many those are; None: the LM head is whole
    # Layers of its checkpoint that a draft was built without, in the order in which they were chosen: number, and mean
    # cosine of input and output (-1 to 1).
    dropped_layers: tuple[tuple[int, float], ...] = ()
    # Parameters that a step multiplies with each of its tokens: without an embedding that is only looked up, and
    # without what an LM head was cut by.
    step_parameters: int | None = None
    # Of those parameters, the ones of which a step reads what its tokens chose; None where there are none, and where
    # the backend multiplies by copies of them.
    experts: ExpertSizes | None = None
    num_heads: int | None = None  # query heads of an attention layer; None where the checkpoint does not say
    # Of engines for CPUs, each format of the packed weights: name, weights and bytes; with "keep" those of the
    # checkpoint.
    weight_formats: tuple[tuple[str, int, int], ...] = ()
    kv_dtype: str | None = None  # "int8" where the KV caches are not of ``dtype``
    feature_size: int = 0  # E: width of the features that a target gives, and its draft head reads; 0 without a head
    head_kind: str | None = None  # of a draft head: what it computes, "eagle3" or another
    # Of a draft head: the target's hidden states that features are made of, as transformers numbers them, and -1 for
    # the one behind its last norm.
    taps: tuple[int, ...] = ()
    mask_token_id: int | None = None  # of a head that drafts all tokens in one step: stands for tokens not known yet
    mask_path: str | None = None  # the feature that comes with it, see ``bundle.mask_feature``; None where none does
    num_draft_heads: int = 0  # Medusa and Hydra heads, each for a place of a draft
    block_size: int | None = None  # of a head that fills blocks: most tokens of one, the newest and those to guess
    target_layers: tuple[int, ...] = ()  # of a head that reads the target's caches: whose; ``layers`` has their sizes
    # Entries that a token of each attention layer sees, itself included, -1 for all; empty where all layers see all.
    windows: tuple[int, ...] = ()
    states: tuple[StateGeometry, ...] = ()  # sizes of what each recurrence keeps of a row, in order
    guessed: float | None = None  # of a draft head: share of first guesses that were right when it was built, 0 to 1
    reading: str | None = None  # of a draft head: how it was read otherwise than its files say
    rope: str | None = None  # rotary tables that depend on a sequence's length, and which of them the engine has
    rope_len: int | None = None  # tokens of the longest sequence, which they were chosen for
    # Of a target: the merged one, or the ones that requests may choose, in the order of their numbers, from 1.
    adapters: tuple[AdapterEntry, ...] = ()
    trial: FormTrial | None = None  # of a draft whose form the build chose

    @property
    def chosen_adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may choose, in the order of their numbers, from 1."""
        return tuple(adapter.name for adapter in self.adapters if adapter.use == "chosen")

    @property
    def cache_dtype(self) -> str:
        """What the KV caches hold, a numpy name."""
        return self.kv_dtype or self.dtype

    @property
    def approximation(self) -> str | None:
        """What makes it another function than its checkpoint: its quantization, else its caches; None for nothing."""
        return self.quantize or (None if self.kv_dtype is None else f"{self.kv_dtype} KV cache")

    @property
    def head_size(self) -> int:
        """Rows of the LM head: the width of the logits."""
        return self.num_head_ids or self.vocab_size

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Layers of the checkpoint that the model has, ascending."""
        dropped = {layer for layer, _ in self.dropped_layers}
        return tuple(i for i in range(len(self.layers) + len(dropped)) if i not in dropped)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ModelEntry":
        """Rebuild an entry from its JSON form."""
        fields = _without_gone(data)
        fields["layers"] = tuple(LayerGeometry(*layer) for layer in data["layers"])
        fields["windows"] = tuple(fields.get("windows", ()))
        fields["states"] = tuple(StateGeometry(tuple(shape), width) for shape, width in data.get("states", ()))
        fields["experts"] = None if fields.get("experts") is None else ExpertSizes(*fields["experts"])
        fields["inputs"] = tuple(data["inputs"])
        fields["padded_inputs"] = tuple(data.get("padded_inputs", ()))
        fields["skipped_layers"] = tuple(fields.get("skipped_layers", ()))
        fields["gate_kinds"] = tuple(fields.get("gate_kinds", ()))
        fields["dropped_layers"] = tuple((int(layer), float(value)) for layer, value in data.get("dropped_layers", ()))
        fields["taps"] = tuple(fields.get("taps", ()))
        fields["target_layers"] = tuple(fields.get("target_layers", ()))
        fields["engines"] = tuple(EngineFile(**engine) for engine in data.get("engines", ()))
        fields["profiles"] = tuple(Profile(*profile) for profile in data.get("profiles", ()))
        fields["fused"] = tuple((str(name), int(count)) for name, count in data.get("fused", ()))
        if fields.get("quantized_bytes") is not None:
            fields["quantized_bytes"] = tuple(fields["quantized_bytes"])
        formats = data.get("weight_formats", ())
        fields["weight_formats"] = tuple((str(name), int(count), int(size)) for name, count, size in formats)
        fields["passes"] = tuple((str(name), int(count)) for name, count in data.get("passes", ()))
        fields["adapters"] = tuple(AdapterEntry(**adapter) for adapter in data.get("adapters", ()))
        if fields.get("trial") is not None:
            count, forms, obstacle = fields["trial"]
            fields["trial"] = FormTrial(count, tuple(TriedForm(*form) for form in forms), obstacle)
        return cls(**fields)


@dataclass(frozen=True)
class VocabularyInfo:
    """Vocabulary and tokenizer identity."""

    size: int  # token ids that both models know and that the tokenizer can produce: only ids below it are drafted
    tokenizer_sha256: str  # of ``tokenizer.json``
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # text by name (``bos_token``), for chat templates


@dataclass(frozen=True)
class Manifest:
    """Everything a bundle says about itself (``manifest.json``)."""

    name: str
    build_key: str  # hash of all that decides the result: recipe, weights, compiler sources, tool versions
    recipe: Mapping[str, Any]  # the resolved one
    tools: Mapping[str, str]  # versions of the tools that built it
    vocabulary: VocabularyInfo
    max_model_len: int  # most tokens (prompt and generated) of one sequence
    lookahead: int  # largest K the bundle was built and verified for
    models: Mapping[str, ModelEntry]  # "target", and "draft" for a draft model or "head" for a draft head
    files: Mapping[str, FileEntry]  # every other file of the bundle by relative path
    verify: Mapping[str, Any] | None = None  # summary of the last ``specexport verify``
    max_num_seqs: int | None = None  # sequences decoded at a time, unless a load says otherwise; None: default_num_seqs
    max_num_tokens: int | None = None  # most tokens of one step, likewise; None: the runtime's choice
    schema_version: int = SCHEMA_VERSION
    abi_version: int = ABI_VERSION

    @property
    def default_num_seqs(self) -> int:
        """Sequences that are decoded at a time where nothing else is asked for: what it was built for, else 8."""
        built = [entry.max_num_seqs for entry in self.models.values() if entry.max_num_seqs is not None]
        return self.max_num_seqs or min(built, default=DEFAULT_NUM_SEQS)

    @property
    def lends_caches(self) -> bool:
        """Whether a draft head reads the target's KV caches."""
        return any(entry.target_layers for entry in self.models.values())

    def to_json(self) -> dict[str, Any]:
        """JSON form, with ``manifest_sha256`` over everything else."""
        data: dict[str, Any] = asdict(self)
        data["models"] = {
            role: {**asdict(entry), "layers": [list(layer) for layer in entry.layers]}
            for role, entry in self.models.items()
        }
        plain: dict[str, Any] = json.loads(json.dumps(data))
        plain["manifest_sha256"] = _digest(plain)
        return plain

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder`` in one step (temporary file, then rename)."""
        path = folder / MANIFEST_NAME
        temporary = path.with_name(f".{MANIFEST_NAME}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, path)


_COUNT = whole(0, 1 << 62)
_SIZE = whole(1, LARGEST_SIZE)
_PASSES = list_of(tuple_of(text, _COUNT))
_KIND = one_of("decode", "self", "verify", "catch-up", "draft", "prefill")
_PROFILE = tuple_of(_KIND, _SIZE, _SIZE, _SIZE, _SIZE, _SIZE, optional=1)  # older bundles fold nothing
_TRIED = tuple_of(optional(text), _SIZE, number(0, 1), number(0, 1 << 40), number(0, 1 << 40))
_LAYERS = list_of(tuple_of(_SIZE, _SIZE, _SIZE))
_REPORT_ROW = record({"fused_attention": _COUNT, "float32_matmuls": list_of(anything)}, more=True)
_REPORT = {"aliased": list_of(anything), "profiles": list_of(_REPORT_ROW)}


def _rules_of(kind: Any, **rules: Rule) -> Rule:
    """The rule of a dataclass in JSON: the rule of each field; one that has a default may be lacking."""
    if rules.keys() != {each.name for each in fields(kind)}:
        raise TypeError(f"every field of {kind.__name__} needs a rule")
    given = (each for each in fields(kind) if each.default is not MISSING or each.default_factory is not MISSING)
    return record(rules, may_lack=frozenset(each.name for each in given))


_ENGINE_RULES = _rules_of(
    EngineFile,
    path=inner_path,
    sm=text,
    builder=text,
    builder_version=text,
    memory_bytes=optional(_COUNT),
    report=record(_REPORT, may_lack=frozenset(_REPORT), more=True),
    base=optional(inner_path),
)
_ADAPTER_RULES = _rules_of(
    AdapterEntry, name=text, source=text, sha256=text, rank=whole(1, 1 << 20), use=one_of("merged", "chosen")
)
_ENTRY_RULES = _rules_of(
    ModelEntry,
    path=inner_path,
    backend=text,
    architecture=text,
    dtype=one_of(*ITEM_BYTES),
    vocab_size=whole(1, 1 << 24),
    layers=_LAYERS,
    inputs=list_of(text),
    num_parameters=_COUNT,
    max_positions=optional(_COUNT),
    rope=optional(text),
    rope_len=optional(whole(1, MAX_MODEL_LEN)),
    source=text,
    source_sha256=text,
    passes=_PASSES,
    padded_path=optional(inner_path),
    padded_inputs=list_of(text),
    lowering=text,
    engines=list_of(_ENGINE_RULES),
    profiles=list_of(_PROFILE),
    kv_capacity=optional(whole(1, MAX_MODEL_LEN + MAX_LOOKAHEAD + 1)),
    max_num_seqs=optional(whole(1, MAX_NUM_SEQS)),
    num_gates=whole(0, 1 << 20),
    gate_kinds=list_of(one_of(*get_args(GateKind))),
    gate_obstacle=optional(text),
    skipped_layers=list_of(_COUNT),
    quantize=optional(text),
    quantized_bytes=optional(tuple_of(_COUNT, _COUNT)),
    fused=_PASSES,
    head_ids_path=optional(inner_path),
    num_head_ids=optional(whole(1, 1 << 24)),
    dropped_layers=list_of(tuple_of(_COUNT, number(-1, 1))),
    step_parameters=optional(_COUNT),
    experts=optional(tuple_of(_COUNT, _SIZE, _SIZE)),
    num_heads=optional(whole(1, 1 << 16)),
    weight_formats=list_of(tuple_of(text, _COUNT, _COUNT)),
    kv_dtype=optional(one_of(*CACHE_BYTES)),
    feature_size=whole(0, 1 << 20),
    head_kind=optional(text),
    taps=list_of(whole(-1, 1 << 20)),
    mask_token_id=optional(whole(0, 1 << 24)),
    mask_path=optional(inner_path),
    num_draft_heads=whole(0, MAX_LOOKAHEAD),
    block_size=optional(whole(2, 1 << 16)),
    target_layers=list_of(whole(0, 1 << 20)),
    windows=list_of(whole(-1, 1 << 30)),
    states=list_of(tuple_of(list_of(_SIZE), _SIZE)),
    guessed=optional(number(0, 1)),
    reading=optional(text),
    adapters=list_of(_ADAPTER_RULES),
    trial=optional(tuple_of(_COUNT, list_of(_TRIED), optional(text))),
)


def _model_rules(value: Any, where: str) -> None:
    _ENTRY_RULES(_without_gone(value) if isinstance(value, dict) else value, where)


_VOCABULARY_RULES = _rules_of(
    VocabularyInfo,
    size=whole(1, 1 << 24),
    tokenizer_sha256=text,
    bos_token_id=optional(_COUNT),
    eos_token_ids=list_of(whole(0, 1 << 24)),
    special_tokens=table_of(text),
)
_MANIFEST_RULES = _rules_of(
    Manifest,
    name=text,
    build_key=text,
    recipe=table_of(anything),
    tools=table_of(text),
    vocabulary=_VOCABULARY_RULES,
    max_model_len=whole(2, MAX_MODEL_LEN),
    lookahead=whole(1, MAX_LOOKAHEAD),
    models=table_of(_model_rules, keys=one_of("target", "draft", "head")),
    files=table_of(_rules_of(FileEntry, sha256=text, size=_COUNT), keys=inner_path),
    verify=optional(table_of(anything)),
    max_num_seqs=optional(whole(1, MAX_NUM_SEQS)),
    max_num_tokens=optional(whole(1, MAX_NUM_TOKENS)),
    schema_version=whole(1, SCHEMA_VERSION),
    abi_version=whole(1, ABI_VERSION),
)
"""What a manifest may say, of every schema that can be read: one place for all types and ranges."""


def _digest(data: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in data.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Read and check ``folder/manifest.json``; the other files are checked by :func:`check_files`.

    BundleError if the folder is no bundle or its manifest was altered, IncompatibleError for a schema or an ABI that
    this runtime does not read.
    """
    path = folder / MANIFEST_NAME
    if not os.path.isdir(folder):  # Path.is_dir raises for a name that no folder can have
        raise BundleError(f"there is no folder {folder}.", "give the bundle folder that `specexport build -o` wrote.")
    if not os.path.lexists(path):
        raise BundleError(f"{folder} has no {MANIFEST_NAME}, so it is not a bundle.", _REBUILD)
    if (fault := file_fault(path)) is not None:
        raise BundleError(f"{path} {fault[0]}.", fault[1] or _REBUILD)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema, abi = int(data["schema_version"]), int(data["abi_version"])
        digest = _digest(data)
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}).", "give a readable bundle.") from error
    except RecursionError:
        raise BundleError(f"{path} is nested too deeply.", _REBUILD) from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise BundleError(f"{path} cannot be read ({error}).", _REBUILD) from error
    if schema not in READABLE_SCHEMAS:
        newer = schema > SCHEMA_VERSION
        fix = "upgrade specexport (`pip install -U specexport`)." if newer else _REBUILD
        readable = " and ".join(map(str, READABLE_SCHEMAS))
        raise IncompatibleError(f"{path}: schema_version is {schema}, this runtime reads {readable}.", fix)
    if abi not in READABLE_ABIS:
        readable = " and ".join(map(str, READABLE_ABIS))
        raise IncompatibleError(f"{path}: abi_version is {abi}, this runtime speaks {readable}.", _REBUILD)
    if data.get("manifest_sha256") != digest:
        raise BundleError(f"{path} was altered: manifest_sha256 does not match its content.", _REBUILD)
    return _from_json(data, path)


def _from_json(data: dict[str, Any], path: Path) -> Manifest:
    values = {key: value for key, value in data.items() if key != "manifest_sha256"}
    try:
        _MANIFEST_RULES(values, "")
        ends = tuple(values["vocabulary"]["eos_token_ids"])
        values["vocabulary"] = VocabularyInfo(**{**values["vocabulary"], "eos_token_ids": ends})
        values["models"] = {role: ModelEntry.from_json(entry) for role, entry in values["models"].items()}
        values["files"] = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        manifest = Manifest(**values)
        _check_agreement(manifest)
    except MisfitError as error:
        raise BundleError(f"{path} does not follow its schema: {error}.", _REBUILD) from error
    return manifest


def _without_gone(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in _GONE}


def _check_agreement(manifest: Manifest) -> None:
    """Refuse what each part may say, but not together with the others."""
    vocabulary = manifest.vocabulary
    for role, entry in manifest.models.items():
        if entry.max_positions is not None and manifest.max_model_len > entry.max_positions:
            raise MisfitError(
                "max_model_len", manifest.max_model_len, f"within {role}'s {entry.max_positions} positions"
            )
        if vocabulary.size > entry.vocab_size:
            raise MisfitError("vocabulary.size", vocabulary.size, f"within {role}'s vocabulary of {entry.vocab_size}")
        beyond = [token for token in vocabulary.eos_token_ids if role == "target" and token >= entry.vocab_size]
        if beyond:
            raise MisfitError("an id of vocabulary.eos_token_ids", beyond[0], f"below {entry.vocab_size}")
        paths = [entry.path, entry.padded_path, *(engine.path for engine in entry.engines)]
        paths += [engine.base for engine in entry.engines]
        for path in paths:
            if path is not None and path not in manifest.files:
                raise MisfitError(f"an engine of models.{role}", path, "among the files")
        _check_head(manifest, role, entry)
        _check_dropped(role, entry)
        _check_lent(manifest, role, entry)
        _check_adapters(role, entry)
        if entry.experts is not None and entry.experts.per_token > entry.experts.per_layer:
            raise MisfitError(f"experts of models.{role}", entry.experts, "no more for a token than a layer has")


def _check_head(manifest: Manifest, role: str, entry: ModelEntry) -> None:
    """Refuse an LM head that is cut down without saying to what, or that of a target, which must say everything."""
    ids, path = entry.num_head_ids, entry.head_ids_path
    if (ids is None) != (path is None):
        raise MisfitError(f"num_head_ids of models.{role}", ids, "given where head_ids_path is, and only there")
    if ids is None:
        return
    if role == "target":
        raise MisfitError("num_head_ids of models.target", ids, "null: only a draft's LM head may be cut")
    if ids > entry.vocab_size:
        raise MisfitError(f"num_head_ids of models.{role}", ids, f"within its vocabulary of {entry.vocab_size}")
    if path not in manifest.files:
        raise MisfitError(f"head_ids_path of models.{role}", path, "among the files")


def _check_lent(manifest: Manifest, role: str, entry: ModelEntry) -> None:
    """Refuse a head that reads other caches than the target has."""
    if not entry.target_layers:
        return
    where, target = f"target_layers of models.{role}", manifest.models.get("target")
    if role != "head" or target is None:
        raise MisfitError(where, entry.target_layers, "empty: only a draft head reads caches of a target")
    there = [target.layers[layer] for layer in entry.target_layers if layer < len(target.layers)]
    if tuple(there) != entry.layers or target.cache_dtype != entry.cache_dtype:
        raise MisfitError(where, entry.target_layers, "layers of the target whose caches are of the sizes in `layers`")


def _check_adapters(role: str, entry: ModelEntry) -> None:
    """Refuse adapters that no build makes: of a draft, too many, two of a name, or one merged among others."""
    where, names = f"adapters of models.{role}", [adapter.name for adapter in entry.adapters]
    if names and role != "target":
        raise MisfitError(where, names, "empty: only a target has adapters")
    if len(names) > MAX_ADAPTERS or len(set(names)) < len(names):
        raise MisfitError(where, names, f"{MAX_ADAPTERS} different names at most")
    if len(names) > 1 and len(entry.chosen_adapters) < len(names):
        raise MisfitError(where, names, "one where it is merged")
    if bool(entry.chosen_adapters) != (ADAPTER_IDS.name in entry.inputs):
        raise MisfitError(
            where, names, f"there to choose from where the engine takes {ADAPTER_IDS.name}, and only there"
        )


def _check_dropped(role: str, entry: ModelEntry) -> None:
    """Refuse dropped layers that no checkpoint can have had, or those of a target, which must be whole."""
    dropped = [layer for layer, _ in entry.dropped_layers]
    if dropped and role == "target":
        raise MisfitError("dropped_layers of models.target", dropped, "empty: only a draft may lack layers")
    if len(set(dropped)) < len(dropped) or any(layer >= len(entry.layers) + len(dropped) for layer in dropped):
        raise MisfitError(f"dropped_layers of models.{role}", dropped, "different layers of its checkpoint")
