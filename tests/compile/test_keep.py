"""Quantized GGUF files built as they are: close to the file's own values, lossless, refused where that cannot be."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from specexport.compile.pipeline import BuildResult, build_bundle
from specexport.inspect import describe
from specexport.passes.block_format import unpack
from specexport.recipe import BuildRecipe, resolve_parts
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import RecipeError
from tests.support.cases.refusals import RunCli
from tests.support.models.tiny_gguf import MIXED_EXPERTS, write_experts, write_gguf
from tests.support.models.tiny_models import GROUPED, make_model
from tests.support.references.drafted import check_text

PROMPTS = ["abc abc abc abc ab", "the cat sat on the mat, the cat sat on", "to be or not to be"]
WIDE = GROUPED | {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
BITS = {"Q8_0": 8.5, "Q4_1": 5, "Q2_K": 2.625, "IQ4_XS": 4.25}
"""Bits a weight of the kinds of forms: 8 and 4 bits, blocks of 32 and 16, with offsets and without."""
MIXED = {"ffn_down.weight": "Q6_K", "attn_v.weight": "Q6_K", "output.weight": "Q6_K", "": "Q4_K"}


def build(folder: Path, kinds: dict[str, str], **values: object) -> BuildResult:
    model = make_model("Qwen2", WIDE | {"tie_word_embeddings": bool(values.pop("tied", False))})
    write_gguf(model, folder / "tiny.gguf", kinds=kinds)
    return build_bundle(
        BuildRecipe(target=str(folder / "tiny.gguf"), output=str(folder / "out"), **values),  # type: ignore[arg-type]
        use_cache=False,
    )


def lost(result: BuildResult, role: str = "target") -> float:
    """What the check found that a model loses: int8 activations are all that it may be."""
    found = result.checks[role]
    assert found is not None
    assert found.lost is not None
    return found.lost


def operators(folder: Path, role: str = "target", op_type: str = "BlockLinear") -> list[onnx.NodeProto]:
    graph = onnx.load(folder / role / "model.onnx", load_external_data=False).graph
    return [node for node in graph.node if node.op_type == op_type]


@pytest.mark.one_of_kind
@pytest.mark.parametrize("kind", BITS)
def test_a_format_is_kept_without_being_asked_for(kind: str, tmp_path: Path) -> None:
    result = build(tmp_path, {"": kind})
    entry = result.manifest.models["target"]
    assert entry.quantize == "keep"
    ((name, count, size),) = entry.engine.weight_formats
    assert (name, 8 * size / count) == (kind, pytest.approx(BITS[kind]))
    assert lost(result) < 0.01
    # q, k and v are one product, so are gate and up: four a layer, and the LM head
    assert len(operators(tmp_path / "out")) == 2 * 4 + 1


@pytest.mark.one_of_kind
@pytest.mark.parametrize("tied", [False, True])
def test_a_mixture_stays_a_mixture(tied: bool, tmp_path: Path) -> None:
    result = build(tmp_path, MIXED, tied=tied)
    formats = [
        attribute.s.decode()
        for node in operators(tmp_path / "out")
        for attribute in node.attribute
        if attribute.name == "format"
    ]
    # q and k are joined, v has another format; a tied LM head is the embedding's Q4_K
    assert sorted(formats) == sorted(["q4_k", "q6_k", "q6_k", "q4_k", "q6_k"] * 2 + ["q4_k" if tied else "q6_k"])
    stored = (tmp_path / "tiny.gguf").stat().st_size
    assert result.files["target/model.onnx.data"].size < 1.2 * stored  # small weights begin at pages
    assert lost(result) < 0.01
    described = "\n".join(describe(result.manifest))
    assert "weights as the checkpoint has them: Q4_K " in described
    assert "(6.56 bits each, exact)" in described


EXPERTS_KEPT = [
    ("qwen3moe", MIXED_EXPERTS, {"q4_k", "q6_k"}),
    ("gpt-oss", {"_exps.weight": "MXFP4", "": "Q8_0"}, {"mxfp4"}),
]


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("architecture", "kinds", "formats"), EXPERTS_KEPT, ids=["qwen3moe", "gpt-oss"])
def test_experts_keep_their_formats(architecture, kinds, formats, tmp_path):
    model = write_experts(tmp_path / "tiny.gguf", architecture, kinds)
    result = build_bundle(BuildRecipe(str(tmp_path / "tiny.gguf"), str(tmp_path / "out")), use_cache=False)
    assert result.manifest.models["target"].quantize == "keep"
    assert lost(result) < 0.02
    graph = onnx.load(tmp_path / "out" / "target" / "model.onnx").graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "BlockExperts"]
    assert len(nodes) == 2
    for layer, node in enumerate(nodes):
        told = {
            attribute.name: attribute.s.decode() for attribute in node.attribute if attribute.name.endswith("format")
        }
        assert set(told.values()) == formats
        experts = model.model.layers[layer].mlp.experts
        for at, part, height in ((3, "gate_up", 512), (5, "down", 256)):
            packed = weights[node.input[at]].reshape(4, height // 16, -1)[3]
            wanted = getattr(experts, f"{part}_proj")[3].detach().numpy()
            values = unpack(told[f"{part}_format"], packed, height, 256)
            np.testing.assert_allclose(values, wanted.T if experts.is_transposed else wanted, atol=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize(("quantize", "most"), [("int8", 0.02), ("int4", 0.2)])
def test_experts_of_a_file_are_rounded_on_request(quantize: str, most: float, tmp_path: Path) -> None:
    write_experts(tmp_path / "tiny.gguf", "qwen3moe", MIXED_EXPERTS)
    recipe = BuildRecipe(str(tmp_path / "tiny.gguf"), str(tmp_path / "out"), quantize=quantize)
    result = build_bundle(recipe, use_cache=False)
    assert len(operators(tmp_path / "out", op_type="BlockExperts")) == 2
    assert lost(result) < most


def test_speculative_text_is_plain_text(tmp_path: Path) -> None:
    for role, kind in (("target", "Q4_K"), ("draft", "Q4_0")):
        write_gguf(make_model("Qwen2", WIDE), tmp_path / f"{role}.gguf", kinds={"": kind})
    recipe = BuildRecipe(str(tmp_path / "target.gguf"), str(tmp_path / "out"), draft=str(tmp_path / "draft.gguf"))
    result = build_bundle(replace(recipe, draft_vocab_size=200), use_cache=False)
    assert {role: entry.quantize for role, entry in result.manifest.models.items()} == {
        "target": "keep",
        "draft": "keep",
    }
    with closing(SpecEngine.load(tmp_path / "out", max_num_seqs=4, num_threads=1, spin=False)) as engine:
        for drafter in ("draft-model", "lookup"):
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            stats = check_text(engine, PROMPTS, params, range(1, 9), drafter)
            assert sum(each.drafted for some in stats for each in some) > 0


@pytest.mark.whole
def test_a_kept_draft_drafts_what_a_float_target_says(tmp_path: Path) -> None:
    write_gguf(make_model("Qwen2", WIDE), tmp_path / "one.gguf", kinds={"": "Q5_K"})
    one = str(tmp_path / "one.gguf")
    recipe = BuildRecipe(one, str(tmp_path / "out"), draft=one, quantize="none")
    models = build_bundle(recipe, use_cache=False).manifest.models
    assert {role: entry.quantize for role, entry in models.items()} == {"target": None, "draft": "keep"}
    with closing(SpecEngine.load(tmp_path / "out", max_num_seqs=4, num_threads=1, spin=False)) as engine:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        results = engine.generate(PROMPTS, params, drafter="draft-model", num_speculative_tokens=4)
    drafted, accepted = (sum(getattr(result.stats, name) for result in results) for name in ("drafted", "accepted"))
    assert drafted > 60
    assert accepted / drafted > 0.9


@pytest.mark.whole
def test_a_kept_draft_may_lose_layers(tmp_path: Path) -> None:
    model = make_model("Qwen2", WIDE | {"num_hidden_layers": 4})
    write_gguf(model, tmp_path / "four.gguf", kinds={"": "Q8_0"})
    four = str(tmp_path / "four.gguf")
    recipe = BuildRecipe(four, str(tmp_path / "out"), draft=four, draft_layers=2)
    result = build_bundle(recipe, use_cache=False)
    target, draft = (result.manifest.models[role] for role in ("target", "draft"))
    assert len(draft.dropped_layers) == 2
    assert lost(result, "draft") < 0.01
    assert draft.engine.weight_formats[0].weights < target.engine.weight_formats[0].weights


@pytest.mark.whole
def test_float_weights_on_request_and_in_float_files(tmp_path: Path) -> None:
    assert build(tmp_path, MIXED, quantize="none").manifest.models["target"].quantize is None
    other = tmp_path / "float"
    other.mkdir()
    assert build(other, {}).manifest.models["target"].quantize is None


@pytest.mark.one_of_kind
@pytest.mark.parametrize("tied", [False, True])
def test_the_lm_head_stays_float_on_request(tied: bool, tmp_path: Path) -> None:
    result = build(tmp_path, {"": "Q8_0"}, tied=tied, quantize_lm_head=False)
    assert dict(result.manifest.models["target"].passes)["weight-keep"] == 2 * 4
    graph = onnx.load(tmp_path / "out" / "target" / "model.onnx", load_external_data=False).graph
    assert not any("lm_head" in tensor.name and "codes" in tensor.name for tensor in graph.initializer)
    assert not any("embed" in tensor.name and "codes" in tensor.name for tensor in graph.initializer)


def test_what_has_no_home_is_refused(tmp_path: Path, run_cli: RunCli) -> None:
    import gguf

    path = tmp_path / "odd.gguf"
    write_gguf(make_model("Qwen2", WIDE), path, kinds={"": "Q8_0"})
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions, and two of them
    assert data[at] == gguf.GGMLQuantizationType.Q8_0
    data[at] = gguf.GGMLQuantizationType.TQ2_0
    path.write_bytes(data)
    result = run_cli("build", path, "-o", tmp_path / "out", "--no-cache")
    assert result.exit_code == 2
    error = result.stderr.splitlines()[-1]
    assert "TQ2_0" in error
    assert "--quantize int8" in error
    assert not (tmp_path / "out").exists()


def test_float_checkpoints_have_nothing_to_keep(tmp_path: Path) -> None:
    recipe = BuildRecipe(str(tmp_path), str(tmp_path / "out"), quantize="keep")
    with pytest.raises(RecipeError, match="float weights"):
        resolve_parts(recipe, {"target": False})
    for asked, holds, found in ((None, False, "none"), (None, True, "keep"), ("int8", True, "int8")):
        assert resolve_parts(replace(recipe, quantize=asked), {"target": holds})["target"].quantize == found


@pytest.mark.whole
def test_int8_caches_beside_kept_weights(tmp_path: Path) -> None:
    entry = build(tmp_path, {"": "Q8_0"}, kv_cache_dtype="int8").manifest.models["target"]
    assert (entry.quantize, entry.attention.cache_dtype) == ("keep", "int8")
