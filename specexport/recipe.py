"""What to build: a frozen recipe from flags or a TOML file, every value checked before any work starts.

A :class:`BuildRecipe` is what was asked for, in which None and ``"auto"`` leave a choice to the build.
:func:`resolve_parts` makes these choices, once, for all that is known before a model is loaded. This module imports no
torch, so that a bad flag is reported at once.
"""

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from specexport.backends.base import ANY_ARCHITECTURE, AUTO_MODEL_LEN, PartRecipe
from specexport.backends.registry import BACKENDS, DEFAULT_BACKEND, find_backend
from specexport_runtime.bundle.entry import MAX_ADAPTERS, MAX_LOOKAHEAD, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_TOKENS
from specexport_runtime.bundle.quant_kinds import INT8, KEPT, KINDS, either, list_kinds
from specexport_runtime.cli.errors import suggest
from specexport_runtime.errors import RecipeError

Auto = Literal["auto"]

MIN_MODEL_LEN = 16
KEEP, FLOAT = KEPT.name, "none"
"""Quantizations that are none: weights as a quantized checkpoint has them, and float weights whatever it has."""
AUTO, ALL = "auto", "all"
"""Of a draft: the build finds out what promises most; and an LM head of all tokens."""
SHORT, FULL, NO_CHECK = "short", "full", "none"
"""How engines are compared with eager transformers."""
MERGE, CHOOSE = "merge", "choose"
"""What becomes of LoRA adapters: a part of the weights, or what a request chooses."""
KV_CACHE_DTYPES = ("int8",)
"""What KV caches may hold in the place of the model's dtype."""
_LIMITS = {"max_num_seqs": MAX_NUM_SEQS, "max_num_tokens": MAX_NUM_TOKENS}
"""Most of each limit that a backend does not fix when it builds."""
_SM = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)", re.IGNORECASE)
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ALIASES = {"num_speculative_tokens": "lookahead"}
_DTYPE_ALIASES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}
_TYPES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("name", "backend", "dtype", "lowering", "lora_mode"), (str, "text")),
    **dict.fromkeys(("draft", "head", "revision", "draft_revision", "head_revision"), (str, "text", None)),
    **dict.fromkeys(("quantize", "draft_quantize", "draft_vocab_texts", "kv_cache_dtype"), (str, "text", None)),
    **dict.fromkeys(("trust_remote_code", "quantize_lm_head", "fuse", "self_draft"), (bool, "true or false")),
    **dict.fromkeys(("lookahead", "max_num_seqs", "max_num_tokens", "draft_layers"), (int, "a whole number", None)),
    "draft_vocab_size": (int, "a whole number", None, AUTO, ALL),
    "gpu_memory_gb": ((float, int), "a number", None),
    "max_model_len": (int, 'a whole number or "auto"', "auto"),
}
"""Of each field: its type, that in words, and what else it may be."""
MTP = "mtp"
"""What is given in the place of a draft head for the MTP module in the target's own checkpoint."""
_PATH_KEYS = ("target", "draft", "head", "output", "draft_vocab_texts")


