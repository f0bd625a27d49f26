"""Greedy texts of the CPU engine, kept beside the graphs: a machine that cannot trace has nothing to compare with else.

python -m tools.proof.texts            # write them anew with ``ort-cpu``, float32; needs the export stack
"""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.proof.checkpoints import SIZES, ensure_pair
from tools.proof.graph import FOLDER
from tools.proof.models import PLANS
from tools.proof.steps import random_tokens

FILE = FOLDER / "texts.json"
LENGTHS = (12, 5, 17, 1)  # ragged from the first step on
NUM_TOKENS = {"tiny": 8, "small": 64}


class Text(NamedTuple):
    """One prompt and what the CPU engine says after it."""

    prompt: list[int]  # token ids
    tokens: list[int]  # greedy continuation
    gaps: list[float]  # by how much each of these tokens' logit was ahead of the second best
    scale: float  # largest magnitude of a logit


def read_texts(model: str) -> list[Text]:
    """The kept texts of a model."""
    return [Text(*item) for item in json.loads(FILE.read_text(encoding="utf-8"))[model]]


def prompts_of(model: str) -> list[list[int]]:
    """The prompts that texts begin with."""
    drawn = random_tokens(SIZES[model].vocab, len(LENGTHS), max(LENGTHS), seed=5)
    return [tokens[:count] for tokens, count in zip(drawn, LENGTHS, strict=True)]


def generate(model: str, work: Path) -> list[Text]:
    """The texts of a model's target, by a bundle for ``ort-cpu`` that is built for it."""
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe
    from specexport_runtime.bundle.opened import load_bundle
    from specexport_runtime.executors.open import open_executor
    from specexport_runtime.packing.batch import ModelRunner, RowWork

    target, _ = ensure_pair(work, model, decisive=PLANS[model].is_decisive)
    folder = work / f"{model}-ort-cpu"
    build_bundle(
        BuildRecipe(
            target=str(target), output=str(folder), backend="ort-cpu", dtype="float32", max_model_len=256, check=False
        ),
        use_cache=False,
    )
    executor = open_executor(load_bundle(folder, max_num_seqs=1), "target", num_threads=None, spin=False)
    texts = []
    for prompt in prompts_of(model):
        runner, fed, tokens, gaps, scale = ModelRunner(executor), prompt, [], [], 0.0
        for _ in range(NUM_TOKENS[model]):
            logits = np.array(runner.step(0, [RowWork(fed, 1)])[0])
            runner.kv.commit(0, runner.kv.kv_len(0) + len(fed))
            second, best = np.partition(logits, -2)[-2:]
            fed = [int(logits.argmax())]
            tokens.append(fed[0])
            gaps.append(round(float(best - second), 4))
            scale = max(scale, float(np.abs(logits).max()))
        texts.append(Text(prompt, tokens, gaps, round(scale, 2)))
    executor.close()
    return texts


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as work:
        found = {model: generate(model, Path(work)) for model in NUM_TOKENS}
    lines = (
        f'"{model}": [\n{",".join(chr(10) + json.dumps(text) for text in texts)}\n]' for model, texts in found.items()
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
