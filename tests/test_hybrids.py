"""Models whose layers keep a state: their engines against eager transformers, and their texts with drafts."""

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner

from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe
from specexport.trace.check import compute_reference_logits
from specexport.verify.goodness_of_fit import assess_outcomes
from specexport.verify.logit_tree import LogitTree, Partition, make_conditional
from specexport_runtime import SamplingParams
from specexport_runtime.abi import StateGeometry
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.errors import IncompatibleError, UnsupportedModelError
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from specexport_runtime.sampling.sampler import Sampler
from tests.support.cases import chance
from tests.support.fakes.rounds import opened
from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS, KNOWN, make_model, save_checkpoint
from tests.support.models.tiny_traces import tiny_model
from tests.support.references.engine_harness import make_checkpoint

NAMED = (*("qwen3_next", "qwen3_5", "granitemoehybrid", "lfm2", "falcon_h1", "nemotron_h", "bamba", "jamba"), "mamba2")
"""The hybrids that people run, and a model of state spaces alone."""
LENGTH = 128
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
    for case in product((None, 5, 17), ("draft-model", "lookup", "suffix", "auto"), (*range(1, 9), "auto"), (1, 8))
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
    recipe = BuildRecipe(
        target=str(target), draft=None if draft is None else str(draft), output=str(output), quantize=quantize,
        draft_quantize=None if draft is None else quantize, max_model_len=LENGTH, lookahead=8, check=False,
    )  # fmt: skip
    return build_bundle(recipe).path


def hybrid_pair(name: str, folder: Path, quantize: str | None) -> Path:
    """:func:`build_pair` of a hybrid, with right and wrong drafts; Nemotron-H's experts cannot be 8 bits: an MLP."""
    classes, config = HYBRIDS[name]
    if quantize and name == "nemotron_h":
        config = config | {"layers_block_type": ["mamba", "attention", "mlp"]}
    return build_pair(classes, config, folder, quantize, noise=0.02)


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
    with opened(bundle, 8, adaptive=True) as engine:
        plain = [
            engine.generate([prompt], each, drafter="none", remember=False)[0]
            for prompt, each in zip(prompts, params, strict=True)
        ]
    counts: Counter[str] = Counter()
    for chunk, same in groupby(sorted(cases, key=lambda case: case.chunk or 0), key=lambda case: case.chunk):
        with opened(bundle, 8, adaptive=True, max_num_batched_tokens=chunk) as engine:
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
    return counts


LOOKAHEAD = 6
TOLERANCE = 1e-4
"""Of the largest logit."""
KINDS = NAMED if chance.FUZZ_SEED is not None else ("qwen3_next", "mamba2", "falcon_h1", "jamba", "lfm2")
"""A delta rule, state spaces alone and beside attention, those of the first Mamba, and convolutions alone."""