@dataclass(frozen=True)
class BuildRecipe:
    """Everything that decides a bundle, apart from the bytes of the checkpoints. Checked when it is made.

    Attributes:
        target: checkpoint of the target: a local folder, a ``.gguf`` file, or a hub id.
        output: folder of the bundle.
        draft: checkpoint of the draft; None builds a bundle that decodes plainly or with drafters that need no model.
        head: checkpoint of a draft head, which reads the target's hidden states, or ``"mtp"`` for the MTP module in the
            target's own checkpoint; None for none. A bundle has a draft or a head.
        name: name of the bundle; empty takes the output folder's name.
        backend: what runs the engines.
        dtype: dtype of weights, activations and KV caches, or ``"auto"``; ``"fp16"`` and the like get their long names.
            On ort-cpu of float weights alone: ``"auto"`` and ``"float32"`` keep every value, the others round it.
        lookahead: K, the most draft tokens a round, 1 to 64; None takes 8, and 4 for tensorrt-rtx.
        max_model_len: most tokens of one sequence, or ``"auto"``.
        revision: hub revision of the target.
        draft_revision: hub revision of the draft.
        head_revision: hub revision of the head.
        trust_remote_code: let the hub's Python code run while loading.
        check: how each engine is compared with eager transformers before the bundle is kept: ``"short"``, ``"full"``
            or ``"none"``; True and False are ``"short"`` and ``"none"``.
        sm: TensorRT: GPU architectures to build for, for example ``("89", "120")``; empty takes this machine's GPU.
        lowering: tensorrt: ``"plugin"`` puts our attention kernels into the engine; ``"auto"`` takes TensorRT's own.
        max_num_seqs: most sequences at a time; None takes 8. Engines of TensorRT are built for it; elsewhere it is the
            default when the bundle is loaded.
        max_num_tokens: most tokens of one step; None takes 512, or what TensorRT's masks leave room for. As
            ``max_num_seqs``.
        gpu_memory_gb: TensorRT: refuse engines and caches that a GPU of this memory (GB) cannot hold.
        quantize: weights of the target's linear layers: ``"int8"`` (ort-cpu), ``"int4"`` (TensorRT too), ``"keep"``
            (ort-cpu: those of a quantized checkpoint as they are) or ``"none"`` (float). None keeps them where that can
            be done, and else is ``"none"``.
        draft_quantize: the same for the draft, or for the draft head. ``"auto"`` tries several on what the target
            writes (ort-cpu); elsewhere, and of a draft head, it is None, which gives a head of a quantized target int8.
        draft_layers: N, the layers that the draft keeps: those that change most; None keeps all.
        draft_vocab_size: N, the tokens that the draft's LM head keeps: the likeliest ones; None and ``"all"`` keep all,
            ``"auto"`` tries several sizes as ``draft_quantize`` does, and is None elsewhere.
        draft_vocab_texts: file or folder of the texts that tokens are counted, layers measured and forms of the draft
            tried on; None takes the prompts of ``bench``, and others to try forms on.
        quantize_lm_head: whether quantization takes the LM head too.
        kv_cache_dtype: ort-cpu: ``"int8"`` lets target and draft keep their KV caches in 8 bits; None and ``"auto"``
            give caches the dtype of the model.
        fuse: ort-cpu and ort-cuda: pack and fuse operators where that is faster; off is for comparison.
        lora: LoRA adapters of the target: name and folder of each; texts ``"NAME=FOLDER"`` are taken too.
        lora_mode: ``"merge"`` adds the one adapter to the weights, ``"choose"`` lets each request choose one of them or
            none (ort-cpu); ``"auto"`` merges one, and lets choose between several.
        self_draft: let the target draft with some of its own layers (ort-cpu, ort-cuda).

    Raises:
        RecipeError: a value is out of its range or of the wrong type.
    """

    target: str
    output: str
    draft: str | None = None
    head: str | None = None
    name: str = ""
    backend: str = DEFAULT_BACKEND
    dtype: str = "auto"
    lookahead: int | None = None
    max_model_len: int | Auto = "auto"
    revision: str | None = None
    draft_revision: str | None = None
    head_revision: str | None = None
    trust_remote_code: bool = False
    check: bool | str = SHORT
    sm: tuple[str, ...] = ()
    lowering: str = "auto"
    max_num_seqs: int | None = None
    max_num_tokens: int | None = None
    gpu_memory_gb: float | None = None
    quantize: str | None = None
    draft_quantize: str | None = AUTO
    draft_layers: int | None = None
    draft_vocab_size: int | str | None = AUTO
    draft_vocab_texts: str | None = None
    quantize_lm_head: bool = True
    kv_cache_dtype: str | None = None
    fuse: bool = True
    self_draft: bool = False
    lora: tuple[tuple[str, str], ...] = ()
    lora_mode: str = "auto"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_revisions()
        if isinstance(self.check, bool):
            object.__setattr__(self, "check", SHORT if self.check else NO_CHECK)
        if self.check not in (SHORT, FULL, NO_CHECK):
            raise RecipeError(f"check is {self.check!r}.", f"use one of: {SHORT}, {FULL}, {NO_CHECK}.")
        object.__setattr__(self, "sm", normalize_architectures(self.sm))
        object.__setattr__(self, "lora", normalize_adapters(self.lora))
        object.__setattr__(self, "dtype", _DTYPE_ALIASES.get(self.dtype.lower(), self.dtype))
        object.__setattr__(self, "draft_vocab_size", None if self.draft_vocab_size == ALL else self.draft_vocab_size)
        if self.draft is None or not find_backend(self.backend).own_operators:
            for key in ("draft_quantize", "draft_vocab_size"):  # nothing to try, or nothing to try it with
                object.__setattr__(self, key, None if getattr(self, key) == AUTO else getattr(self, key))
        object.__setattr__(self, "kv_cache_dtype", None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype)
        dtypes = find_backend(self.backend).dtypes
        if self.dtype not in ("auto", *dtypes):
            raise RecipeError(
                f"dtype {self.dtype!r} cannot be built for backend {self.backend}.",
                f"use one of: auto, {', '.join(dtypes)}.",
            )
        if self.lookahead is not None and not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise RecipeError(
                f"lookahead (K) is {self.lookahead}, outside 1 to {MAX_LOOKAHEAD}.",
                "give the most draft tokens a round, for example `--lookahead 8`; to decode without a draft, "
                "leave out --draft.",
            )
        if isinstance(self.max_model_len, int) and not MIN_MODEL_LEN <= self.max_model_len <= MAX_MODEL_LEN:
            beyond = f"below {MIN_MODEL_LEN}" if self.max_model_len < MIN_MODEL_LEN else f"above {MAX_MODEL_LEN}"
            raise RecipeError(
                f"max_model_len is {self.max_model_len}, {beyond}.",
                "give the most tokens of one sequence (prompt and generated), or auto.",
            )
        self._check_quantization()
        self._check_draft_reductions()
        self._check_backend_options()
        self._check_adapters()

    @property
    def chooses_adapters(self) -> bool:
        """Whether requests choose between the adapters; else there is one at most, and it is in the weights."""
        return self.lora_mode == CHOOSE or (self.lora_mode == "auto" and len(self.lora) > 1)

    def _check_adapters(self) -> None:
        if self.lora_mode not in ("auto", MERGE, CHOOSE):
            raise RecipeError(f"lora_mode is {self.lora_mode!r}.", f"use one of: auto, {MERGE}, {CHOOSE}.")
        if self.lora_mode != "auto" and not self.lora:
            raise RecipeError("lora_mode is given and lora is not.", "give `--lora NAME=FOLDER`, or leave both out.")
        if self.lora_mode == MERGE and len(self.lora) > 1:
            raise RecipeError(
                f"{len(self.lora)} LoRA adapters are to be merged, and weights hold one.",
                f"give one, or `--lora-mode {CHOOSE}`.",
            )
        if len(self.lora) > MAX_ADAPTERS:
            raise RecipeError(f"{len(self.lora)} LoRA adapters are given.", f"give {MAX_ADAPTERS} at most.")
        if self.chooses_adapters and not find_backend(self.backend).chooses_adapters:
            able = [backend.name for backend in BACKENDS.values() if backend.chooses_adapters]
            raise RecipeError(
                f"requests are to choose between LoRA adapters, and backend {self.backend} cannot do that.",
                f"give one adapter, which is merged into the weights, or build with `--backend {' or '.join(able)}`.",
            )
        taken = next((name for name, _ in self.lora if name == self.bundle_name), None)
        if taken is not None and self.chooses_adapters:
            raise RecipeError(
                f"LoRA adapter {taken} has the name of the bundle, by which requests choose none.",
                "give the adapter another name, or the bundle with --name.",
            )

    def _check_quantization(self) -> None:
        for key in ("quantize", "draft_quantize"):
            value = getattr(self, key)
            if value is None or (key, value) == ("draft_quantize", AUTO):
                continue
            if value not in KINDS and value != FLOAT:
                names = ", ".join((*([AUTO] if key == "draft_quantize" else []), *KINDS, FLOAT))
                raise RecipeError(f"{key} is {value!r}.", f"use one of: {names}; or leave it out.")
            own = list_kinds(self.backend)
            if value != FLOAT and value not in own:
                able = [name for name in BACKENDS if name in KINDS[value].backends]
                has = f"{' and '.join(own)} only" if own else "no quantized engines"
                raise RecipeError(
                    f"{key} is {value!r}, and backend {self.backend} has {has}.",
                    f"build with `--backend {' or '.join(able)}`, or leave it out.",
                )
        if self.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
            names = ", ".join(("auto", *KV_CACHE_DTYPES))
            raise RecipeError(f"kv_cache_dtype is {self.kv_cache_dtype!r}.", f"use one of: {names}.")
        if self.draft is None and self.head is None and self.draft_quantize is not None:
            raise RecipeError("draft_quantize is given and draft is not.", "give the draft, or leave both out.")
        self._check_head()

    def _check_head(self) -> None:
        if self.head is None:
            return
        if self.draft is not None:
            raise RecipeError("draft and head are both given.", "a bundle drafts with one of them: give one.")
        if self.self_draft:
            raise RecipeError(
                "head and self_draft are both given: a head reads layers that such drafts leave out.",
                "give one of them.",
            )
        if find_backend(self.backend).head_needs is None:
            able = [backend.name for backend in BACKENDS.values() if backend.head_needs is not None]
            raise RecipeError(
                f"head is given, and backend {self.backend} runs no draft heads.",
                f"build with `--backend {' or '.join(able)}`.",
            )
        if self.draft_quantize == KEEP:
            raise RecipeError(
                f"draft_quantize is {KEEP!r}, and draft heads hold float weights.", f"use {either(FLOAT)}."
            )

    def _check_draft_reductions(self) -> None:
        for key in ("draft_layers", "draft_vocab_size", "draft_vocab_texts"):
            if self.draft is None and getattr(self, key) is not None:
                raise RecipeError(f"{key} is given and draft is not.", "give the draft, or leave both out.")
        reads = self.draft_vocab_size is not None or self.draft_layers is not None or self.draft_quantize == AUTO
        if not reads and self.draft_vocab_texts is not None:
            raise RecipeError(
                "draft_vocab_texts is given, and neither draft_vocab_size nor draft_layers.",
                "say how many tokens or layers stay, or leave it out.",
            )
        if self.draft_layers is not None and self.draft_layers < 1:
            raise RecipeError(
                f"draft_layers is {self.draft_layers}.",
                "give the layers that the draft keeps, at least 1, or leave it out.",
            )
        if isinstance(self.draft_vocab_size, int) and self.draft_vocab_size < 1:
            raise RecipeError(
                f"draft_vocab_size is {self.draft_vocab_size}.",
                "give the tokens that the draft's LM head keeps, for example 16384, or leave it out.",
            )

    def _check_backend_options(self) -> None:
        """Refuse what the backend would ignore, and limits out of their range."""
        backend = find_backend(self.backend)
        owners = {
            name: [other.name for other in BACKENDS.values() if name in other.options]
            for name in dict.fromkeys(name for other in BACKENDS.values() for name in other.options)
        }
        ignored = [name for name in owners if getattr(self, name) and name not in backend.options]
        if self.lowering != "auto" and not backend.lowerings:
            ignored.append("lowering")
            owners["lowering"] = [other.name for other in BACKENDS.values() if other.lowerings]
        if ignored:
            name = ignored[0]
            raise RecipeError(
                f"{name} is given, and backend {self.backend} fixes nothing of the kind when it builds.",
                f"leave {name} out, or build for one of: {', '.join(owners[name])}.",
            )
        if self.lowering not in ("auto", *backend.lowerings):
            known = ", ".join(("auto", *backend.lowerings))
            raise RecipeError(
                f"lowering {self.lowering!r} cannot be built for backend {self.backend}.", f"use one of: {known}."
            )
        for name, most in _LIMITS.items():
            low, high = backend.limits.get(name, (1, most))
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RecipeError(f"{name} is {value}, outside {low} to {high}.", f"give {name} in that range.")
        if self.gpu_memory_gb is not None and self.gpu_memory_gb <= 0:
            raise RecipeError(f"gpu_memory_gb is {self.gpu_memory_gb}.", "give the GPU's memory in GB, for example 24.")

    def _check_types(self) -> None:
        for key in ("target", "output"):
            if not isinstance(getattr(self, key), str) or not getattr(self, key):
                raise RecipeError(f"{key} is missing.", _HOW_TO_GIVE[key])
        for key, (kind, meaning, *words) in _TYPES.items():
            if getattr(self, key) not in words:
                _require_type(key, getattr(self, key), kind, meaning)

    def _check_revisions(self) -> None:
        if self.draft is None and self.draft_revision is not None:
            raise RecipeError("draft_revision is given and draft is not.", "give the draft, or leave both out.")
        if self.head is None and self.head_revision is not None:
            raise RecipeError("head_revision is given and head is not.", "give the head, or leave both out.")
        if self.head == MTP and self.head_revision is not None:
            raise RecipeError(
                "head_revision is given, and the head is in the target's own checkpoint.",
                "give revision, the target's.",
            )

    @property
    def bundle_name(self) -> str:
        """Name of the bundle: ``name``, or the output folder's name."""
        return self.name or Path(os.path.abspath(self.output)).name

    def settings(self) -> dict[str, Any]:
        """The recipe without the places it reads from and writes to: what belongs into hashes and manifests."""
        data = asdict(self)
        data["sm"] = list(self.sm)  # as it reads back from JSON
        data["lora"] = [name for name, _ in self.lora]
        data["has_draft"] = self.draft is not None
        data["has_head"] = self.head is not None
        for key in _PATH_KEYS:
            del data[key]
        data["name"] = self.bundle_name
        return data


