"""A drafter takes a file and a line of the registry: a copy of the sources with both, run in another process."""

from pathlib import Path

import pytest

from tests.support.cases.edited_copy import changed_lines, copy_runtime, edit, run_with

DRAFTER = """
from specexport_runtime.drafters.base import Drafter, DrafterKind, DrafterTraits
from specexport_runtime.requests.records import Proposal


class RepeatDrafter(Drafter):
    traits = DrafterTraits(default_lookahead=2, is_free=True)

    def propose(self, sequences, lookaheads):
        return [Proposal([seq.tokens[-1]] * limit) for seq, limit in zip(sequences, lookaheads, strict=True)]


KIND = DrafterKind(RepeatDrafter.traits, lambda parts: RepeatDrafter(), lambda offer: None, method="repeat")
"""
PROGRAM = """
import json, sys
from click.testing import CliRunner
from specexport.bench.methods import DRAFTERS
from specexport.verify.greedy import check_greedy
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.intake.speculative_config import parse_speculative_config
from specexport_runtime.server.protocol import CompletionRequest

bundle = sys.argv[1]
found = {"benched": "repeat" in DRAFTERS}
engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False)
prompts, params = [[5, 6, 7, 7, 7, 7], [9, 8]], SamplingParams(max_tokens=24, ignore_eos=True)
plain = engine.generate(prompts, params, drafter="none")
for lookahead in (None, 1, 4):
    texts = engine.generate(prompts, params, drafter="repeat", num_speculative_tokens=lookahead)
    assert [text.token_ids for text in texts] == [text.token_ids for text in plain], lookahead
    found[f"drafted {lookahead}"] = max(text.stats.drafted / max(text.stats.draft_rounds, 1) for text in texts)
chained = engine.resolve_drafting(drafter="chained")
found["chained"] = [stage.drafter for stage in chained.stages]
result = check_greedy(engine, prompts, max_tokens=8)
found["verified"] = [run.drafter for run in result.runs]
assert result.passed
engine.close()
found["config"] = parse_speculative_config(
    {"method": "repeat", "num_speculative_tokens": 2}, sources={}, built=4
).drafter
found["served"] = CompletionRequest(prompt="x", speculative={"drafter": "repeat"}).speculative.drafter
asked = ["generate", bundle, "def area(", "--drafter", "repeat", "--max-tokens", "8", "--json"]
answer = CliRunner().invoke(runtime_cli, asked)
found["generated"] = answer.exit_code
print(json.dumps(found))
"""


@pytest.fixture
def found(tmp_path: Path, demo_bundle: Path) -> dict:
    package = copy_runtime(tmp_path)
    (package / "drafters" / "repeat.py").write_text(DRAFTER)  # one file added
    edit(  # one file edited
        package / "drafters" / "registry.py",
        {
            "model_kind, self_draft": "model_kind, repeat, self_draft",
            '"self": self_draft.KIND,\n': '"self": self_draft.KIND,\n    "repeat": repeat.KIND,\n',
        },
    )
    assert changed_lines(tmp_path) == {
        "specexport_runtime/drafters/repeat.py": 0,
        "specexport_runtime/drafters/registry.py": 1,
    }
    return run_with(package, PROGRAM, demo_bundle)


def test_a_file_and_a_line_are_a_drafter_everywhere(found: dict) -> None:
    assert found["drafted None"] <= 2, "its own K is the default"
    assert 2 < found["drafted 4"] <= 4
    assert found["chained"] == ["lookup", "repeat", "draft-model"], "the free ones come first"
    drafters = {"draft model", "lookup", "self", "suffix", "repeat", "chained", "scripted"}
    assert set(found["verified"]) == drafters | {"draft model, trees of 24"}
    assert (found["benched"], found["config"], found["served"], found["generated"]) == (True, "repeat", "repeat", 0)
