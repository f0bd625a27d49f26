"""A training from prompts to a draft: texts, hidden states, batches, files. Each part goes on where it was left."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.atomic import place_behind_links, require_space, write_json, write_text
from specexport.bench.prompts import read_prompts
from specexport.host import peak_memory_bytes
from specexport.progress import Progress, StageClock
from specexport.train.options import HEAD_KINDS, TrainOptions
from specexport_runtime.errors import InvalidRequestError, OutputExistsError

if TYPE_CHECKING:
    from specexport.train.student import Plan

HELD_OUT, FEWEST_TEXTS = 0.05, 16
"""Share of the texts that is not learned from, and the fewest texts of which a share can be."""
SHORTEST_TEXT = 12
"""Tokens: in a shorter text there is no place for all draft steps."""
SAVE_EVERY = 50
"""Batches between two savings, and between two looks at the acceptance."""
STAGES = 6


class Trained(NamedTuple):
    """What a training gave."""

    output: Path  # folder of the draft
    flag: str  # of ``specexport build``, which takes it
    num_texts: int  # that it learned from
    num_tokens: int  # of these texts
    batches: int  # that it learned from
    seconds: float  # of learning, in this run and those before
    # acceptance on held-out texts: ``batch``, ``length``, ``rates`` and ``loss`` each time; of draft models also
    # ``overlap``, the share of drawn tokens that would be accepted
    curve: Sequence[dict[str, Any]]
    tokens_per_second: float  # of learning
    peak_memory_bytes: int  # most resident memory of this process so far, pages of the hidden states' files included

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {**self._asdict(), "output": str(self.output), "curve": list(self.curve)}


def train_draft(options: TrainOptions, progress: Progress | None = None) -> Trained:
    """Train a draft; a run that was ended goes on.

    InvalidRequestError: prompts, limits, the bundle or the work folder do not allow it. OutputExistsError: something
    else is in the output folder.
    """
    import torch

    from specexport.checkpoint.load import load_checkpoint
    from specexport.train.store import FeatureStore

    clock = StageClock(progress, STAGES)
    _check_output(options.output, options.kind)
    prompts = [prompt.text for prompt in read_prompts(options.prompts)]
    if len(prompts) < FEWEST_TEXTS:
        raise InvalidRequestError(f"there are {len(prompts)} prompts to train on.", f"give {FEWEST_TEXTS} or more.")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    work = options.work_folder
    work.mkdir(parents=True, exist_ok=True)
    texts_path = work / "texts.jsonl"
    with clock.stage("write", "", f"{len(prompts)} texts"):
        _write_texts(options, prompts, texts_path, clock)
    with clock.stage("load"):
        checkpoint = load_checkpoint(options.target)
    from specexport.train.texts import read_texts

    texts = [text for text in read_texts(texts_path) if len(text) >= SHORTEST_TEXT]
    plan = find_plan(options.kind)(options, checkpoint, texts)
    with clock.stage("read", "target", f"{sum(map(len, texts)):,} tokens"):
        _collect(options, checkpoint.model, texts, plan.taps, clock)
    store = FeatureStore(options.states_folder)
    with clock.stage("make", "draft"):
        torch.manual_seed(options.seed)
        del checkpoint
        trainer = _trainer(options, plan.make(clock.note), store)
    with clock.stage("learn"):
        _learn(options, trainer, clock)
    with clock.stage("save"):
        return _save(options, trainer, plan)


def _check_output(folder: Path, kind: str) -> None:
    """Refuse a folder that holds something else, for it may be a checkpoint, and a draft takes its names."""
    place_behind_links(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        is_head = "speculators_model_type" in values
        is_ours = is_head == (kind != "pruned") and (folder / "curve.json").is_file()
    except (OSError, ValueError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        what = "pruned draft" if kind == "pruned" else "head"
        raise OutputExistsError(
            f"{folder} exists and is no {what} that was trained here.", "choose another folder with -o."
        )


def _write_texts(options: TrainOptions, prompts: Sequence[str], path: Path, clock: StageClock) -> None:
    from specexport.checkpoint.load import count_layers
    from specexport.checkpoint.source import hash_checkpoint
    from specexport.train.texts import write_texts
    from specexport_runtime.bundle.manifest import load_manifest

    bundle = options.bundle
    if bundle is None:
        from specexport.compile.pipeline import build_bundle
        from specexport.recipe import BuildRecipe

        bundle = options.work_folder / "texts-bundle"
        # No other bundle has this name: one of an earlier version is built again.
        build_bundle(BuildRecipe(target=options.target, output=str(bundle)), force=True)
    manifest = load_manifest(bundle)
    written_by = manifest.models["target"]
    sha256 = hash_checkpoint(options.target, remote_code=bool(manifest.recipe.get("trust_remote_code")))
    if written_by.source.sha256 != sha256:
        raise InvalidRequestError(
            f"{bundle} was not built from {options.target}: a draft learns from what its own target writes.",
            "give a bundle of this target, or leave --bundle out.",
        )
    options.check_target(count_layers(options.target), keeps_state=bool(written_by.states))
    write_texts(
        bundle,
        prompts,
        path,
        options.text_settings() | {"target": sha256},
        threads=options.threads,
        on_group=lambda count: clock.note(f"{count} of {len(prompts)} texts"),
    )


def _collect(
    options: TrainOptions, model: Any, texts: Sequence[Sequence[int]], taps: Sequence[int], clock: StageClock
) -> None:
    from specexport.train.store import FeatureStore, StoreWriter, collect_states

    folder = options.states_folder
    folder.mkdir(exist_ok=True)
    store = FeatureStore(folder)
    width = int(model.config.get_text_config().hidden_size)
    needed = 2 * width * (len(taps) + 1) * sum(map(len, texts))
    if needed > options.max_states_gb * 1e9:
        raise InvalidRequestError(
            f"hidden states of {sum(map(len, texts)):,} tokens take {needed / 1e9:.1f} GB, and "
            f"{options.max_states_gb:g} GB are allowed.",
            "give fewer prompts or a larger --max-states-gb.",
        )
    require_space(folder, needed - 2 * width * (len(taps) + 1) * store.num_tokens)
    done = len(store)
    writer = StoreWriter(folder, len(list(folder.glob("states-*.safetensors"))))
    collect_states(
        model, texts[done:], taps, writer, on_batch=lambda count: clock.note(f"{done + count} of {len(texts)} texts")
    )
    writer.flush()


def _held_out(count: int) -> list[int]:
    """Texts that are not learned from, spread over all."""
    step = round(1 / HELD_OUT)
    return list(range(0, count, step))


def _trainer(options: TrainOptions, student: Any, store: Any) -> Any:
    from specexport.train.loop import Trainer, TrainSettings
    from specexport.train.store import batches

    held = set(_held_out(len(store)))
    learned = [i for i in range(len(store)) if i not in held]
    settings = TrainSettings(
        steps=options.draft_steps, batch_tokens=options.batch_tokens, matrix_rate=options.rate, seed=options.seed
    )
    each = len(list(batches(store, learned, settings.batch_tokens, settings.max_len, options.seed)))
    total = options.batches or options.epochs * each
    settings = replace(settings, total=total, warmup=min(settings.warmup, max(1, total // 4)))
    return Trainer(student, store, learned, settings)


def _learn(options: TrainOptions, trainer: Any, clock: StageClock) -> None:
    from specexport.train.loop import measure_acceptance

    folder, total = options.work_folder / f"{options.kind}-state", trainer.settings.total
    trainer.resume(folder)
    held = _held_out(len(trainer.store))
    while trainer.done < total:
        trainer.step()
        if trainer.done % SAVE_EVERY == 0 or trainer.done == total:
            found = measure_acceptance(trainer, held)
            rates = [round(rate, 4) for rate in found.rates]
            point = {
                "batch": trainer.done,
                "length": round(found.length, 4),
                "rates": rates,
                "loss": round(found.loss, 4),
            } | ({} if found.overlap is None else {"overlap": round(found.overlap, 4)})
            trainer.curve.append(point)
            trainer.save(folder)
            clock.note(f"{trainer.done} of {total} batches, {found.length:.2f} tokens a round on held-out texts")


def _save(options: TrainOptions, trainer: Any, plan: Any) -> Trained:
    described = plan.describe()
    result = Trained(
        output=options.output,
        flag=described.flag,
        num_texts=len(trainer.indices),
        num_tokens=sum(trainer.store.length(i) for i in trainer.indices),
        batches=trainer.done,
        seconds=trainer.seconds,
        curve=tuple(trainer.curve),
        tokens_per_second=trainer.tokens / max(trainer.seconds, 1e-9),
        peak_memory_bytes=peak_memory_bytes(),
    )
    plan.write(options.output, trainer.student)
    write_text(options.output / "README.md", _card(options, result, described))
    write_json(options.output / "curve.json", result.to_json()["curve"])
    return result


def _card(options: TrainOptions, result: Trained, described: Any) -> str:
    """A model card: what it was made of, and what it does on text that it did not learn from."""
    last: dict[str, Any] = result.curve[-1]
    rates = ", ".join(f"{rate:.2f}" for rate in last["rates"])
    made, drawn = time.strftime("%Y-%m-%d"), f"half of them greedily, half at temperature {options.temperature:g}"
    overlap = f"| on held-out texts: drawn tokens accepted | {last['overlap']:.2f} |\n" if "overlap" in last else ""
    return f"""# {described.title}

{described.form} Made by `specexport train-draft` on {made}.

| | |
| --- | --- |
| texts | {result.num_texts:,}, written by the target: {drawn} |
| tokens | {result.num_tokens:,} |
| batches | {result.batches:,} of up to {options.batch_tokens:,} tokens |
| hours of learning | {result.seconds / 3600:.2f} |
| on held-out texts: right at draft step 1, 2, … | {rates} |
{overlap}| on held-out texts: tokens a round with {len(last["rates"])} drafts | {last["length"]:.2f} |

{described.use}
"""


def find_plan(kind: str) -> Callable[..., "Plan"]:
    """What makes a draft of a kind, from options, target and texts."""
    if kind in HEAD_KINDS:
        from specexport.train.head import HeadPlan

        return HeadPlan
    from specexport.train.pruned import PrunedPlan

    return PrunedPlan
