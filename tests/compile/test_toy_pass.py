"""A pass is one file, and one file of the list that names it."""

from pathlib import Path

import pytest

from tests.support.cases.edited_copy import changed_lines, copy_sources, edit, run_with
from tests.support.models.pairs import TinyPair

PASS = """
from specexport.passes.base import CountingPass

class ToyPass(CountingPass):
    name, reason = "toy", "to count nodes"

    def rewrite(self, model):
        return len(list(model.graph))
"""
PROGRAM = """
import json, sys
from pathlib import Path
from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.manifest import load_manifest
target, output = sys.argv[1:]
build_bundle(BuildRecipe(target=target, output=output), use_cache=False)
print(json.dumps({"passes": load_manifest(Path(output)).models["target"].passes}))
"""


@pytest.mark.whole
@pytest.mark.bundle
def test_a_pass_is_a_file_and_its_place_in_the_list(tmp_path: Path, tiny_pair: TinyPair) -> None:
    runtime = copy_sources(tmp_path / "sources")
    passes = runtime.parent / "specexport" / "passes"
    (passes / "toy.py").write_text(PASS)
    before, last = "from specexport.passes.transpose_fold import", "        NodeDeduplicatePass(),\n"
    edit(
        passes / "pipeline.py",
        {before: "from specexport.passes.toy import ToyPass\n" + before, last: "        ToyPass(),\n" + last},
    )
    assert changed_lines(runtime.parent) == {"specexport/passes/toy.py": 0, "specexport/passes/pipeline.py": 2}
    found = dict(run_with(runtime, PROGRAM, tiny_pair.target, tmp_path / "bundle")["passes"])
    assert found["toy"] > 10
