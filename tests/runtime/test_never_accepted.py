"""A drafter of which nothing is ever accepted: said once, and only if it is so."""

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from specexport_runtime import SpecEngine
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.requests.records import Proposal
from specexport_runtime.requests.request import RoundEvent
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.telemetry.never_accepted import NeverAccepted
from specexport_runtime.telemetry.observers import RoundRecord
from tests.support.fakes.engine import make_engine
from tests.support.fakes.loop import finish, make_decoder, make_draft, make_sequence, make_target


def step_of(drafter: str, drafted: int, accepted: int = 0) -> RoundRecord:
    proposal = Proposal([1] * drafted, drafter=drafter)
    event = RoundEvent(None, [1] * (accepted + 1), drafted, accepted, False, proposal)  # type: ignore[arg-type]
    return RoundRecord([event], 0, 0.01)


def watch(records: list[RoundRecord]) -> list[str]:
    said: list[str] = []
    watcher = NeverAccepted(said.append)
    for record in records:
        watcher.on_round(record)
    return said


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([step_of("x", 4)] * 15, 0),  # 60 tokens
        ([step_of("x", 4)] * 16, 1),
        ([step_of("x", 8)] * 15, 0),  # enough tokens, too few drafts
        ([step_of("x", 1)] * 63, 0),
        ([step_of("x", 1)] * 64, 1),
        ([step_of("x", 4)] * 200, 1),
        ([step_of("x", 4)] * 10 + [step_of("y", 4)] * 10, 0),
        ([step_of("x", 4), step_of("y", 4)] * 100, 2),
        ([step_of("x", 4, 1)] + [step_of("x", 4)] * 200, 0),
        ([step_of("x", 4)] * 15 + [step_of("x", 4, 2)] + [step_of("x", 4)] * 200, 0),
        ([step_of("x", 0)] * 200, 0),
    ],
)
def test_when_it_is_said(records: list[RoundRecord], expected: int) -> None:
    said = watch(records)
    assert len(said) == expected
    assert all("none of its first 64" in line and "\n" not in line for line in said)


def test_a_draft_that_failed_was_not_tested() -> None:
    said: list[str] = []
    draft = make_draft("good")
    draft.logits_after = lambda tokens, mask=None: make_draft("good").logits_after(tokens) * float("nan")
    decoder = make_decoder(make_target(), draft, 4)
    decoder.observers.add(NeverAccepted(said.append))
    for i in range(40):
        decoder.add(make_sequence(i, [1], SamplingParams(max_tokens=5)))
    finish(decoder, [])
    assert said == []


@pytest.fixture
def generate(demo_bundle, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    def invoke(kind: str, *args: str) -> tuple[str, str]:
        engine = make_engine(kind)
        monkeypatch.setattr(SpecEngine, "load", lambda *_, **__: engine)
        result = CliRunner().invoke(runtime_cli, ["generate", str(demo_bundle), *args])
        assert result.exit_code == 0, result.output
        engine.close()
        return result.stdout, result.stderr

    return invoke


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_generate_says_it_behind_the_text(form: list[str], generate: Callable[..., tuple[str, str]]) -> None:
    options = ["w1 w2", "--max-tokens", "40", "--lookahead", "4", *form]
    text, notes = generate("adversarial", *options)
    [line] = notes.splitlines()
    assert line.startswith("warning: drafter draft-model: none of its first")
    assert "warning" not in text
    _, notes = generate("good", *options)
    assert notes == ""
    _, notes = generate("adversarial", "w1 w2", "--max-tokens", "40", *form, "--no-speculation")
    assert notes == ""
