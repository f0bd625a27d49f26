"""A training from prompts to a head: texts, hidden states, batches, files. Each part goes on where it was left."""

import json
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specexport.atomic import require_space
from specexport.bench.prompts import read_prompts
from specexport.host import peak_memory_bytes
from specexport.progress import Progress, StageClock
from specexport.train.options import TrainOptions
from specexport_runtime.errors import InvalidRequestError, OutputExistsError, UnsupportedModelError
from specexport_runtime.executors.base import Int32Array

HELD_OUT, FEWEST_TEXTS = 0.05, 16
"""Share of the texts that is not learned from, and the fewest texts of which a share can be."""
SHORTEST_TEXT = 12
"""Tokens: in a shorter text there is no place for all draft steps."""
SAVE_EVERY = 50
"""Batches between two savings, and between two looks at the acceptance."""
STAGES = 5


class Trained(NamedTuple):
    """What a training gave.

    Attributes:
        output: folder of the head.
        num_texts: texts that it learned from.
        num_tokens: tokens of them.
        batches: batches that it learned from.
        seconds: of learning, this run and those before.
        curve: acceptance on held-out texts: ``batch``, ``length``, ``rates`` and ``loss`` each time.
        tokens_per_second: of learning.
        peak_memory_bytes: most resident memory of this process so far, pages of the hidden states' files included.
    """

    output: Path
    num_texts: int
    num_tokens: int
    batches: int
    seconds: float
    curve: Seq[dict[str, Any]]
    tokens_per_second: float
    peak_memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {**self._asdict(), "output": str(self.output), "curve": list(self.curve)}


def train_draft(options: TrainOptions, progress: Progress | None = None) -> Trained:
    """Train a head; a run that was ended goes on.

    Args:
        options: what was asked for.
        progress: told of stages and of the acceptance.

    Raises:
        InvalidRequestError: prompts, limits, the bundle or the work folder do not allow it.
        OutputExistsError: something else stands in the output folder.
        CheckpointError, UnsupportedModelError: the target cannot be used.
        UserInputError: the disk is full.
    """
    import torch

    from specexport.frontend import load_checkpoint
    from specexport.train.store import FeatureStore

    clock = StageClock(progress, STAGES)
    _check_output(options.output)
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
    model: Any = checkpoint.model
    from specexport.train.texts import read_texts

    texts = [text for text in read_texts(texts_path) if len(text) >= SHORTEST_TEXT]
    config, ids = _shape(options, checkpoint, texts)
    with clock.stage("read", "target", f"{sum(map(len, texts)):,} tokens"):
        _collect(options, model, texts, config.taps, clock)
    store = FeatureStore(options.states_folder)
    with clock.stage("learn"):
        trainer, total = _trainer(options, model, config, ids, store)
        del model, checkpoint
        _learn(options, trainer, total, clock)
    with clock.stage("save"):
        return _save(options, trainer, config, ids, store)


