"""A sampling rule takes a file and a field: a copy of the sources with both, run in another process."""

from pathlib import Path

import pytest

from tests.support.cases.edited_copy import changed_lines, copy_runtime, edit, run_with

RULE = """
import numpy as np

from specexport_runtime.sampling.cut import Cut


def _keep(values, value, temperature, peak):
    return np.flatnonzero(values >= np.float32(peak - value))


GAP = Cut(_keep, off=1000.0, low=0.0, high=1000.0, help="Largest distance from the top logit.")
"""
PROGRAM = """
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
from specexport_runtime.server.translate import _sampling
found["served"] = _sampling(CompletionRequest(prompt="x", gap=0.5))["gap"]
print(json.dumps(found))
"""


@pytest.fixture
def found(tmp_path: Path) -> dict:
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
    return run_with(package, PROGRAM)


@pytest.mark.whole
def test_a_rule_is_applied_checked_offered_and_served(found: dict) -> None:
    assert found["1000.0"] == [0, 1, 2, 3, 4]
    assert (found["0.6"], found["0.2"], found["0.0"]) == ([1, 2, 4], [1, 4], [1])
    assert "gap is -1" in found["refused"]
    assert "1000 turns it off" in found["refused"]
    assert "--gap" in found["help"]
    assert "Largest distance from the top logit." in found["help"]
    assert found["served"] == 0.5
