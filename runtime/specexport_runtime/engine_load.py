"""From a bundle folder to the parts of an engine: executors, drafting defaults, earlier texts, what steps cost."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specexport_runtime.bundle.arrays import load_cut_head, load_mask
from specexport_runtime.bundle.draft_layers import load_draft_layers
from specexport_runtime.bundle.held import held
from specexport_runtime.bundle.opened import Bundle, ChangedError, load_bundle
from specexport_runtime.bundle.token_map import load_token_map
from specexport_runtime.costs.curves import KnownCosts, load_costs
from specexport_runtime.costs.prior import DRAFTER_OF, prior_costs
from specexport_runtime.decoding.prefix_files import PrefixFolder
from specexport_runtime.drafters.suffix_open import open_suffixes
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.engine_parts import (
    DEFAULT_BATCHED_TOKENS,
    EngineParts,
    find_self_draft_obstacle,
    make_capabilities,
    make_offer,
)
from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.executors import operators
from specexport_runtime.executors.base import EngineBackend, Executor
from specexport_runtime.executors.open import find_engine_backend, list_engine_backends_with, open_executor
from specexport_runtime.intake.checks import check_adapter, parse_bytes
from specexport_runtime.intake.drafting import DraftDefaults, resolve_stage_names
from specexport_runtime.intake.speculative_config import parse_speculative_config
from specexport_runtime.machine import machine_key
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.layer_choice import LayerRules


def load_engine_parts(path: Path, options: EngineOptions, *, tries: int = 5) -> EngineParts:
    """Open a bundle, load its engines, and what an adaptive engine chooses K by; again if it is replaced meanwhile.

    ``BundleError``: a file is missing or altered. ``IncompatibleError``: another schema, ABI or machine.
    ``InvalidRequestError``: an option that does not fit. ``MissingDependencyError``: no runtime of the backend.
    """
    with held(path) as is_another:
        try:
            return _load(path, options)
        except (SpecexportError, OSError) as error:
            if tries == 1 or not (isinstance(error, ChangedError) or is_another()):
                raise
    return load_engine_parts(path, options, tries=tries - 1)


def _load(path: Path, options: EngineOptions) -> EngineParts:
    bundle = load_bundle(
        path, max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs, prefix_rows=options.prefix_rows
    )
    backend = find_engine_backend(bundle.manifest.models["target"].backend)
    _check_backend(backend, options)
    check_adapter(options.lora, bundle.manifest.models["target"].chosen_adapters)
    defaults = _draft_defaults(bundle, options)
    drafting = [bundle.manifest.models[role] for role in ("draft", "head") if role in bundle.manifest.models]
    cut_head = load_cut_head(bundle.folder, drafting[0]) if drafting else None
    mask = load_mask(bundle.folder, drafting[0]) if drafting else None
    models = bundle.manifest.models
    token_map = load_token_map(bundle.folder, models.get("draft"), models["target"])
    executors: dict[str, Executor] = {}
    try:
        for role in sorted(bundle.manifest.models, reverse=True):  # the target first: a draft takes what it leaves
            executors[role] = open_executor(
                bundle,
                role,
                num_threads=options.num_threads,
                spin=options.spin,
                unpad_kv=options.unpad_kv,
                cuda_graphs=options.cuda_graphs,
                share_threads=options.share_threads,
                gives_back=options.kv_bytes is not None,
                target=executors.get("target"),
            )
        parts = _make_parts(bundle, executors, defaults, options)._replace(
            cut_head=cut_head, mask=mask, token_map=token_map
        )
        if options.adaptive or "auto" in (defaults.drafter, defaults.lookahead):
            parts = parts._replace(costs=_load_costs(bundle, backend, options))
        bundle.check_unchanged()
        return parts
    except BaseException:
        for executor in executors.values():  # a GPU's memory must not wait for the garbage collector
            executor.close()
        raise


def _check_backend(backend: EngineBackend | None, options: EngineOptions) -> None:
    keeps = options.enable_prefix_caching and options.unpad_kv
    for name, ability in (("prefix_rows", "copies_rows"), ("prefix_cache_dir", "stores_rows")):
        if getattr(options, name) and not (keeps and getattr(backend, ability, False)):
            raise InvalidRequestError(
                f"{name} is {getattr(options, name)}, and this engine keeps no prefixes"
                f"{' in files' * (name == 'prefix_cache_dir')}.",
                f"leave it out; it needs backend {list_engine_backends_with(ability)}, enable_prefix_caching and "
                "unpad_kv.",
            )
    gives_back = backend is not None and backend.gives_back and options.unpad_kv
    if options.kv_cache_memory_bytes is not None and not gives_back:
        raise InvalidRequestError(
            f"kv_cache_memory_bytes is {options.kv_cache_memory_bytes}, and this engine cannot give memory of its KV "
            "cache back.",
            f"leave it out; a budget needs backend {list_engine_backends_with('gives_back') or 'ort-cpu'} on Linux, "
            "and unpad_kv.",
        )


def _draft_defaults(bundle: Bundle, options: EngineOptions) -> DraftDefaults:
    defaults = DraftDefaults()
    if options.speculative_config is not None:
        models = bundle.manifest.models
        sources = {DRAFTER_OF[role]: entry.source.name for role, entry in models.items() if role in DRAFTER_OF}
        defaults = parse_speculative_config(
            options.speculative_config, sources=sources, built=bundle.manifest.lookahead
        )
    found = load_draft_layers(bundle.folder, bundle.manifest)
    if found is not None:
        defaults = defaults._replace(layer_rules=LayerRules(None, None, None, found.mixers, found.mlps))
    return defaults if options.match_length is None else defaults._replace(match_length=options.match_length)


def _make_parts(
    bundle: Bundle, executors: Mapping[str, Executor], defaults: DraftDefaults, options: EngineOptions
) -> EngineParts:
    """The parts but for costs, and what of files belongs to the draft; the target can honour the ``defaults``."""
    manifest, target = bundle.manifest, executors["target"]
    runner = ModelRunner(target, unpad_kv=options.unpad_kv, unpad_input=options.unpad_input)
    parts = EngineParts(
        target,
        bundle.tokenizer,
        bundle.max_model_len,
        draft=executors.get("draft"),
        head=executors.get("head"),
        lookahead=manifest.lookahead,
        max_num_seqs=bundle.max_num_seqs,
        max_num_batched_tokens=manifest.max_num_tokens or DEFAULT_BATCHED_TOKENS,
        draft_vocab_size=manifest.vocabulary.size,
        eos_token_ids=manifest.vocabulary.eos_token_ids,
        chat_template=bundle.chat_template,
        special_tokens=manifest.vocabulary.special_tokens,
        draft_defaults=defaults,
        self_obstacle=find_self_draft_obstacle(runner, manifest.models["target"]),
        name=manifest.name,
        fingerprint=manifest.build_key,
        adapters=manifest.models["target"].chosen_adapters,
    )
    if defaults.drafter not in (None, "none"):
        offer = make_offer(runner, parts)
        resolve_stage_names(defaults.drafter, make_capabilities(offer, {}, lookahead=parts.lookahead, target=target))
    suffixes = open_suffixes(
        bundle.tokenizer,
        tokenizer_sha256=manifest.vocabulary.tokenizer_sha256,
        vocab_size=manifest.models["target"].vocab_size,
        memory_mb=options.suffix_memory_mb,
        corpus=options.corpus,
        file=options.suffix_file,
    )
    return parts._replace(suffixes=suffixes, prefixes=_open_prefixes(bundle, options))


def _open_prefixes(bundle: Bundle, options: EngineOptions) -> PrefixFolder | None:
    """The folder of kept texts, for engines that give the same bits as this one."""
    if not options.prefix_cache_dir:  # an empty text is none, not the current folder
        return None
    files = bundle.manifest.files.items()
    decisive = _make_decision_key(bundle, operators.kernels(), options) | {
        "files": {name: file.sha256 for name, file in files if name.partition("/")[0] in bundle.manifest.models},
        "machine": machine_key(),
        "lora": options.lora,
    }
    limit = parse_bytes(options.prefix_cache_bytes, "prefix_cache_bytes")
    return PrefixFolder(Path(options.prefix_cache_dir), limit, json.dumps(decisive, sort_keys=True))


def _load_costs(bundle: Bundle, backend: EngineBackend | None, options: EngineOptions) -> KnownCosts:
    kernels = None if backend is not None and backend.on_gpu else operators.kernels()
    return load_costs(
        prior_costs(bundle.manifest.models, kernels=kernels), _make_decision_key(bundle, kernels, options)
    )


def _make_decision_key(bundle: Bundle, kernels: str | None, options: EngineOptions) -> dict[str, Any]:
    return {
        "bundle": bundle.manifest.build_key,
        "kernels": kernels,
        "build": kernels and operators.build(),
        "threads": options.num_threads,
        "spin": options.spin,
        "cuda_graphs": options.cuda_graphs,
        "padded": [not options.unpad_kv, not options.unpad_input],
    }
