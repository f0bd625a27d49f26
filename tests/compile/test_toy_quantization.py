"""A kind of quantization takes a file and a line, and so does a pass: a copy of the sources, run in another process."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cases.edited_copy import changed_lines, copy_sources, edit, run_with
from tests.support.models.pairs import TinyPair

PASSES = """
import ml_dtypes
import onnx_ir as ir

from specexport.passes.base import CountingPass
from specexport.passes.quantize_sites import find_sites


class ToyQuantizePass(CountingPass):
    name, reason = "toy-quantize", "a test"

    def __init__(self, given):
        self._given = given

    def rewrite(self, model):
        sites = find_sites(model, self._given.kind.name, lm_head=self._given.lm_head)
        for site in sites:
            values = site.tensor.numpy()
            rounded = values.astype(ml_dtypes.float8_e4m3fn).astype(values.dtype)
            site.weight.const_value = ir.tensor(rounded, name=site.weight.name)
        return len(sites)


def passes(given):
    return [ToyQuantizePass(given)]
"""
RECORD = """
        QuantKind("toy", INT8.limits, INT8.flops, {"ort-cpu": BackendPasses("specexport.passes.quantize_toy")}, bits=8),
"""
TOY_PASS = """
from specexport.passes.base import CountingPass

class ToyPass(CountingPass):
    name, reason = "toy", "to count nodes"

    def rewrite(self, model):
        return len(list(model.graph))
"""
PROGRAM = """
import json, sys
from pathlib import Path
from click.testing import CliRunner
from specexport.cli import main
from specexport.compile.fingerprint import ENGINE_ROOT, find_needed_sources
from specexport.compile.pipeline import build_bundle
from specexport.debug.run import _tolerance
from specexport.recipe import BuildRecipe
from specexport.verify.tolerance import text_limits
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.costs.prior import prior_costs
from specexport_runtime.errors import RecipeError

target, draft, out = sys.argv[1:]


def refusal(**values):
    try:
        BuildRecipe(target=target, output=out, **values)
    except RecipeError as error:
        return f"{error.message} {error.hint}"


built = build_bundle(BuildRecipe(target=target, draft=draft, output=out, quantize="toy", draft_quantize="none"))
entry = built.manifest.models["target"]
passes = dict(entry.passes)
found = {"changes": passes.get("toy-quantize"), "nodes": passes.get("toy"), "kind": entry.quantize}
engine = SpecEngine.load(out, num_threads=1, spin=False)
texts = [engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12), drafter=d) for d in ("draft-model", "none")]
found["lossless"] = texts[0][0].token_ids == texts[1][0].token_ids
engine.close()
shown = CliRunner().invoke(main, ["inspect", out])
found["inspect"] = "quantized: toy weights" in shown.output
found["help"] = "int8|int4|toy|none" in CliRunner().invoke(main, ["build", "--help"]).output
found["elsewhere"] = refusal(quantize="toy", backend="tensorrt")
found["unknown"] = refusal(quantize="int3")
found["limits"] = [*text_limits("toy", "float32", 2), _tolerance(entry)]
found["priced"] = prior_costs({"target": entry}, kernels="avx2").target.seconds(1, 1) > 0
found["key"] = "specexport.passes.quantize_toy" in find_needed_sources(ENGINE_ROOT)
print(json.dumps(found))
"""


@pytest.mark.whole
@pytest.mark.slow
def test_a_file_and_its_place_in_a_list_are_a_kind_everywhere_or_a_pass(tmp_path: Path, tiny_pair: TinyPair) -> None:
    copy = tmp_path / "sources"
    runtime = copy_sources(copy)
    (copy / "specexport" / "passes" / "quantize_toy.py").write_text(PASSES, encoding="utf-8")  # one file added
    last = "        KEPT,\n"
    edit(runtime / "bundle" / "quant_kinds.py", {last: last + RECORD[1:]})  # one line
    passes = copy / "specexport" / "passes"
    (passes / "toy.py").write_text(TOY_PASS, encoding="utf-8")
    before, last = "from specexport.passes.transpose_fold import", "        NodeDeduplicatePass(),\n"
    imported = "from specexport.passes.toy import ToyPass\n"
    edit(passes / "pipeline.py", {before: imported + before, last: "        ToyPass(),\n" + last})
    assert changed_lines(copy) == {
        "specexport/passes/quantize_toy.py": 0,
        "specexport_runtime/bundle/quant_kinds.py": 1,
        "specexport/passes/toy.py": 0,
        "specexport/passes/pipeline.py": 2,
    }
    found: dict[str, Any] = run_with(runtime, PROGRAM, tiny_pair.target, tiny_pair.draft, tmp_path / "bundle")
    assert found["changes"] == 9
    assert found["nodes"] > 10
    assert found["kind"] == "toy"
    assert all(found[each] for each in ("lossless", "inspect", "help", "priced", "key"))
    assert found["elsewhere"] == (
        "quantize is 'toy', and backend tensorrt has int4 only. build with `--backend ort-cpu`, or leave it out."
    )
    assert "use one of: int8, int4, keep, toy, none" in found["unknown"]
    assert found["limits"] == [0.05, 0.1, 0.1]
