"""Running the three parts on a bundle: checkpoints and prompts in, a report out.

The eager references are computed before the engines are loaded, and each model is freed before the next needs memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from specexport.fingerprint import tool_versions
from specexport.progress import Progress, StageClock
from specexport.verify.checkpoint import (
    CheckpointNotFoundError,
    eager_references,
    find_checkpoint,
    recorded_revision,
)
from specexport.verify.parts import Reference, run_greedy, run_sampling, run_tensors
from specexport.verify.prompts import DEFAULT_PROMPTS, encode_prompts
from specexport.verify.report import VerifyReport
from specexport.verify.tensors import make_sequences
from specexport_runtime.bundle import load_bundle
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError, MissingDependencyError
from specexport_runtime.manifest import Manifest, load_manifest

_MAX_NUM_SEQS = 8
_LENGTH_STEP = 64


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify with.

    Attributes:
        checkpoints: checkpoint by role (``"target"``, ``"draft"``); a missing role is looked for.
        require_checkpoint: a checkpoint that is not found is an error instead of a skipped part.
        trust_remote_code: let Python code from the checkpoint run.
        prompts: prompt texts; None takes the built-in ones.
        max_prompts: most prompts used.
        max_tokens: tokens generated for each prompt in the greedy part.
        num_samples: draws of each sampling test on recorded logits; a tenth as many generations.
        seed: of the sampled draws.
        num_threads: compute threads; None takes the cores available.
        spin: let idle threads spin; off, because torch and the engines share the cores here.
    """

    checkpoints: Mapping[str, str] = field(default_factory=dict)
    require_checkpoint: bool = False
    trust_remote_code: bool = False
    prompts: Sequence[str] | None = None
    max_prompts: int = 8
    max_tokens: int = 64
    num_samples: int = 4000
    seed: int = 0
    num_threads: int | None = None
    spin: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_prompts", 1), ("max_tokens", 2), ("num_samples", 1000)):
            if getattr(self, name) < least:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}.", f"give a number of at least {least}.")


def verify_bundle(bundle: Path, options: VerifyOptions, *, progress: Progress | None = None) -> VerifyReport:
    """Run all parts on a bundle; nothing is written.

    Raises:
        BundleError, IncompatibleError: the bundle cannot be loaded.
        CheckpointError: a given checkpoint cannot be read or is another one, or a required one was not found.
        InvalidRequestError: a prompt or an option cannot be used.
    """
    manifest = load_manifest(bundle)
    clock = StageClock(progress, num_steps=2 * len(manifest.models) + 4)  # plan, load, greedy, sampling
    with clock.stage("plan"):
        sources, missing = _find_checkpoints(bundle, manifest, options)
        prompts = _load_prompts(bundle, manifest, options)
    references = {}
    for role, source in sources.items():
        with clock.stage("eager reference", role):
            references[role] = _reference(manifest, role, source, prompts, options)
    with clock.stage("load"):
        engine = _load_engine(bundle, manifest, prompts, references, options)
    try:
        parts = (
            run_tensors(engine, manifest, references, missing, clock),
            run_greedy(engine, prompts, clock, max_tokens=options.max_tokens),
            run_sampling(engine, manifest, prompts, clock, num_samples=options.num_samples, seed=options.seed),
        )
    finally:
        engine.close()
    return VerifyReport(
        bundle=manifest.name,
        build_key=manifest.build_key,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        tools=_tools(references),
        options={
            "num_prompts": len(prompts),
            "built_in_prompts": options.prompts is None,
            "max_tokens": options.max_tokens,
            "num_samples": options.num_samples,
            "seed": options.seed,
        },
        seconds=dict(clock.seconds),
        parts=parts,
    )


def _load_prompts(bundle: Path, manifest: Manifest, options: VerifyOptions) -> list[list[int]]:
    """Check the bundle's files and encode the prompts with its tokenizer."""
    return encode_prompts(
        (options.prompts or DEFAULT_PROMPTS)[: options.max_prompts],
        load_bundle(bundle).tokenizer,
        vocab_size=manifest.models["target"].vocab_size,
        max_model_len=manifest.max_model_len,
        shorten=options.prompts is None,
    )


def _find_checkpoints(bundle: Path, manifest: Manifest, options: VerifyOptions) -> tuple[dict[str, str], list[str]]:
    """Checkpoint of each role, and why a role has none."""
    unknown = sorted(set(options.checkpoints) - set(manifest.models))
    if unknown:
        raise InvalidRequestError(f"{bundle} has no {unknown[0]} model.", f"leave out its checkpoint ({unknown[0]}).")
    sources: dict[str, str] = {}
    missing: list[str] = []
    for role in sorted(manifest.models, key=lambda name: name != "target"):
        given = options.checkpoints.get(role)
        try:
            source = find_checkpoint(manifest, role, given, bundle)
            _require_torch()
        except (CheckpointNotFoundError, MissingDependencyError) as error:
            if options.require_checkpoint or given is not None:
                raise
            missing.append(str(error))
        else:
            sources[role] = source
    return sources, missing


def _require_torch() -> None:
    from specexport.model_build import require_export_stack

    require_export_stack()


def _reference(
    manifest: Manifest, role: str, source: str, prompts: Sequence[Sequence[int]], options: VerifyOptions
) -> Reference:
    entry = manifest.models[role]
    sequences = make_sequences(
        prompts, entry.vocab_size, lookahead=manifest.lookahead, max_model_len=manifest.max_model_len
    )
    logits = eager_references(
        source,
        recorded_revision(manifest, role),
        sequences,
        dtype=entry.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    return Reference(sequences, logits)


def _load_engine(
    bundle: Path,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    references: Mapping[str, Reference],
    options: VerifyOptions,
) -> SpecEngine:
    """The engine with cache rows no longer than the checks need."""
    longest = max(map(len, prompts)) + options.max_tokens
    longest = max([longest, *(len(ids) for reference in references.values() for ids in reference.sequences)])
    return SpecEngine.load(
        bundle,
        max_num_seqs=_MAX_NUM_SEQS,
        max_model_len=min(manifest.max_model_len, longest + _LENGTH_STEP),
        num_threads=options.num_threads,
        spin=options.spin,
    )


def _tools(references: Mapping[str, Reference]) -> dict[str, str]:
    wanted = {"specexport", "onnxruntime", "numpy", *(("torch", "transformers") if references else ())}
    return {name: version for name, version in tool_versions().items() if name in wanted}