def resolve_parts(
    recipe: BuildRecipe, quantized: Mapping[str, bool], architectures: tuple[str, ...] = ()
) -> dict[str, PartRecipe]:
    """What each part of a bundle is built as: the one place where what a recipe leaves open is decided.

    Args:
        recipe: as it was given.
        quantized: of each part, by its role and the target first, whether its checkpoint may hold quantized weights.
        architectures: of the GPUs to build for, see ``Backend.architectures``.

    Raises:
        RecipeError: weights are to be kept that are not quantized.
    """
    backend = find_backend(recipe.backend)
    dtype = backend.dtypes[0] if recipe.dtype == "auto" else recipe.dtype
    model_dtype = backend.computes or dtype
    common: dict[str, Any] = {
        **{name: getattr(recipe, name) for name in _AS_ASKED},
        "dtype": dtype,
        "model_dtype": model_dtype,
        "kv_cache_dtype": recipe.kv_cache_dtype or model_dtype,
        "lookahead": recipe.lookahead or backend.default_lookahead,
        "max_num_seqs": recipe.max_num_seqs or backend.default_max_num_seqs,
        "max_num_tokens": recipe.max_num_tokens or 0,
        "sm": architectures,
        "gpu_memory_gb": recipe.gpu_memory_gb or math.inf,
    }
    parts: dict[str, PartRecipe] = {}
    for role, holds in quantized.items():
        asked = recipe.quantize if role == "target" else recipe.draft_quantize
        kind = FLOAT if asked in (None, AUTO) else str(asked)
        if kind == KEEP and not holds:
            raise RecipeError(
                f"{'quantize' if role == 'target' else 'draft_quantize'} is {KEEP!r}, and the {role}'s checkpoint "
                "holds float weights.",
                f"use {either()}, or leave it out.",
            )
        if role == "head" and asked is None and parts["target"].quantize != FLOAT:
            # Fast without flags: what is quantized for speed is drafted for in the same way.
            kind = INT8.name if recipe.backend in INT8.backends else FLOAT
        elif role != "head" and asked in (None, AUTO) and holds and KEEP in list_kinds(recipe.backend):
            kind = KEEP
        parts[role] = PartRecipe(role=role, quantize=kind, **common)
    return parts


