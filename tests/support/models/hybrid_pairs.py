"""Hybrids with a draft that is nearly the target, and the comparison of their texts with those of plain decoding."""

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specexport_runtime import SamplingParams, SpecEngine
from tests.support.fakes.rounds import check_every_round
from tests.support.models.tiny_models import HYBRIDS, make_model, save_checkpoint

NAMED = (*("qwen3_next", "qwen3_5", "granitemoehybrid", "lfm2", "falcon_h1", "nemotron_h", "bamba", "jamba"), "mamba2")
"""The hybrids that people run, and a model of state spaces alone."""
KNOWN = 259
"""Tokens that the tokenizer has: no other is ever drafted."""
LOOKAHEAD, LENGTH = 8, 128
PROMPT_LENGTHS = (1, 2, 7, 18, 33, 40, 5, 61)
TEXT_LENGTHS = (24, 9, 17, 24, 12, 24, 3, 20)


class Case(NamedTuple):
    """One way to generate; ``chunk``: most tokens of a step; ``batch``: sequences at a time."""

    chunk: int | None
    drafter: str
    lookahead: int | str
    batch: int


CASES = [
    Case(*case)
    for case in product(
        (None, 5, 17), ("draft-model", "lookup", "suffix", "auto"), (*range(1, LOOKAHEAD + 1), "auto"), (1, 8)
    )
]


def build_pair(classes: str, config: dict[str, Any], folder: Path, quantize: str | None, *, noise: float = 0.0) -> Path:
    """The bundle of a tiny random target and a draft that differs by noise, in standard deviations of weights."""
    import torch

    model = make_model(classes, config | {"vocab_size": KNOWN})
    target = draft = save_checkpoint(model, folder / "target")
    if noise:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
        draft = save_checkpoint(model, folder / "draft")
    return build(folder / "bundle", target, draft, quantize)


def build(output: Path, target: Path, draft: Path | None, quantize: str | None) -> Path:
    """The bundle of checkpoints. Random weights lose more by 8 bits than a build lets pass, so it is not checked."""
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    recipe = BuildRecipe(
        target=str(target),
        draft=None if draft is None else str(draft),
        output=str(output),
        quantize=quantize,
        draft_quantize=None if draft is None else quantize,
        max_model_len=LENGTH,
        lookahead=LOOKAHEAD,
        check=False,
    )
    return build_bundle(recipe).path


def hybrid_pair(name: str, folder: Path, quantize: str | None) -> Path:
    """:func:`build_pair` of a hybrid, with right and wrong drafts; Nemotron-H's experts cannot be 8 bits: an MLP."""
    classes, config = HYBRIDS[name]
    if quantize and name == "nemotron_h":
        config = config | {"layers_block_type": ["mamba", "attention", "mlp"]}
    return build_pair(classes, config, folder, quantize, noise=0.02)


def open_engine(bundle: Path, **options: Any) -> SpecEngine:
    """An engine that checks itself in every round."""
    engine = SpecEngine.load(bundle, max_num_seqs=8, num_threads=1, spin=False, **options)
    check_every_round(engine)
    return engine


def make_prompts(seed: int) -> list[list[int]]:
    """Eight prompts of unlike lengths, with pieces that come again."""
    random = np.random.default_rng(seed)
    prompts = []
    for length in PROMPT_LENGTHS:
        piece = random.integers(3, KNOWN, max(1, length // 3)).tolist()
        prompts.append((piece * 4)[:length])
    return prompts


def some_cases(seed: int) -> list[Case]:
    """Two of :data:`CASES` for each drafter, one alone and one in a batch."""
    random = np.random.default_rng(seed)
    kinds: dict[tuple[str, int], list[Case]] = {}
    for case in CASES:
        kinds.setdefault((case.drafter, case.batch), []).append(case)
    return [cases[int(random.integers(len(cases)))] for cases in kinds.values()]


def compare(bundle: Path, cases: Iterable[Case], *, seed: int) -> Counter[str]:
    """Generate in all ways; find the bits of plain decoding, one sequence at a time. Counts what was drafted."""
    prompts = make_prompts(seed)
    params = [SamplingParams(max_tokens=count, ignore_eos=True, logprobs=2) for count in TEXT_LENGTHS]
    with closing(open_engine(bundle)) as engine:
        plain = [
            engine.generate([prompt], each, drafter="none", remember=False)[0]
            for prompt, each in zip(prompts, params, strict=True)
        ]
    counts: Counter[str] = Counter()
    for chunk, same in groupby(sorted(cases, key=lambda case: case.chunk or 0), key=lambda case: case.chunk):
        with closing(open_engine(bundle, max_num_batched_tokens=chunk)) as engine:
            for at, case in enumerate(same):
                chosen = slice(None) if case.batch > 1 else slice(3 + at % 5, 4 + at % 5)
                found = engine.generate(
                    prompts[chosen],
                    params[chosen],
                    drafter=case.drafter,
                    num_speculative_tokens=case.lookahead,
                    remember=at % 4 < 2,  # else suffixes are the text's own, and "auto" asks the draft model
                )
                counts["cases"] += 1
                for result, wanted in zip(found, plain[chosen], strict=True):
                    assert result.token_ids == wanted.token_ids, case
                    assert result.logprobs == wanted.logprobs, case
                    counts["texts"] += 1
                    for what in ("drafted", "accepted"):
                        counts[what] += getattr(result.stats, what)
                        counts[f"{case.drafter} {what}"] += getattr(result.stats, what)
            engine.check()
    return counts