@pytest.mark.fuzz
@pytest.mark.parametrize("name", HYBRIDS)
def test_engine_logits_equal_eager_transformers_behind_rollbacks(name: str, tmp_path: Path) -> None:
    """Rounds as decoding makes them: prompts in odd chunks, drafts of which some are right, idle rows, row moves."""
    model = tiny_model(name, vocab_size=KNOWN)
    bundle = load_bundle(build(tmp_path / "bundle", save_checkpoint(model, tmp_path / "target"), None, None))
    entry = bundle.manifest.models["target"]
    random = np.random.default_rng(chance.seed(7))
    sequences = [random.integers(3, KNOWN, length).tolist() for length in (33, 40, 36)]
    expected = compute_reference_logits(make_checkpoint(model), sequences)
    assert min(float(logits.std()) for logits in expected) > 0.1, "degenerate logits would hide an error"

    limit = TOLERANCE * max(float(np.abs(logits).max()) for logits in expected)
    path = bundle.folder / entry.engine.path
    runner = ModelRunner(OrtExecutor(path, entry, num_rows=4, kv_capacity=64, num_threads=1, lookahead=LOOKAHEAD))
    for row, chunks in enumerate([(9,), (5, 1, 8), (2, 2)]):
        for chunk in chunks:
            start = runner.kv.kv_len(row)
            logits = runner.step(row, [RowWork(sequences[row][start : start + chunk], chunk)])
            assert np.abs(logits - expected[row][start : start + chunk]).max() < limit
            runner.kv.commit(row, start + chunk)
    while any(runner.kv.kv_len(row) < len(sequences[row]) for row in range(3)):
        work, right = [], []
        for row, tokens in enumerate(sequences):
            start = runner.kv.kv_len(row)
            drafts = min(int(random.integers(0, LOOKAHEAD + 1)), len(tokens) - start - 1)
            if drafts < 0 or random.random() < 0.2:
                work.append(IDLE)
                right.append(0)
                continue
            good = int(random.integers(0, drafts + 1))
            wrong = random.integers(3, KNOWN, drafts - good).tolist()
            work.append(RowWork([*tokens[start : start + 1 + good], *wrong], 1 + drafts, drafts=drafts))
            right.append(1 + good)
        if not any(right):
            continue
        logits = runner.step(0, work)
        for row, count in enumerate(right):
            if count:
                start, begin = runner.kv.kv_len(row), runner.logit_starts[row]
                assert np.abs(logits[begin : begin + count] - expected[row][start : start + count]).max() < limit
                runner.kv.commit(row, start + int(random.integers(1, count + 1)))
        runner.kv.check()
    if name == "bamba":  # the last round of a row that was moved, after drafts that were accepted
        start = runner.kv.state_len(1)
        runner.move_row(1, 3)
        assert (runner.kv.state_len(3), runner.kv.kv_len(1)) == (start, 0)


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "quantize"), [*((name, "int8") for name in KINDS), ("lfm2", None)])
def test_texts_with_drafts_are_those_without(name: str, quantize: str | None, tmp_path: Path) -> None:
    """Some drafters, lookaheads, batches and prompt chunks; all of them under ``make fuzz``."""
    cases = CASES if chance.FUZZ_SEED is not None else some_cases(NAMED.index(name))
    bundle = hybrid_pair(name, tmp_path, quantize)
    counts = compare(bundle, cases, seed=chance.seed(11))
    assert counts["cases"] == len(cases)
    assert 0 < counts["draft-model accepted"] < counts["draft-model drafted"]


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("name", "quantize"), [("qwen3_next", "int8"), ("bamba", "int8"), ("qwen3_moe", None)])
def test_a_model_that_drafts_for_itself_is_accepted_to_the_last_token(name, quantize, tmp_path):
    bundle = build_pair(*(ARCHITECTURES | HYBRIDS)[name], tmp_path, quantize)
    with opened(bundle, 8) as engine:
        for lookahead in (1, 3, 8):
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            found = engine.generate(make_prompts(3), params, drafter="draft-model", num_speculative_tokens=lookahead)
            counts = [(result.stats.drafted, result.stats.accepted) for result in found]
            assert all(drafted == accepted > 0 for drafted, accepted in counts), (lookahead, counts)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "seed", "number"), [("qwen3_next", 20, 7), ("bamba", 2, 1)])