_AS_ASKED = (
    "backend", "max_model_len", "lowering", "quantize_lm_head", "fuse", "self_draft", "check", "trust_remote_code",
    "chooses_adapters",
)  # fmt: skip
"""What a part has as it was asked for."""


def resolve_settings(recipe: BuildRecipe, parts: Mapping[str, PartRecipe], **found: Any) -> dict[str, Any]:
    """The recipe as hashes and manifests have it: with what its parts came to, and what else was ``found``."""
    target, *drafts = parts.values()
    kinds = [None if part.quantize == FLOAT else part.quantize for part in (target, *drafts)]
    return {
        **recipe.settings(),
        **dict(zip(("quantize", "draft_quantize"), kinds, strict=False)),
        "dtype": target.dtype,
        "lookahead": target.lookahead,
        "max_num_seqs": target.max_num_seqs or None,
        "sm": list(target.sm),
        **found,
    }


def resolve_model_len(asked: int | Auto, limits: Iterable[int | None]) -> int:
    """Most tokens of a sequence.

    Args:
        asked: ``max_model_len``; ``"auto"`` takes the smallest limit, at most 4096.
        limits: positions that models support; None for one without a limit.

    Raises:
        RecipeError: it is larger than a limit.
    """
    known = [limit for limit in limits if limit is not None]
    if asked == "auto":
        return min([AUTO_MODEL_LEN, *known])
    if known and asked > min(known):
        raise RecipeError(
            f"max_model_len is {asked}, but a model supports only {min(known)} positions.",
            f"give at most {min(known)}, or auto.",
        )
    return asked


