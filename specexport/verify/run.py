"""Running all parts on a bundle: checkpoints and prompts in, a report out.

The eager references are computed before the engines are loaded, and each model is freed before the next needs memory.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from specexport.bench.prompts import read_prompts as read_builtin
from specexport.compile.fingerprint import tool_versions
from specexport.progress import Progress, StageClock
from specexport.verify.checkpoint import find_adapter
from specexport.verify.logits import LONGEST_SEQUENCE
from specexport.verify.options import VerifyOptions
from specexport.verify.parts import run_greedy, run_neighbours, run_perplexity, run_sampling, run_tensors
from specexport.verify.perplexity import make_windows
from specexport.verify.prompts import DEFAULT_PROMPTS, encode_prompts
from specexport.verify.references import EAGER, collect_references, list_roles, needs_loss
from specexport.verify.report import VerifyReport
from specexport.verify.tolerance import step_tolerance
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.engine import SpecEngine

_MAX_NUM_SEQS = 8
_LENGTH_STEP = 64


def verify_bundle(bundle: Path, options: VerifyOptions, *, progress: Progress | None = None) -> VerifyReport:
    """Run all parts on a bundle; nothing is written.

    Raises BundleError or IncompatibleError if the bundle cannot be loaded; CheckpointError if a given checkpoint cannot
    be read or is another one, or a required one was not found; InvalidRequestError if a prompt or an option cannot be
    used.
    """
    manifest = load_manifest(bundle)
    roles = list_roles(manifest)
    read = [role for role in roles if needs_loss(manifest, role, options)]
    # Plan, load, neighbours, greedy, sampling; a reference, and tensors or perplexity for each model.
    clock = StageClock(progress, num_steps=2 * len(roles) + 5 + len(read) * (options.reference is not None))
    with clock.stage("plan"):
        prompts, windows = _encode(bundle, manifest, options, with_text=bool(read))
        adapter = find_adapter(manifest, options.lora)
    references = collect_references(bundle, manifest, prompts, windows, options, clock, adapter)
    with clock.stage("load"):
        lora = None if adapter is None else adapter.chosen
        engine = _load_engine(bundle, manifest, [*prompts, *(windows if read else ())], options, lora)
    target = manifest.models["target"]
    tolerance = step_tolerance(target.backend, target.dtype, len(target.attention.layers))
    try:
        found = (
            run_tensors(engine, manifest, references, clock),
            run_perplexity(bundle, engine, manifest, references, read, windows, clock),
            run_neighbours(engine, manifest, prompts, tolerance, clock),
            run_greedy(engine, prompts, clock, max_tokens=options.max_tokens, tolerance=tolerance),
            run_sampling(engine, manifest, prompts, clock, num_samples=options.num_samples, seed=options.seed),
        )
    finally:
        engine.close()
    used_torch = references.logits or any(loss.source == EAGER for loss in references.losses.values())
    tools = {"specexport", "onnxruntime", "numpy", *(("torch", "transformers") if used_torch else ())}
    return VerifyReport(
        bundle=manifest.name,
        build_key=manifest.build_key,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        tools={name: version for name, version in tool_versions().items() if name in tools},
        options={
            "num_prompts": len(prompts),
            "built_in_prompts": options.prompts is None,
            "max_tokens": options.max_tokens,
            "num_samples": options.num_samples,
            "seed": options.seed,
            "built_in_text": options.texts is None,
            **({} if adapter is None else {"lora": adapter.entry.name}),
        },
        seconds=dict(clock.seconds),
        parts=tuple(part for part in found if part is not None),
    )


def _encode(
    bundle: Path, manifest: Manifest, options: VerifyOptions, *, with_text: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Check the bundle's files; encode the prompts, and the windows of the text if asked for, with its tokenizer."""
    tokenizer, vocab_size = load_bundle(bundle).tokenizer, manifest.models["target"].vocab_size
    prompts = encode_prompts(
        (options.prompts or DEFAULT_PROMPTS)[: options.max_prompts],
        tokenizer,
        vocab_size=vocab_size,
        max_model_len=manifest.max_model_len,
        shorten=options.prompts is None,
    )
    if not with_text:
        return prompts, []
    texts = options.texts or [prompt.text for prompt in read_builtin(())]
    alike = [entry for role in list_roles(manifest) if (entry := manifest.models[role]).token_map is None]
    smallest = min(entry.vocab_size for entry in alike)
    windows = make_windows(texts, tokenizer, vocab_size=smallest, max_model_len=manifest.max_model_len)
    return prompts, windows


def _load_engine(
    bundle: Path, manifest: Manifest, sequences: Sequence[Sequence[int]], options: VerifyOptions, lora: str | None
) -> SpecEngine:
    """The engine with cache rows no longer than the checks need."""
    longest = max(LONGEST_SEQUENCE, max(map(len, sequences)) + options.max_tokens)
    return SpecEngine.load(
        bundle,
        max_num_seqs=_MAX_NUM_SEQS,
        max_model_len=min(manifest.max_model_len, longest + _LENGTH_STEP),
        num_threads=options.num_threads,
        spin=options.spin,
        lora=lora,
        enable_prefix_caching=False,  # every run must read its prompts itself
    )
