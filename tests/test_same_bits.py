"""A token has the same bits in any company: at every width, in every batch, however its prompt was cut, on any threads.

No limit is allowed here, in no format: what verifies drafts must say what plain decoding says.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.support.cases import chance
from tests.support.models.tiny_gguf import MIXED_EXPERTS, write_experts, write_gguf
from tests.support.models.tiny_lora import save_adapter
from tests.support.models.tiny_models import ARCHITECTURES, GROUPED, HYBRIDS, KNOWN, make_model, save_checkpoint
from tests.support.models.tiny_traces import tiny_model
from tests.support.references.engine_harness import compiled
from tests.support.references.ort_operators import HEADS, LEFT, assert_left

ROWS, WIDEST = 8, 16
LENGTHS = (35, 19, 33, 8, 27, 1, 40, 22)
ALIKE = {
    "llama_rope_llama3", "llama_rope_yarn", "llama_rope_linear", "qwen2", "smollm3", "olmo2", "stablelm", "starcoder2",
}  # fmt: skip
"""Architectures that have the operators of others."""
TOLD_APART = [name for name in (*ARCHITECTURES, *HYBRIDS) if name not in ALIKE]
IN_EIGHT_BITS = ("qwen3_moe", "gpt2", "gpt_oss", "gemma3", "deepseek_v3", "qwen3_next", "mamba2", "jamba", "falcon_h1")
"""Each kind of layer that has weights in blocks, experts first: the others have the same operators around them."""
MIXED = {
    "attn_v.weight": "Q6_K", "ffn_down.weight": "Q8_0", "attn_q.weight": "Q5_0", "output.weight": "Q2_K", "": "Q4_K",
}  # fmt: skip

Sizes = Iterator[tuple[int, int]]
"""Of each step of a row: the tokens of its text, and wrong drafts after them."""
Made = tuple[ModelEntry, Path]
"""An engine: its manifest entry, and the folder that its path is in."""


class Text(NamedTuple):
    """What is read, and by which adapter, where there are some."""

    ids: list[int]
    adapter: int


def read(runner: ModelRunner, texts: Sequence[Text], sizes: Sequence[Sizes], first_row: int = 0) -> list[np.ndarray]:
    """Logits [T, V] of texts that are read side by side, each in its own pieces; a piece of 0 sits a step out."""
    runner.reset()
    found: list[list[np.ndarray]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(at < len(text.ids) for at, text in zip(done, texts, strict=True)):
        work, right = [], []
        for at, text, each in zip(done, texts, sizes, strict=True):
            own, wrong = next(each)
            tokens = text.ids[at : at + own]
            drafts = len(tokens) - 1 + wrong if wrong else 0
            given = RowWork([*tokens, *[7] * wrong], len(tokens) + wrong, drafts=drafts, adapter=text.adapter)
            work.append(given if tokens else IDLE)
            right.append(len(tokens))
        if not any(right):
            continue
        logits = runner.step(first_row, work)
        for row, count in enumerate(right):
            if count:
                start = runner.logit_starts[row]
                found[row].append(logits[start : start + count].copy())
                done[row] += count
                runner.kv.commit(first_row + row, done[row])
    return [np.concatenate(parts) for parts in found]


def assert_same_bits(made: Made, where: str) -> None:
    """Read texts token by token, alone; then in all other ways."""
    (entry, folder), random = made, np.random.default_rng(chance.seed(3))
    assert_left(folder / entry.engine.path, where)
    adapters = 1 + len(entry.chosen_adapters)
    texts = [Text(random.integers(3, KNOWN, length).tolist(), i % adapters) for i, length in enumerate(LENGTHS)]

    def odd() -> Sizes:
        while True:
            own, drafts = random.integers(0, WIDEST + 1, 2).tolist()
            yield own, max(0, drafts - own)

    expected: list[np.ndarray] = []
    for threads, widths, batches in ((1, range(1, WIDEST + 1), range(2, ROWS + 1)), (2, (1, 5, WIDEST), (2, ROWS))):
        sizes = {"num_rows": ROWS, "kv_capacity": 64, "num_threads": threads, "lookahead": 2 * WIDEST}
        runner = ModelRunner(OrtExecutor(folder / entry.engine.path, entry, spin=False, **sizes))
        expected = expected or [read(runner, [text], [repeat((1, 0))])[0] for text in texts]
        assert min(float(logits.std()) for logits in expected) > 0.1, "degenerate logits would hide an error"
        for width in widths:
            (found,) = read(runner, texts[:1], [repeat((width, width % 3))])
            np.testing.assert_array_equal(found, expected[0], f"{width} at a time, {threads} threads")
        for batch in batches:
            rows = random.permutation(ROWS)[:batch].tolist()
            together = read(runner, [texts[row] for row in rows], [odd() for _ in rows], int(ROWS - batch > 2))
            for row, found in zip(rows, together, strict=True):
                np.testing.assert_array_equal(found, expected[row], f"text {row} of {rows}, {threads} threads")


def model_of(name: str) -> Any:
    return tiny_model(name) if name in ARCHITECTURES else tiny_model(name, vocab_size=KNOWN)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TOLD_APART)
def test_every_architecture(name: str, tmp_path: Path) -> None:
    assert_same_bits((compiled(model_of(name), tmp_path), tmp_path), name)


@pytest.mark.fuzz
@pytest.mark.one_of_kind
@pytest.mark.parametrize("name", IN_EIGHT_BITS)
def test_every_architecture_in_eight_bits(name: str, tmp_path: Path) -> None:
    assert_same_bits((compiled(model_of(name), tmp_path, quantize="int8"), tmp_path), "")


def built(folder: Path, source: Path | None = None, **values: Any) -> Made:
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    source = source or save_checkpoint(tiny_model("llama"), folder / "model")
    recipe = BuildRecipe(target=str(source), output=str(folder / "out"), max_model_len=64, check=False, **values)
    return build_bundle(recipe, use_cache=False).manifest.models["target"], folder / "out"


def rounded(folder: Path, dtype: str) -> Made:
    import torch

    model = make_model(*ARCHITECTURES["llama"])
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, dtype)).float()
    return compiled(model, folder), folder


def kept(folder: Path) -> Made:
    write_gguf(
        make_model("Qwen2", GROUPED | {"hidden_size": 256, "intermediate_size": 256}), folder / "g.gguf", kinds=MIXED
    )
    return built(folder, folder / "g.gguf")


def kept_experts(folder: Path) -> Made:
    write_experts(folder / "g.gguf", "qwen3moe", MIXED_EXPERTS)
    return built(folder, folder / "g.gguf")


def adapted(folder: Path) -> Made:
    model, only = tiny_model("llama"), ["q_proj", "up_proj"]
    found = (save_adapter(model, folder / "a", seed=1), save_adapter(model, folder / "b", targets=only, r=2, seed=2))
    return built(folder, lora=tuple(f"{path.name}={path}" for path in found))


ENGINES: dict[str, Callable[[Path], Made]] = {
    "bf16": lambda folder: rounded(folder, "bfloat16"), "f16": lambda folder: rounded(folder, "float16"),
    "int4": lambda folder: (compiled(tiny_model("llama"), folder, quantize="int4"), folder), "kept": kept,
    "kept experts": kept_experts, "adapters": adapted,
    "int8 caches": lambda folder: built(folder, kv_cache_dtype="int8"),
    "gated layers": lambda folder: built(folder, self_draft=True),
}  # fmt: skip
FORMATS: dict[str, set[str]] = {
    "bf16": {"bf16"}, "f16": {"f16"}, "int4": {"group4_32_f16_zero", "int8"}, "kept": set(MIXED.values()),
    "kept experts": set(MIXED_EXPERTS.values()),
}  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.one_of_kind
@pytest.mark.parametrize("kind", ENGINES)
def test_every_kind_of_engine(kind: str, tmp_path: Path) -> None:
    """Beside float32 and int8, which are above."""
    entry, folder = ENGINES[kind](tmp_path)
    assert {name for name, *_ in entry.engine.weight_formats} == FORMATS.get(kind, {"f32"})
    assert_same_bits((entry, folder), kind)


def test_operators_are_looked_for_where_they_can_be_seen() -> None:
    places = {place for known in LEFT.values() for place in known.values()}
    assert places <= {*ARCHITECTURES, *HYBRIDS, *ENGINES, *HEADS} - ALIKE
    names = [name for known in LEFT.values() for name in known]
    assert len(names) == len(set(names))