_HOW_TO_GIVE = {
    "target": "name a checkpoint folder, a .gguf file or a hub id: `specexport build TARGET -o DIR`.",
    "output": "name the bundle folder with `-o DIR`.",
}


def _require_type(key: str, value: object, kind: Any, meaning: str) -> None:
    # bool is an int for Python, but `lookahead = true` is a mistake.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{key} is {value!r}, not {meaning}.", f"give {key} as {meaning}.")


def load_recipe_file(path: Path) -> dict[str, Any]:
    """Read the values of a TOML recipe.

    Relative paths are taken from the recipe's own folder, so that a recipe works from anywhere.

    Returns:
        recipe fields by name; not checked yet, apart from their names.

    Raises:
        RecipeError: the file cannot be read, is not TOML, or has an unknown key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"the recipe {path} cannot be read ({error.strerror}).", "give a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} is not valid TOML ({error}).", "correct that line.") from error
    except RecursionError:
        raise RecipeError(f"the recipe {path} is nested too deeply.", "write a value a line.") from None
    values = normalize_keys(data, where=f"recipe {path}")
    for key in _PATH_KEYS:
        if isinstance(values.get(key), str) and (key, values[key]) != ("head", MTP):
            values[key] = _from_recipe_folder(key, values[key], path.parent)
    if "lora" in values:
        adapters = normalize_adapters(values["lora"])
        values["lora"] = tuple((name, _from_recipe_folder("lora", folder, path.parent)) for name, folder in adapters)
    return values


def _from_recipe_folder(key: str, value: str, folder: Path) -> str:
    expanded = Path(value).expanduser()
    if expanded.is_absolute():
        return str(expanded)
    # "org/model" is a hub id unless there is such a folder beside the recipe.
    looks_local = (
        key in ("output", "draft_vocab_texts", "lora")
        or value.startswith(".")
        or value.endswith(".gguf")
        or value.count("/") > 1
    )
    return _normalize_path(folder / expanded) if looks_local or (folder / expanded).exists() else value


def _normalize_path(path: Path) -> str:
    """A path without ``..``, for messages, unless a link before it makes that another place."""
    short = os.path.normpath(path)
    return short if os.path.realpath(short) == os.path.realpath(path) else str(path)


def normalize_keys(data: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Recipe fields by their own names; ``-`` and ``_`` are the same, and ``num_speculative_tokens`` is ``lookahead``.

    Raises:
        RecipeError: a key is unknown (the nearest is suggested) or given twice.
    """
    known = [field.name for field in fields(BuildRecipe)]
    values: dict[str, Any] = {}
    for key, value in data.items():
        plain = key.replace("-", "_")
        name = _ALIASES.get(plain, plain)
        if name not in known:
            near = suggest(plain, [*known, *_ALIASES])
            hint = f"did you mean {near!r}?" if near else f"the keys are {', '.join(known)}."
            raise RecipeError(f"{where} has an unknown key {key!r}.", hint)
        if name in values:
            raise RecipeError(f"{where} gives {name} twice.", f"keep one of {key!r} and {name!r}.")
        values[name] = value
    return values


