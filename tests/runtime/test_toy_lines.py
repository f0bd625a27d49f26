"""What one more of a kind takes: a file or a line of a copy of the sources, run in another process.

A field of a manifest that counts in a release also raises ``manifest.SCHEMA_VERSION``: without it, one is refused.
"""

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
DRAFTING = """
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
OPTION = """
import json
from click.testing import CliRunner
from specexport_runtime.cli.command import generate
from specexport_runtime.cli.serve import serve
from specexport_runtime.engine_options import EngineOptions, make_options
from specexport_runtime.errors import InvalidRequestError
found = {"changed": make_options(None, {"toy": 3}).toy, "documented": "toy: A toy." in EngineOptions.__doc__}
for command in (generate, serve):
    found[command.name] = "--toy" in CliRunner().invoke(command, ["--help"]).output
try:
    EngineOptions(toy=9)
except InvalidRequestError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""
FIELD = """
import json, sys
from pathlib import Path
from specexport_runtime.bundle.manifest import _digest, load_manifest
from specexport_runtime.errors import SpecexportError
path = Path(sys.argv[1]) / "manifest.json"
data = json.loads(path.read_text())
found = {}
for given in (None, "new", 5):
    for entry in data["models"].values():
        entry["source"] = entry["source"] | ({} if given is None else {"toy": given})
    data["manifest_sha256"] = _digest(data)
    path.write_text(json.dumps(data))
    try:
        manifest = load_manifest(path.parent)
        again = manifest.to_json()["models"]["target"]["source"]["toy"]
        found[str(given)] = [manifest.models["target"].source.toy, again]
    except SpecexportError as error:
        found[str(given)] = str(error)
print(json.dumps(found))
"""
RULE = """
import numpy as np

from specexport_runtime.sampling.cut import Cut


def _keep(values, value, temperature, peak):
    return np.flatnonzero(values >= np.float32(peak - value))


GAP = Cut(_keep, off=1000.0, low=0.0, high=1000.0, help="Largest distance from the top logit.")
"""
RULING = """
import json, sys
import numpy as np
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler
from specexport_runtime.errors import InvalidRequestError

logits = np.array([1.0, 3.0, 2.5, -4.0, 2.9], np.float32)
found = {}
for gap in (1000.0, 0.6, 0.2, 0.0):
    each = Sampler(SamplingParams(temperature=1.0, gap=gap), [1], 5).distribution(logits)
    found[str(gap)] = [token for token in range(5) if each.probability(token) > 0]
try:
    SamplingParams(gap=-1.0)
except InvalidRequestError as error:
    found["refused"] = str(error)
from click.testing import CliRunner
from specexport_runtime.cli.command import runtime_cli as main
found["help"] = CliRunner().invoke(main, ["generate", "--help"]).output
from specexport_runtime.server.protocol import CompletionRequest
from specexport_runtime.server.translate import _read_sampling
found["served"] = _read_sampling(CompletionRequest(prompt="x", gap=0.5))["gap"]
print(json.dumps(found))
"""


def test_a_file_and_a_line_are_a_drafter_everywhere(tmp_path: Path, demo_bundle: Path) -> None:
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
    found = run_with(package, DRAFTING, demo_bundle)
    assert found["drafted None"] <= 2, "its own K is the default"
    assert 2 < found["drafted 4"] <= 4
    assert found["chained"] == ["lookup", "repeat", "draft-model"], "the free ones come first"
    drafters = {"draft model", "lookup", "self", "suffix", "repeat", "chained", "scripted"}
    assert set(found["verified"]) == drafters | {"draft model, trees of 24"}
    assert (found["benched"], found["config"], found["served"], found["generated"]) == (True, "repeat", "repeat", 0)


def test_an_engine_option_is_one_line(tmp_path: Path) -> None:
    package = copy_runtime(tmp_path)
    first = "    max_num_seqs: int | None = _option(\n"
    line = '    toy: int = _option(1, "A toy.", use=Use.ANY, check=_make_range_check(0, 4))\n'
    edit(package / "engine_options.py", {first: line + first})
    assert changed_lines(tmp_path) == {"specexport_runtime/engine_options.py": 1}
    found = run_with(package, OPTION)
    refused = found.pop("refused")
    assert found == {"changed": 3, "documented": True, "generate": True, "serve": True}
    assert refused.startswith("toy is 9.")


def test_a_field_of_the_manifest_is_one_line(tmp_path: Path, demo_bundle: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_bytes((demo_bundle / "manifest.json").read_bytes())
    package = copy_runtime(tmp_path / "sources")
    last = "    architecture: str  # model class name\n"
    edit(package / "bundle" / "entry.py", {last: last + "    toy: str\n"})
    assert changed_lines(tmp_path / "sources") == {"specexport_runtime/bundle/entry.py": 1}
    found = run_with(package, FIELD, bundle)
    assert found["new"] == ["new", "new"], "read, and written again"
    assert "toy" in found["None"], "a manifest without it is of an earlier schema"
    assert "source.toy is 5, not a text" in found["5"]


@pytest.mark.whole
def test_a_file_and_a_field_are_a_sampling_rule_that_is_applied_checked_offered_and_served(tmp_path: Path) -> None:
    package = copy_runtime(tmp_path)
    (package / "sampling" / "gap.py").write_text(RULE)  # one file added
    edit(  # one file edited
        package / "sampling" / "params.py",
        {
            "import MIN_P\n": "import MIN_P\nfrom specexport_runtime.sampling.gap import GAP\n",
            "cut_field(MIN_P)\n": "cut_field(MIN_P)\n    gap: float = cut_field(GAP)\n",
        },
    )
    assert changed_lines(tmp_path) == {
        "specexport_runtime/sampling/gap.py": 0,
        "specexport_runtime/sampling/params.py": 2,  # its import too
    }
    found = run_with(package, RULING)
    assert found["1000.0"] == [0, 1, 2, 3, 4]
    assert (found["0.6"], found["0.2"], found["0.0"]) == ([1, 2, 4], [1, 4], [1])
    assert "gap is -1" in found["refused"]
    assert "1000 turns it off" in found["refused"]
    assert "--gap" in found["help"]
    assert "Largest distance from the top logit." in found["help"]
    assert found["served"] == 0.5