def test_sampled_texts_follow_the_target(name: str, seed: int, number: int, tmp_path: Path) -> None:
    """A gated delta rule and a state space, at temperature 1; chi-square over the first three tokens together.

    The prompts are those of many that leave most of the next token open.
    """
    depth, runs = 3, 400
    with opened(hybrid_pair(name, tmp_path, "int8"), 8) as engine:
        params = SamplingParams(temperature=1.0)
        prompt = make_prompts(seed)[number]
        tree = LogitTree(engine.target, prompt)
        partition = Partition(make_conditional(tree, Sampler(params, prompt, tree.vocab_size)), depth, runs)
        assert len(partition.probabilities) >= 7, "nothing to tell apart"
        each = [replace(params, seed=i, max_tokens=depth + 1, ignore_eos=True) for i in range(runs)]
        for way in ("draft-model", "suffix"):  # suffixes are those of the texts that the draft model helped with
            results = engine.generate([prompt] * runs, each, drafter=way, num_speculative_tokens=3)
            outcomes = [tuple(result.token_ids[:depth]) for result in results]
            assert assess_outcomes("engine", way, 0, partition, outcomes, depth, 1e-4).passed
            accepted = sum(result.stats.accepted for result in results)
            assert 0 < accepted < sum(result.stats.drafted for result in results)
        colder = [replace(one, temperature=0.5) for one in each]
        outcomes = [tuple(result.token_ids[:depth]) for result in engine.generate([prompt] * runs, colder)]
        assert not assess_outcomes("engine", "colder", 0, partition, outcomes, depth, 1e-4).passed, (
            "the test sees nothing"
        )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid target in int8 with a hybrid draft of another kind."""
    folder = tmp_path_factory.mktemp("hybrid")
    models = {name: tiny_model(name, vocab_size=KNOWN) for name in ("bamba", "mamba2")}
    target, draft = (save_checkpoint(model, folder / name) for name, model in models.items())
    return build(folder / "bundle", target, draft, "int8")


PROMPTS = ["abcabcabcabcabc", "x", "for i in range(10):\n    print(i)\nfor i in range(10):\n"]


def test_a_state_is_gone_on_from_where_a_text_continues_and_nowhere_else(bundle: Path) -> None:
    with opened(bundle, 2) as engine:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        start = engine.encode("a text that is long enough to be kept")
        (first,) = engine.generate([start], params, drafter="none")
        history = [*start, *first.token_ids, *engine.encode(" and more of it")]
        (second,) = engine.generate([history], params, drafter="none")
        assert second.stats.cached_tokens == len(start) + len(first.token_ids) - 1
        (other,) = engine.generate([[*start, *engine.encode(" that goes on otherwise")]], params, drafter="none")
        assert other.stats.cached_tokens == 0  # no state is back there
        wanted = engine.generate([history], params, drafter="none", remember=False)
        assert [wanted[0].token_ids] == [second.token_ids]


def test_a_pinned_prefix_is_gone_on_from(bundle: Path) -> None:
    with opened(bundle, 2, prefix_rows=1) as engine:
        start = engine.encode("a system prompt that stays")
        assert engine.pin_prefix(start) == len(start)
        for text in ("one", "another"):
            prompt = [*start, *engine.encode(text)]
            (found,) = engine.generate([prompt], SamplingParams(max_tokens=8), num_speculative_tokens=3)
            (wanted,) = engine.generate([prompt], SamplingParams(max_tokens=8), drafter="none", remember=False)
            assert found.stats.cached_tokens == len(start)
            assert found.token_ids == wanted.token_ids


def test_a_state_outlives_its_engine(bundle: Path, tmp_path: Path) -> None:
    """It comes back with the text, where that is continued and nowhere else."""
    kept, params = {"prefix_cache_dir": tmp_path / "kept"}, SamplingParams(max_tokens=12, ignore_eos=True)
    with opened(bundle, 2, **kept) as engine:
        start = engine.encode("a text that is long enough to be worth a file, and has a state ")
        (first,) = engine.generate([start], params, num_speculative_tokens=3)
        history = [*start, *first.token_ids, *engine.encode(" and more of it")]
        (wanted,) = engine.generate([history], params, drafter="none", remember=False)
    with opened(bundle, 2, **kept) as engine:
        other, found = engine.generate([[*start[:-1], 9, 9, 9], history], params, num_speculative_tokens=3)
    assert other.stats.cached_tokens == 0
    assert found.stats.cached_tokens == len(start) + len(first.token_ids) - 1
    assert found.token_ids == wanted.token_ids


def test_measuring_steps_leaves_nothing_in_a_state(bundle: Path) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with opened(bundle, 2, adaptive=True) as engine:
        found = engine.generate(PROMPTS, params)
        plain = engine.generate(PROMPTS, params, drafter="none")
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    with opened(bundle, 2) as engine:
        (unmeasured,) = engine.generate(PROMPTS[:1], params, drafter="none")
        assert unmeasured.token_ids == plain[0].token_ids


def test_verify_looks_further_than_drafts_may_wait(bundle: Path) -> None:
    """Its outcomes have three tokens; of a bundle with K = 1, two may wait beside a state."""
    entry = load_manifest(bundle).models["target"]
    prompt, paths = make_prompts(1)[3], [(), (7, 8, 9), (7,), (7, 8, 9, 10), (3, 4)]
    found = []
    for lookahead in (1, 8):
        sizes = {"num_rows": 1, "kv_capacity": 64, "num_threads": 1, "lookahead": lookahead}
        tree = LogitTree(OrtExecutor(bundle / entry.engine.path, entry, **sizes), prompt)
        found.append(np.stack([tree(path) for path in paths]))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("number", "state", "words"),
    [
        (0, StateGeometry((3, 161), 160), "state.0 has the sizes [1, 3, 160] (tensor(float)), and the manifest says"),
        (1, StateGeometry((8, 8, 16), 7), "pending.1 has the sizes [1, "),
        (1, None, "inputs differ from the manifest's: pending.1, state.1"),
    ],
)
def test_a_manifest_whose_states_are_not_the_engines_is_refused(bundle, tmp_path, number, state, words):
    manifest = load_manifest(bundle)
    entry = manifest.models["target"]
    states = list(entry.states)
    states[number : number + 1] = [] if state is None else [state]
    copied = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    models = {**manifest.models, "target": replace(entry, states=tuple(states))}
    replace(manifest, models=models).write(copied)
    result = CliRunner().invoke(runtime_cli, ["generate", str(copied), "abc"])
    assert result.exit_code == IncompatibleError.exit_code
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert " Fix: build it again" in result.stderr


def test_what_a_state_cannot_do_is_refused(bundle: Path, tmp_path: Path) -> None:
    target = save_checkpoint(make_model(*HYBRIDS["lfm2"]), tmp_path / "target")
    recipe = BuildRecipe(target=str(target), output=str(tmp_path / "bundle"), backend="ort-cuda", self_draft=True)
    with pytest.raises(UnsupportedModelError, match="ort-cuda has no layers that keep a state") as caught:
        build_bundle(recipe)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "bundle").exists()


def test_trees_for_a_target_with_states_are_refused_in_a_line(bundle: Path) -> None:
    from specexport.cli import main

    for args, words in (
        (["generate", "x", "--tree-size", "8"], "this target cannot verify trees"),
        (["bench", "--tree-size", "0,8"], "the target of the bundle cannot verify them"),
    ):
        result = CliRunner().invoke(main, [args[0], str(bundle), *args[1:]])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert words in result.stderr
        assert "a target without recurrences" in result.stderr
    assert "chains, no trees" in CliRunner().invoke(main, ["inspect", str(bundle)]).stdout


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_step_that_is_debugged_is_one_of_the_engines_own_decode(bundle: Path, role: str) -> None:
    from specexport.debug.capture import capture_step

    opened = load_bundle(bundle, max_num_seqs=1)
    prompt = opened.tokenizer.encode(PROMPTS[2]).ids
    step = capture_step(opened, role, prompt, "verify", after=3)
    likeliest = step.logits.argmax(axis=1).tolist()
    assert likeliest[:-1] == list(step.tokens[1:]), "drafts are what greedy decoding goes on with"
    assert step.feeds["state_steps"].tolist() == [[0, 0, 1, len(step.tokens) - 1]]
    assert capture_step(opened, role, prompt, "decode", after=4).logits.argmax() == likeliest[1]


def test_a_graph_that_models_with_states_do_not_have_is_refused(bundle: Path) -> None:
    from specexport.cli import main

    result = CliRunner().invoke(main, ["debug", str(bundle), "abc", "--graph", "padded", "-q"])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert "this model has no padded graph. Fix: a model that keeps states has none" in line
