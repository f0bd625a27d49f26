"""Int4 weights for ort-cuda: what a build writes, and how well such a draft drafts."""

from pathlib import Path

import pytest

from specexport.compile.pipeline import build_bundle
from specexport.inspect import describe
from specexport.recipe import BuildRecipe
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.quant_kinds import INT4
from tests.support.cases.refusals import RunCli
from tests.support.models.pairs import TinyPair

PROMPTS = ["def add(a, b):\n", "class Queue:\n    def __init__(self):\n"]


@pytest.mark.whole
def test_a_bundle_says_what_was_quantized(tmp_path: Path, tiny_pair: TinyPair, run_cli: RunCli) -> None:
    build_bundle(tiny_pair.recipe(tmp_path / "one", backend="ort-cuda", quantize="int4"))
    manifest = load_manifest(tmp_path / "one")
    target, draft = manifest.models["target"], manifest.models["draft"]
    assert (target.quantize, draft.quantize, draft.engine.packed_bytes) == ("int4", None, None)
    assert dict(target.passes)["int4-fused"] == 9, "joined layers count once"
    assert target.engine.packed_bytes is not None
    stored, before = target.engine.packed_bytes
    # 4 bits and a 16-bit scale for 32 of them, of 16 bits.
    assert stored == pytest.approx(before * 4.5 / 16)
    (line,) = [line for line in describe(manifest) if "quantized:" in line]
    assert line.endswith("in float16, 0.281 of it")
    assert run_cli("inspect", tmp_path / "one").exit_code == 0
    other = build_bundle(tiny_pair.recipe(tmp_path / "two", backend="ort-cuda", quantize="int4", draft_quantize="int4"))
    assert other.reused == ("target",), "the draft is quantized apart"
    recipe = tiny_pair.recipe(
        tmp_path / "three", backend="ort-cuda", quantize="int4", quantize_lm_head=False, draft=None, self_draft=True
    )
    again = build_bundle(recipe)
    assert again.reused == (), "an LM head that stays is another engine"
    gated = again.manifest.models["target"]
    assert dict(gated.passes)["int4-fused"] == 8
    assert gated.engine.gates.kinds
    assert gated.engine.packed_bytes is not None
    assert 0 < gated.engine.packed_bytes[0] < stored, "layers that can be switched off are counted too"


@pytest.mark.whole
@pytest.mark.slow
def test_an_int4_draft_is_accepted_nearly_as_often(
    tmp_path: Path, demo_pair: Path, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes of ort-cuda in float32 on a CPU, which has the same operator: what a draft loses by them."""
    monkeypatch.setitem(INT4.backends, "ort-cpu", INT4.backends["ort-cuda"])
    pair = {role: str(demo_pair / role) for role in ("target", "draft")}
    recipe = BuildRecipe(**pair, output=str(tmp_path / "int4"), draft_quantize="int4")
    made = build_bundle(recipe, use_cache=False)  # the key of an engine does not tell patched backends apart
    assert dict(made.manifest.models["draft"].passes)["int4-fused"] > 0
    rates, texts = [], []
    for folder in (demo_bundle, made.path):
        engine = SpecEngine.load(folder, max_num_seqs=2, num_threads=1, spin=False)
        results = engine.generate(PROMPTS, SamplingParams(max_tokens=64, ignore_eos=True), drafter="draft-model")
        engine.close()
        rates.append(sum(r.stats.accepted for r in results) / sum(r.stats.drafted for r in results))
        texts.append([list(result.token_ids) for result in results])
    assert texts[0] == texts[1], "the target decides"
    assert rates[1] > 0.8 * rates[0] > 0.2
