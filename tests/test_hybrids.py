"""Models whose layers keep a state: their engines against eager transformers, and their texts with drafts."""

from contextlib import closing
from pathlib import Path
from typing import Any

import chance
import numpy as np
import pytest
from click.testing import CliRunner

from specexport.frontend import reference_logits
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import ModelEntry
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.engine_harness import Recipe, make_checkpoint
from tests.tiny_models import HYBRIDS, VOCAB, make_model, save_checkpoint
from tests.tiny_traces import trace_of

LOOKAHEAD = 6
TOLERANCE = 1e-4
"""Of the largest logit."""


def open_engine(model: Any, folder: Path, rows: int) -> OrtExecutor:
    """The built engine of a model."""
    from specexport.backends.ort import write_onnx
    from specexport.lowering.ort_cpu import lower_ort_cpu
    from specexport.lowering.step_inputs import step_inputs
    from specexport.passes import default_passes, run_passes
    from specexport.passes.residual_blocks import find_residual_blocks

    traced = trace_of(model)
    run_passes(traced.ir_model, default_passes(Recipe()))
    assert find_residual_blocks(traced.ir_model).obstacle is None, "it could draft with its own layers"
    lower_ort_cpu(traced.ir_model)
    path = write_onnx(traced.ir_model, folder)
    entry = ModelEntry(
        path=path,
        backend="ort-cpu",
        architecture="",
        dtype="float32",
        vocab_size=VOCAB,
        layers=traced.layers,
        states=traced.states,
        inputs=step_inputs(traced.ir_model),
        num_parameters=1,
        max_positions=256,
        source="",
        source_sha256="",
    )
    return OrtExecutor(folder / path, entry, num_rows=rows, kv_capacity=64, num_threads=1, lookahead=LOOKAHEAD)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", HYBRIDS)
def test_engine_logits_equal_eager_transformers_behind_rollbacks(name: str, tmp_path: Path) -> None:
    """Rounds as decoding makes them: prompts in odd chunks, drafts of which some are right, idle rows, row moves."""
    model = make_model(*HYBRIDS[name])
    random = np.random.default_rng(chance.seed(7))
    sequences = [random.integers(3, VOCAB, length).tolist() for length in (33, 40, 36)]
    expected = reference_logits(make_checkpoint(model), sequences)
    assert min(float(logits.std()) for logits in expected) > 0.1, "degenerate logits would hide an error"

    limit = TOLERANCE * max(float(np.abs(logits).max()) for logits in expected)
    runner = ModelRunner(open_engine(model, tmp_path, 4))
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
            wrong = random.integers(3, VOCAB, drafts - good).tolist()
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
    if name == "bamba":  # the last round of a row that was moved, behind drafts that were accepted
        start = runner.kv.state_len(1)
        runner.move_row(1, 3)
        assert (runner.kv.state_len(3), runner.kv.kv_len(1)) == (start, 0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid target in int8 with a hybrid draft."""
    from specexport.build.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    folder = tmp_path_factory.mktemp("hybrid")
    target = save_checkpoint(make_model(*HYBRIDS["bamba"]), folder / "target")
    draft = save_checkpoint(make_model(*HYBRIDS["lfm2"]), folder / "draft")
    output = folder / "bundle"
    recipe = BuildRecipe(target=str(target), draft=str(draft), output=str(output), quantize="int8", max_model_len=128)
    build_bundle(recipe)
    return output


PROMPTS = ["abcabcabcabcabc", "x", "for i in range(10):\n    print(i)\nfor i in range(10):\n"]


@pytest.mark.parametrize("drafter", ["draft-model", "lookup", "suffix"])
@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_texts_are_those_of_plain_decoding(bundle: Path, drafter: str, lookahead: int) -> None:
    with closing(SpecEngine.load(bundle, max_num_seqs=2, num_threads=1, spin=False, adaptive=False)) as engine:
        engine._loop._check = True
        params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
        plain = engine.generate(PROMPTS, params, drafter="none")
        found = engine.generate(PROMPTS, params, drafter=drafter, num_speculative_tokens=lookahead)
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        assert [result.logprobs for result in found] == [result.logprobs for result in plain]
        assert sum(result.stats.drafted for result in found) > 0
        engine.check()


def test_a_state_is_gone_on_from_where_a_text_continues_and_nowhere_else(bundle: Path) -> None:
    with closing(SpecEngine.load(bundle, max_num_seqs=2, num_threads=1, spin=False, adaptive=False)) as engine:
        engine._loop._check = True
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
        engine.check()


def test_a_pinned_prefix_is_gone_on_from(bundle: Path) -> None:
    with closing(
        SpecEngine.load(bundle, max_num_seqs=2, prefix_rows=1, num_threads=1, spin=False, adaptive=False)
    ) as engine:
        engine._loop._check = True
        start = engine.encode("a system prompt that stays")
        assert engine.pin_prefix(start) == len(start)
        for text in ("one", "another"):
            prompt = [*start, *engine.encode(text)]
            (found,) = engine.generate([prompt], SamplingParams(max_tokens=8), num_speculative_tokens=3)
            (wanted,) = engine.generate([prompt], SamplingParams(max_tokens=8), drafter="none", remember=False)
            assert found.stats.cached_tokens == len(start)
            assert found.token_ids == wanted.token_ids
        engine.check()


def test_measuring_steps_leaves_nothing_in_a_state(bundle: Path) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with closing(SpecEngine.load(bundle, max_num_seqs=2, num_threads=1, spin=False, adaptive=True)) as engine:
        engine._loop._check = True
        found = engine.generate(PROMPTS, params)
        plain = engine.generate(PROMPTS, params, drafter="none")
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        engine.check()
    with closing(SpecEngine.load(bundle, max_num_seqs=2, num_threads=1, spin=False, adaptive=False)) as engine:
        (unmeasured,) = engine.generate(PROMPTS[:1], params, drafter="none")
        assert unmeasured.token_ids == plain[0].token_ids


def test_what_a_state_cannot_do_is_refused(bundle: Path, tmp_path: Path) -> None:
    from specexport.build.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    target = save_checkpoint(make_model(*HYBRIDS["lfm2"]), tmp_path / "target")
    recipe = BuildRecipe(target=str(target), output=str(tmp_path / "bundle"), backend="ort-cuda", self_draft=True)
    with pytest.raises(UnsupportedModelError, match="ort-cuda has no layers that keep a state") as caught:
        build_bundle(recipe)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "bundle").exists()


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