def _check_output(folder: Path) -> None:
    """Refuse a folder that holds something else: a head takes the names that a checkpoint has.

    Raises:
        OutputExistsError: it does.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        is_head = "speculators_model_type" in values and (folder / "curve.json").is_file()
    except (OSError, ValueError, TypeError):
        is_head = False
    if not is_head:
        raise OutputExistsError(
            f"{folder} exists and is no head that was trained here.", "choose another folder with -o."
        )


def _write_texts(options: TrainOptions, prompts: Seq[str], path: Path, clock: StageClock) -> None:
    from specexport.frontend import hash_checkpoint
    from specexport.train.texts import write_texts
    from specexport_runtime.bundle.manifest import load_manifest

    bundle, sha256 = options.bundle, hash_checkpoint(options.target)
    if bundle is None:
        from specexport.build.pipeline import build_bundle
        from specexport.recipe import BuildRecipe

        bundle = options.work_folder / "texts-bundle"
        # By this name nobody else has one: one of an earlier version is built again.
        build_bundle(BuildRecipe(target=options.target, output=str(bundle)), force=True)
    written_by = load_manifest(bundle).models["target"].source_sha256
    if written_by != sha256:
        raise InvalidRequestError(
            f"{bundle} was not built from {options.target}: a head learns from what its own target writes.",
            "give a bundle of this target, or leave --bundle out.",
        )
    write_texts(
        bundle,
        prompts,
        path,
        options.text_settings() | {"target": sha256},
        threads=options.threads,
        on_group=lambda count: clock.note(f"{count} of {len(prompts)} texts"),
    )


def _shape(options: TrainOptions, checkpoint: Any, texts: Seq[Seq[int]]) -> tuple[Any, Int32Array]:
    from specexport.train.shape import count_ids, draft_size, new_config

    text = checkpoint.model.config.get_text_config()
    if int(text.num_hidden_layers) < 4:
        raise UnsupportedModelError(
            f"the target has {text.num_hidden_layers} layers: there is little to read between them.",
            "draft with a model, or with `lookup`.",
        )
    size = draft_size(options.draft_vocab_size, checkpoint.vocab_size)
    ids = count_ids(texts, size, checkpoint.vocab_size, checkpoint.eos_token_ids)
    return new_config(options.kind, text, checkpoint.vocab_size, len(ids)), ids


def _collect(options: TrainOptions, model: Any, texts: Seq[Seq[int]], taps: Seq[int], clock: StageClock) -> None:
    from specexport.train.collect import collect_states
    from specexport.train.store import FeatureStore, StoreWriter

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


def _trainer(options: TrainOptions, model: Any, config: Any, ids: Int32Array, store: Any) -> tuple[Any, int]:
    import torch

    from specexport.heads.kinds import make_head
    from specexport.heads.modules import FeatureProjection
    from specexport.train.loop import Target, Trainer, TrainSettings
    from specexport.train.store import batches

    torch.manual_seed(options.seed)
    head, projection = make_head(config), FeatureProjection(config)
    table, rows = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    head.embed_tokens.weight.data = table
    kept = torch.from_numpy(ids.astype(np.int64))
    head.lm_head.weight.data = rows[kept].clone()
    held = set(_held_out(len(store)))
    learned = [i for i in range(len(store)) if i not in held]
    settings = TrainSettings(
        steps=options.steps, batch_tokens=options.batch_tokens, matrix_rate=options.rate, seed=options.seed
    )
    each = len(list(batches(store, learned, settings.batch_tokens, settings.max_len, options.seed)))
    total = options.batches or options.epochs * each
    softcap = float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0)
    settings = TrainSettings(
        **{**settings.__dict__, "total": total, "warmup": min(settings.warmup, max(1, total // 4))}
    )
    target = Target(rows.bfloat16(), kept, rows[kept].bfloat16(), softcap)
    return Trainer(head, projection, target, store, learned, settings), total


def _learn(options: TrainOptions, trainer: Any, total: int, clock: StageClock) -> None:
    from specexport.train.loop import measure_acceptance

    folder = options.work_folder / f"{options.kind}-state"
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
            }
            trainer.curve.append(point)
            trainer.save(folder)
            clock.note(f"{trainer.done} of {total} batches, {found.length:.2f} tokens a round on held-out texts")


def _save(options: TrainOptions, trainer: Any, config: Any, ids: Int32Array, store: Any) -> Trained:
    from specexport.heads.write import write_head, write_text

    whole = len(ids) == config.vocab_size
    learned = sum(store.length(i) for i in trainer.indices)
    result = Trained(
        output=options.output,
        num_texts=len(trainer.indices),
        num_tokens=learned,
        batches=trainer.done,
        seconds=trainer.seconds,
        curve=tuple(trainer.curve),
        tokens_per_second=trainer.tokens / max(trainer.seconds, 1e-9),
        peak_memory_bytes=peak_memory_bytes(),
    )
    name = Path(options.target).name
    write_head(
        options.output,
        config,
        trainer.head,
        trainer.projection,
        ids=None if whole else ids,
        verifier=name,
        lookahead=options.steps,
    )
    write_text(options.output / "README.md", _card(options, result, name))
    write_text(options.output / "curve.json", json.dumps(result.to_json()["curve"], indent=1) + "\n")
    return result


def _card(options: TrainOptions, result: Trained, name: str) -> str:
    """A model card: what it was made of, and what it does on text that it did not learn from."""
    last: dict[str, Any] = result.curve[-1]
    rates = ", ".join(f"{rate:.2f}" for rate in last["rates"])
    made, drawn = time.strftime("%Y-%m-%d"), f"half of them greedily, half at temperature {options.temperature:g}"
    return f"""# A draft head for {name}

Kind {options.kind}, in the format of speculators. Made by `specexport train-draft` on {made}.

| | |
| --- | --- |
| texts | {result.num_texts:,}, written by the target: {drawn} |
| tokens | {result.num_tokens:,} |
| batches | {result.batches:,} of up to {options.batch_tokens:,} tokens |
| hours of learning | {result.seconds / 3600:.2f} |
| on held-out texts: right at draft step 1, 2, … | {rates} |
| on held-out texts: tokens a round with {len(last["rates"])} drafts | {last["length"]:.2f} |

Use it with `specexport build {name} --head FOLDER`. The embedding is the target's, and is not in the files.
"""
