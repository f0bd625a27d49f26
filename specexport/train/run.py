"""A training from prompts to a draft: texts, hidden states, batches, files. Each part goes on where it was left."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.atomic import new_folder, place_behind_links, require_space, write_json, write_text
from specexport.bench.prompts import read_prompts
from specexport.host import peak_memory_bytes
from specexport.progress import Progress, StageClock
from specexport.train.options import HEAD_KINDS, TrainOptions
from specexport.train.work import Budget, lock_folder
from specexport_runtime.errors import InvalidRequestError, OutputExistsError, UnsupportedModelError

if TYPE_CHECKING:
    from specexport.train.store import FeatureStore
    from specexport.train.student import Plan

HELD_OUT, FEWEST_TEXTS = 0.05, 16
"""Share of the texts that is not learned from, and the fewest texts of which a share can be."""
SHORTEST_TEXT = 12
"""Tokens: in a shorter text there is no place for all draft steps."""
LOOK_EVERY, SAVE_SECONDS = 50, 120.0
"""Batches between two looks at the acceptance, and seconds between two savings: what a killed run loses at most."""
STAGES = 6


class _Run(NamedTuple):
    """What every part of a training is given."""

    options: TrainOptions
    clock: StageClock
    budget: Budget


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
        return {"finished": True, **self._asdict(), "output": str(self.output), "curve": list(self.curve)}


def train_draft(options: TrainOptions, progress: Progress | None = None) -> Trained:
    """Train a draft; a run that was ended goes on.

    InvalidRequestError: prompts, limits, the bundle or the work folder do not allow it. OutputExistsError: something
    else is in the output folder. Paused: ``options.hours`` are over before the end.
    """
    import torch

    run = _Run(options, StageClock(progress, STAGES), Budget(options.hours))
    _check_output(options.output, options.kind)
    prompts = [prompt.text for prompt in read_prompts(options.prompts)]
    if len(prompts) < FEWEST_TEXTS:
        raise InvalidRequestError(f"there are {len(prompts)} prompts to train on.", f"give {FEWEST_TEXTS} or more.")
    target = _check_target(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with lock_folder(options.work_folder):
        return _train(run, prompts, options.text_settings() | {"target": target})


def _train(run: _Run, prompts: Sequence[str], text_settings: dict[str, Any]) -> Trained:
    import torch

    from specexport.checkpoint.load import load_checkpoint
    from specexport.train.texts import read_texts, texts_key

    options, clock = run.options, run.clock
    texts_path, key = options.work_folder / "texts.jsonl", texts_key(prompts, text_settings)
    with clock.stage("write", "", f"{len(prompts)} texts"):
        _write_texts(run, prompts, texts_path, text_settings)
    with clock.stage("load"):
        checkpoint = load_checkpoint(options.target)
    texts = [text for text in read_texts(texts_path, key) if len(text) >= SHORTEST_TEXT]
    plan = find_plan(options.kind)(options, checkpoint, texts)
    with clock.stage("read", "target", f"{sum(map(len, texts)):,} tokens"):
        store = _collect(run, checkpoint.model, texts, plan.taps, key)
    with clock.stage("make", "draft"):
        torch.manual_seed(options.seed)
        del checkpoint
        trainer = _trainer(options, plan.make(clock.note), store)
    with clock.stage("learn"):
        _run_training(run, trainer)
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


def _check_target(options: TrainOptions) -> str:
    """SHA-256 of the target; an error for one that is missing, has too few layers or did not make the bundle."""
    from specexport.checkpoint.load import count_layers
    from specexport.checkpoint.source import hash_checkpoint
    from specexport_runtime.bundle.manifest import load_manifest

    if options.bundle is None:
        options.check_target(count_layers(options.target), keeps_state=False)
        return hash_checkpoint(options.target)
    manifest = load_manifest(options.bundle)
    written_by = manifest.models["target"]
    sha256 = hash_checkpoint(options.target, remote_code=bool(manifest.recipe.get("trust_remote_code")))
    if written_by.source.sha256 != sha256:
        raise InvalidRequestError(
            f"{options.bundle} was not built from {options.target}: a draft learns from what its own target writes.",
            "give a bundle of this target, or leave --bundle out.",
        )
    options.check_target(count_layers(options.target), keeps_state=bool(written_by.states))
    return sha256


def _write_texts(run: _Run, prompts: Sequence[str], path: Path, settings: dict[str, Any]) -> None:
    from specexport.train.texts import write_texts

    def note(count: int) -> None:
        run.clock.note(f"{count} of {len(prompts)} texts")
        run.budget.check("texts written", count, len(prompts))

    bundle = run.options.bundle or _build_own_bundle(run.options)
    write_texts(bundle, prompts, path, settings, threads=run.options.threads, on_group=note)


def _build_own_bundle(options: TrainOptions) -> Path:
    """A bundle of the target in the work folder; one of an earlier version is built again."""
    from specexport.checkpoint.load import count_layers
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe
    from specexport_runtime.bundle.manifest import load_manifest

    bundle = options.work_folder / "texts-bundle"
    build_bundle(BuildRecipe(target=options.target, output=str(bundle)), force=True)
    try:
        states = load_manifest(bundle).models["target"].states
        options.check_target(count_layers(options.target), keeps_state=bool(states))
    except UnsupportedModelError:
        shutil.rmtree(bundle)
        raise
    return bundle


def _collect(run: _Run, model: Any, texts: Sequence[Sequence[int]], taps: Sequence[int], key: str) -> "FeatureStore":
    from specexport.train.store import FeatureStore, collect_states

    options, folder = run.options, run.options.states_folder
    made_of = f"{key}, hidden states {list(taps)}"
    store = FeatureStore(folder, made_of)
    width = int(model.config.get_text_config().hidden_size)
    needed = 2 * width * (len(taps) + 1) * sum(map(len, texts))
    if needed > options.max_states_gb * 1e9:
        raise InvalidRequestError(
            f"hidden states of {sum(map(len, texts)):,} tokens take {needed / 1e9:.1f} GB, and "
            f"{options.max_states_gb:g} GB are allowed.",
            "give fewer prompts or a larger --max-states-gb.",
        )
    require_space(folder, needed - 2 * width * (len(taps) + 1) * store.num_tokens)
    done, writer = len(store), store.writer()

    def note(count: int) -> None:
        run.clock.note(f"{done + count} of {len(texts)} texts")
        if run.budget.is_over:
            writer.flush()
        run.budget.check("texts read", done + count, len(texts))

    collect_states(model, texts[done:], taps, writer, on_batch=note)
    writer.flush()
    return FeatureStore(folder, made_of)


def _choose_held_out(count: int) -> list[int]:
    """Texts that are not learned from, spread over all."""
    step = round(1 / HELD_OUT)
    return list(range(0, count, step))


def _trainer(options: TrainOptions, student: Any, store: Any) -> Any:
    from specexport.train.loop import Trainer, TrainSettings
    from specexport.train.store import batches

    held = set(_choose_held_out(len(store)))
    learned = [i for i in range(len(store)) if i not in held]
    settings = TrainSettings(
        steps=options.draft_steps, batch_tokens=options.batch_tokens, matrix_rate=options.rate, seed=options.seed
    )
    each = len(list(batches(store, learned, settings.batch_tokens, settings.max_len, options.seed)))
    total = options.batches or options.epochs * each
    settings = replace(settings, total=total, warmup=min(settings.warmup, max(1, total // 4)))
    return Trainer(student, store, learned, settings)


def _run_training(run: _Run, trainer: Any) -> None:
    folder, total = run.options.work_folder / f"{run.options.kind}-state", trainer.settings.total
    if trainer.resume(folder):
        run.clock.note(f"goes on after {trainer.done} of {total} batches")
    held, saved = _choose_held_out(len(trainer.store)), time.monotonic()
    while trainer.done < total:
        trainer.step()
        looks = trainer.done % LOOK_EVERY == 0 or trainer.done == total
        if looks:
            trainer.curve.append(_measure_curve_point(trainer, held))
        if looks or run.budget.is_over or time.monotonic() - saved > SAVE_SECONDS:
            trainer.save(folder)
            saved = time.monotonic()
        if looks:
            length = trainer.curve[-1]["length"]
            run.clock.note(f"{trainer.done} of {total} batches, {length:.2f} tokens a round on held-out texts")
        run.budget.check("batches learned", trainer.done, total)


def _measure_curve_point(trainer: Any, held: Sequence[int]) -> dict[str, Any]:
    """A point of the curve."""
    from specexport.train.loop import measure_acceptance

    found = measure_acceptance(trainer, held)
    return {
        "batch": trainer.done,
        "length": round(found.length, 4),
        "rates": [round(rate, 4) for rate in found.rates],
        "loss": round(found.loss, 4),
    } | ({} if found.overlap is None else {"overlap": round(found.overlap, 4)})


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
    with _replace_folder_files(options.output) as folder:
        plan.write(folder, trainer.student)
        write_text(folder / "README.md", _card(options, result, described))
        write_json(folder / "curve.json", result.to_json()["curve"])
    return result


@contextlib.contextmanager
def _replace_folder_files(output: Path) -> Iterator[Path]:
    """A folder that becomes ``output``, or whose files replace the ones of an earlier run there."""
    if not output.exists() or not any(output.iterdir()):
        with new_folder(output) as made:
            yield made
        return
    with new_folder(output / ".new") as made:
        yield made
        for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, output / path.name)
    (output / ".new").rmdir()


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
| settings | `{options.flags()}` |
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
        from specexport.train.head import HeadTrainingPlan

        return HeadTrainingPlan
    from specexport.train.pruned import PrunedPlan

    return PrunedPlan
