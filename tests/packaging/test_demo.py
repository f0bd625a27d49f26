import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from specexport import demo
from specexport_runtime.errors import UserInputError

COMMAND = Path(sys.executable).with_name("specexport")


class StubEngine:
    """Answers after one unit of time plain and half of one speculatively; can be told to get a token wrong."""

    def __init__(self, wrong_at: int | None = None) -> None:
        self.wrong_at = wrong_at
        self.calls: list[bool] = []

    def generate(self, prompt, params, *, num_speculative_tokens=0, speculation=True):
        self.calls.append(speculation)
        tokens = [ord(c) for c in prompt]
        if speculation and self.wrong_at is not None and len(tokens) > self.wrong_at:
            tokens[self.wrong_at] += 1
        stats = SimpleNamespace(
            drafted=4 * speculation, accepted=3 * speculation, draft_rounds=int(speculation),
            start_time=10.0, end_time=10.5 if speculation else 11.0,
        )  # fmt: skip
        return [SimpleNamespace(token_ids=tokens, stats=stats)]


def measured(engine: StubEngine, repeats: int = 3) -> demo.Measurement:
    return demo.measure(engine, ["abcd", "efghij"], lookahead=4, max_tokens=8, repeats=repeats)  # type: ignore[arg-type]


def test_rates_are_all_tokens_over_all_time_and_both_ways_take_turns() -> None:
    engine = StubEngine()
    result = measured(engine, repeats=2)
    assert engine.calls == [False, True, False, True, True, False, True, False]
    assert result.num_tokens == 10
    assert (result.plain_tokens_per_second, result.speculative_tokens_per_second) == pytest.approx((5.0, 10.0))
    assert (result.speedup, result.acceptance_rate, result.mean_accepted_length) == pytest.approx((2.0, 0.75, 4.0))


@pytest.mark.parametrize(("wrong_at", "difference"), [(None, None), (5, demo.Difference(prompt=1, position=5))])
def test_a_difference_is_reported_with_its_place(wrong_at: int | None, difference: demo.Difference | None) -> None:
    result = measured(StubEngine(wrong_at))
    assert (result.identical, result.difference) == (difference is None, difference)
    assert f"identical to plain greedy   {'no' if difference else 'yes'}" in demo.format_measurement(result)


def test_without_the_examples_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages" / "specexport" / "demo.py"))
    with pytest.raises(UserInputError, match="make demo"):
        demo.find_demo_pair()


@pytest.mark.whole
@pytest.mark.slow
def test_the_command_measures_a_real_bundle(demo_bundle: Path, tmp_path: Path) -> None:
    # `demo_bundle` has put the draft's engine into the session's cache; the target's is one that cannot draft itself.
    arguments = ["--output", str(tmp_path / "bundle"), "--repeats", "1", "--max-tokens", "8", "--json"]
    result = subprocess.run([COMMAND, "demo", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    numbers = json.loads(result.stdout)
    assert numbers["identical"] is True
    assert numbers["num_tokens"] == 8 * numbers["num_prompts"] == 64
    assert 0 < numbers["acceptance_rate"] <= 1
    assert 1 < numbers["mean_accepted_length"] <= 5
