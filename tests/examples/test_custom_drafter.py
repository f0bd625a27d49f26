"""The example drafter: it drafts, it is accepted, the text stays the target's own, and bad ones are refused."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from specexport_runtime import SamplingParams
from specexport_runtime.costs.curves import CostCurves, StepCost
from specexport_runtime.drafters.base import Drafter, DrafterParts, DrafterTraits
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from tests.support.fakes.engine_of import engine_of

SCRIPT = Path(__file__).parents[2] / "examples" / "custom_drafter" / "bigrams.py"
VOCAB = 17
CURVES = CostCurves(StepCost(0.96, 0.01, row=0.03))


@pytest.fixture(scope="module")
def drafter_class() -> type:
    return runpy.run_path(str(SCRIPT))["BigramDrafter"]


def make_engine(factory, *, context=6, curves=None, name="mine", **options):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    target = FakeExecutor(VOCAB, 4, 160, context=context, **options)
    return engine_of(target, tokenizer, max_model_len=128, drafters={name: factory}, cost_curves=curves)


def generate(engine, drafter, **options):
    params = [SamplingParams(max_tokens=60, temperature=t, seed=5) for t in (0.0, 0.7, 1.0)]
    return engine.generate([[1, 2, 3], [4], [5, 6]], params, drafter=drafter, **options)


def test_the_text_is_the_targets_own_and_drafts_are_accepted(drafter_class: type) -> None:
    # A target that looks at one token only: pairs foretell its greedy text.
    engine = make_engine(lambda parts: drafter_class(), context=1)
    drafted, plain = generate(engine, "mine"), generate(engine, "none")
    assert drafted[0].token_ids == plain[0].token_ids
    assert drafted[0].stats.acceptance_rate > 0.8, "the pairs of a greedy text foretell it"
    assert drafted[0].stats.rounds < plain[0].stats.rounds / 2
    assert all(result.stats.drafted for result in drafted), "sampled texts are drafted for too"
    engine.close()


def test_sampled_text_keeps_the_targets_distribution(drafter_class: type) -> None:
    engine = make_engine(lambda parts: drafter_class(), context=1)
    params = [SamplingParams(max_tokens=3, temperature=1.0, seed=seed) for seed in range(3000)]
    counts = np.zeros(VOCAB)
    for result in engine.generate([[3, 1, 3, 1]] * len(params), params, drafter="mine"):
        counts[result.token_ids[1]] += 1
    # The second token follows the first one's distribution: the chain of two steps, computed.
    logits = np.array([engine.target.logits_after([token]) for token in range(VOCAB)], np.float64)
    steps = np.exp(logits - logits.max(axis=1, keepdims=True))
    steps /= steps.sum(axis=1, keepdims=True)
    expected = (steps @ steps)[1]
    assert np.abs(counts / counts.sum() - expected).sum() / 2 < 0.05
    engine.close()


def test_k_is_chosen_for_a_free_drafter(drafter_class: type) -> None:
    engine = make_engine(lambda parts: drafter_class(), context=1, curves=CURVES)
    result = generate(engine, "mine", num_speculative_tokens="auto")[0]
    assert result.stats.acceptance_rate > 0.8
    assert max(result.stats.accepted_histogram) > 4, "more than its default K"
    engine.close()


def test_k_cannot_be_chosen_for_a_drafter_of_unknown_cost(drafter_class: type) -> None:
    class Slow(drafter_class):
        traits = DrafterTraits(default_lookahead=4)

    engine = make_engine(lambda parts: Slow(), curves=CURVES)
    with pytest.raises(InvalidRequestError, match="what a step of drafter 'mine' costs is not known"):
        generate(engine, "mine", num_speculative_tokens="auto")
    assert generate(engine, "mine", num_speculative_tokens=2)[0].stats.drafted
    engine.close()


def test_names_and_drafters_that_cannot_be_taken(drafter_class: type) -> None:
    for name in ("lookup", "chained", "none"):
        with pytest.raises(InvalidRequestError, match=f"name '{name}' is there already"):
            make_engine(lambda parts: drafter_class(), name=name)
    with pytest.raises(InvalidRequestError, match="'mine/reading' has a slash"):
        make_engine(lambda parts: drafter_class(), name="mine/reading")
    with pytest.raises(InvalidRequestError, match="drafter 'mine' made a dict, which is no Drafter") as caught:
        make_engine(lambda parts: {})
    assert "inherit from `specexport_runtime.drafters.base.Drafter`" in str(caught.value)
    for given, lacking in (("traits", "propose"), ("propose", "traits")):
        own = type("Own", (Drafter,), {given: getattr(drafter_class, given)})
        with pytest.raises(TypeError, match=f"abstract class Own with.* {lacking}|abstract class Own .*'{lacking}'"):
            make_engine(lambda parts, own=own: own())
    seen: list[DrafterParts] = []
    engine = make_engine(lambda parts: (seen.append(parts), drafter_class())[1])
    assert seen[0].target.executor is engine.target
    assert (seen[0].draft, seen[0].vocab_size) == (None, VOCAB)
    with pytest.raises(InvalidRequestError, match="no drafter 'mime'") as caught:
        generate(engine, "mime")
    assert "did you mean 'mine'" in str(caught.value)
    engine.close()


def test_the_script_runs(demo_bundle: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(demo_bundle), "def area(width, height):"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["bigrams", "none"]
    assert "accepted 0 of 0" in lines[1]
    assert "accepted 0 of" not in lines[0]