def make_recipe(flags: Mapping[str, Any], recipe_file: Path | None = None) -> BuildRecipe:
    """A recipe from flags (None means not given) over an optional file.

    Raises:
        RecipeError: a key is unknown, or a value is missing, of the wrong type or out of its range.
    """
    values = load_recipe_file(recipe_file) if recipe_file is not None else {}
    values.update({key: value for key, value in flags.items() if value is not None})
    values.setdefault("target", "")
    values.setdefault("output", "")
    return BuildRecipe(**normalize_keys(values, where="the recipe"))


def normalize_architectures(values: object) -> tuple[str, ...]:
    """GPU architectures as plain digits, each once: ``89``, ``"sm_89"`` and ``"8.9"`` are all ``"89"``; or ``"any"``.

    Raises:
        RecipeError: a value is no compute capability.
    """
    items: Iterable[Any] = values if isinstance(values, (list, tuple)) else [values]
    found = []
    for item in items:
        if item == ANY_ARCHITECTURE:
            found.append(ANY_ARCHITECTURE)
            continue
        match = _SM.fullmatch(str(item))
        if match is None or isinstance(item, bool):
            raise RecipeError(
                f"sm {item!r} is not a compute capability.", "give one like 89 (8.9 and sm89 work too), or any."
            )
        found.append(match[1] + match[2])
    return tuple(dict.fromkeys(found))


def normalize_adapters(values: object) -> tuple[tuple[str, str], ...]:
    """LoRA adapters as pairs of name and folder: ``"NAME=FOLDER"`` is one, and so is an entry of a table.

    Raises:
        RecipeError: a value is no such thing, or two have one name.
    """
    items: Iterable[Any] = values if isinstance(values, (list, tuple)) else [values]
    if isinstance(values, Mapping):
        items = values.items()
    found: dict[str, str] = {}
    for item in items:
        pair = item.split("=", 1) if isinstance(item, str) else item
        texts = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        name, folder = pair if texts else ("", "")
        if not _ADAPTER.fullmatch(name) or not folder:
            raise RecipeError(f"lora has {item!r}.", "give NAME=FOLDER; a name has letters, digits and . _ - only.")
        if name in found:
            raise RecipeError(f"lora gives {name} twice.", "give each adapter a name of its own.")
        found[name] = folder
    return tuple(found.items())
