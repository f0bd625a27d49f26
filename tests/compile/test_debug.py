"""``specexport debug`` on tiny bundles: which layer differs, whose fault that is, and what it costs."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from specexport.compile.closeness import mean_divergence
from specexport.compile.pipeline import build_bundle
from specexport.debug.capture import capture_step
from specexport.debug.command import summary_lines
from specexport.debug.compare import compare_engines
from specexport.debug.graph import load_graph
from specexport.debug.points import match_tensors
from specexport.debug.run import DebugOptions, debug_bundle
from specexport.debug.save import with_plain_operators
from specexport.ops import reference
from specexport.ops.spec import EACH
from specexport.passes.block_format import unpack
from specexport.progress import ProgressEvent
from specexport.recipe import BuildRecipe
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.errors import IncompatibleError, InvalidRequestError
from specexport_runtime.executors import cuda_driver
from tests.support.cases import experts_cases
from tests.support.cases.experts_cases import Layer
from tests.support.cases.refusals import Refuse, RunCli
from tests.support.cases.shared import locked
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_models import ARCHITECTURES, make_model, save_checkpoint

PROMPT = "a quick brown fox"
LINEARS = [
    f"layers.{layer}.{name}"
    for layer in range(2)
    for name in (
        "self_attn.q_proj+others",  # nothing but attention reads them, and that as one: no part has a name
        "self_attn.o_proj",
        "mlp.gate_proj+up_proj",
        "mlp.down_proj",
    )
] + ["lm_head"]


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    manifest = load_manifest(folder)
    place = folder / "target"
    hashes = hash_files(place, [path.name for path in place.iterdir()])
    files = manifest.files | {f"target/{name}": entry for name, entry in hashes.items()}
    models = manifest.models | {"target": replace(manifest.models["target"], **changes)}
    replace(manifest, files=files, models=models).write(folder)


def damage(bundle: Path, folder: Path, weight: str) -> Path:
    """A copy of a bundle in which a part of one weight is too large."""
    shutil.copytree(bundle, folder)
    graph = onnx.load(folder / "target" / "model.onnx", load_external_data=False).graph
    (tensor,) = [item for item in graph.initializer if weight in item.name and not item.name.endswith(".sizes")]
    entry = {item.key: item.value for item in tensor.external_data}
    assert ".blocks.f32" in tensor.name
    shape = tensor.dims[0], tensor.dims[1] // 64, 16  # of each tile [K, 16]
    data = np.memmap(folder / "target" / entry["location"], np.float32, "r+", int(entry["offset"]), shape)
    data[0, :, :4] *= 1.5
    data.flush()
    rewrite_manifest(folder)
    return folder


@pytest.fixture(scope="module")
def bundles(session_dir: Path, tiny_pair: TinyPair) -> dict[str, Path]:
    found = {}
    with locked(session_dir / "debug-bundles.lock"):
        for name, values in {"int8": {"quantize": "int8"}, "plain": {"fuse": False, "self_draft": True}}.items():
            found[name] = session_dir / f"debug-{name}"
            if not found[name].is_dir():
                build_bundle(tiny_pair.recipe(found[name], draft=None, check=False, **values))
    return found


@pytest.fixture
def debug_json(run_cli: RunCli) -> Callable[..., dict[str, Any]]:
    def run(*args: object) -> dict[str, Any]:
        result = run_cli("debug", *args, "--threads", 1, "--json", "-q")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def labels(rows: list[dict[str, Any]]) -> list[str]:
    return [row["label"] for row in rows]


@pytest.mark.one_of_kind
@pytest.mark.parametrize("weight", ["layers.1.mlp.down_proj", "layers.0.self_attn.q_proj"])
def test_a_damaged_layer_is_named(weight, tiny_bundle, tmp_path, debug_json):
    damaged = damage(tiny_bundle, tmp_path / "damaged", weight)
    found = debug_json(damaged, PROMPT, "--against", tiny_bundle)
    name = next(label for label in LINEARS if label.startswith(weight))
    assert found["first"] == name
    assert found["ranking"] == [name]
    rows = found["rows"]
    at = labels(rows).index(name)
    assert all(row["error"] == 0 for row in rows[:at])
    assert not rows[-1]["within"]
    assert all((row["own_error"] > 1e-3) == (row["label"] == name) for row in rows)
    # Nothing else is wrong, so what the layer does alone is what the damaged graph does.
    assert found["divergence"] > 1e-7
    assert rows[at]["divergence"] == pytest.approx(found["divergence"], rel=1e-2)
    assert found["replayed_error"] < 1e-5


@pytest.mark.whole
def test_every_quantized_layer_is_ranked_by_what_it_does_to_the_logits(bundles, tiny_bundle, debug_json):
    found = debug_json(bundles["int8"], PROMPT, "--against", tiny_bundle, "--after", 2)
    assert found["step"]["past"] == len(PROMPT) + 1  # two tokens were decoded, and the last is in the step
    assert found["tolerance"] == 0.1
    quantized = {*LINEARS, "embedding"}
    assert set(found["ranking"]) == quantized
    effects = {row["label"]: row["divergence"] for row in found["rows"]}
    ranked = [effects[name] for name in found["ranking"]]
    assert ranked == sorted(ranked, reverse=True)
    assert ranked[-1] > 0
    # What is not quantized has no error of its own.
    assert all(row["own_error"] < 1e-5 for row in found["rows"] if row["label"] not in quantized)
    only = debug_json(bundles["int8"], PROMPT, "--against", tiny_bundle, "--after", 2, "--layer", "layers.1.mlp.*")
    assert set(only["ranking"]) == {"layers.1.mlp.gate_proj+up_proj", "layers.1.mlp.down_proj"}
    assert all(effects[name] == pytest.approx(row["divergence"], rel=1e-6) for name in only["ranking"]
               for row in only["rows"] if row["label"] == name)  # fmt: skip


@pytest.mark.one_of_kind
@pytest.mark.parametrize(
    ("graph", "role", "step"),
    [("padded", "target", "verify"), ("padded", "target", "prefill"), ("padded", "draft", "decode")],
)
def test_lowerings_of_one_model_agree(graph, role, step, gated_bundle, debug_json):
    found = debug_json(gated_bundle, PROMPT, "--graph", graph, "--role", role, "--step", step)
    assert found["first"] is None
    assert found["ranking"] == []
    assert found["same_token"] == 1
    layers = 2 if role == "target" else 1
    expected = {f"layers.{layer}.attention" for layer in range(layers)} | {"lm_head"}
    if role == "target":
        # The padded-KV graph has names for the parts.
        expected |= {name.replace("+others", "+k_proj+v_proj") for name in LINEARS}
        expected |= {"layers.0.residual.attention", "layers.1.residual.mlp"}
    assert expected <= set(labels(found["rows"]))


@pytest.mark.whole
def test_layers_that_only_one_graph_has_packed_are_still_paired(bundles: dict[str, Path], gated_bundle: Path) -> None:
    graphs = [load_graph(folder / "target" / "model.onnx") for folder in (bundles["plain"], gated_bundle)]
    pairs = match_tensors(*graphs, same_names=False)
    # The packed query, key and value are read by attention as one, so that none of them is in that graph.
    expected = ["attention", "self_attn.o_proj", "residual.attention"]
    expected += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "residual.mlp"]
    found = [pair.label for pair in pairs]
    assert sorted(found) == sorted(
        [f"layers.{layer}.{name}" for layer in range(2) for name in expected] + ["lm_head", "embedding"]
    )
    assert found.index("layers.0.residual.mlp") < found.index("layers.1.attention") < found.index("lm_head")


def test_the_step_is_one_of_the_engines_own_decode(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle, max_num_seqs=1)
    prompt = bundle.tokenizer.encode(PROMPT).ids
    with closing(SpecEngine.load(tiny_bundle, max_num_seqs=1)) as engine:
        (plain,) = engine.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True), drafter="none")
    step = capture_step(bundle, "target", prompt, "verify", after=3)
    assert step.past == len(prompt) + 2
    assert step.tokens == tuple(plain.token_ids[2:11])  # the last token that was decoded, and K = 8 after it
    assert step.logits.argmax(axis=1)[:-1].tolist() == list(step.tokens[1:])
    assert capture_step(bundle, "target", prompt, "prefill").tokens == tuple(prompt)
    first = capture_step(bundle, "target", prompt, "decode")
    assert (first.past, first.tokens) == (len(prompt) - 1, tuple(prompt[-1:]))
    assert first.logits.argmax() == plain.token_ids[0]


def run_saved(folder: Path) -> Any:
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.json import load_json

    (feeds,) = load_json(str(folder / "inputs.json"))
    with OnnxrtRunner(SessionFromOnnx(str(folder / "model.onnx"))) as runner:
        return runner.infer(feeds)["logits"].copy()


def test_what_is_saved_runs_elsewhere(tiny_bundle: Path, tmp_path: Path, run_cli: RunCli) -> None:
    folder = tmp_path / "saved"
    result = run_cli("debug", tiny_bundle, PROMPT, "--graph", "padded", "--save", folder, "-q", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "are within the tolerance of 0.0001" in result.stdout
    logits = []
    for name in ("reference", "debugged"):
        model = onnx.load(folder / name / "model.onnx", load_external_data=False)
        assert not model.functions  # polygraphy's graph surgery has no use for them
        assert not (folder / name / "model.onnx.data").samefile(tiny_bundle / "target" / "model.onnx.data")
        logits.append(run_saved(folder / name))
    assert mean_divergence(*logits) < 1e-9
    assert np.allclose(*logits, rtol=0, atol=1e-5)


LAYERS = [
    Layer("q4_k", "f16", 5, 3, 64, 32),
    Layer("int8", "int8", 4, 2, 40, 24, 1, 1.702, 1.0, 0.5, True),
    Layer("f32", "mxfp4", 3, 2, 32, 48, EACH, 1e6),
]


@pytest.mark.parametrize("layer", LAYERS, ids=["halves", "in turn", "each"])
def test_experts_are_written_in_standard_operators(layer: Layer) -> None:
    generator = np.random.default_rng(3)
    weights, step = experts_cases.weights_of(layer, generator), experts_cases.step_of(layer, 7, generator)
    model = ir.serde.deserialize_model(experts_cases.model_of(layer, weights))
    plain = ir.serde.serialize_model(with_plain_operators(model, {}))
    assert {node.domain for node in plain.graph.node} == {""}
    floats = {
        name: np.stack([unpack(kind, part, n, k) for part in np.split(weights[name], layer.num_experts)])
        for name, kind, n, k in (
            ("gate_up", layer.gate_up, layer.outputs, layer.depth),
            ("down", layer.down, layer.depth, layer.width),
        )
    }
    wanted = reference.experts(
        *step.values(), floats["gate_up"], weights.get("gate_up_bias"), floats["down"], weights.get("down_bias"),
        **{name: getattr(layer, name) for name in ("interleaved", "alpha", "beta", "limit")},
    )  # fmt: skip
    found = onnxruntime.InferenceSession(plain.SerializeToString()).run(None, step)[0]
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def test_experts_are_points(tmp_path: Path, debug_json: Callable[..., dict[str, Any]], run_cli: RunCli) -> None:
    save_checkpoint(make_model(*ARCHITECTURES["gpt_oss"]), tmp_path / "model")
    for quantize in ("none", "int8"):
        recipe = BuildRecipe(str(tmp_path / "model"), str(tmp_path / quantize), quantize=quantize, check=False)
        build_bundle(recipe, use_cache=False)
    found = debug_json(tmp_path / "int8", PROMPT, "--against", tmp_path / "none")
    errors = {row["label"]: row["own_error"] for row in found["rows"]}
    for layer in range(2):
        assert 1e-4 < errors[f"layers.{layer}.mlp.experts"] < 0.1
    saved = tmp_path / "saved"
    result = run_cli(
        "debug", tmp_path / "none", PROMPT, "--graph", "padded", "--step", "prefill", "--save", saved, "-q"
    )
    assert result.exit_code == 0, result.output
    bundle = load_bundle(tmp_path / "none", max_num_seqs=1)
    step = capture_step(bundle, "target", bundle.tokenizer.encode(PROMPT).ids, "prefill")
    assert np.allclose(run_saved(saved / "reference"), step.logits, rtol=0, atol=1e-4)


def test_divergence_is_that_of_the_distributions() -> None:
    p, q = np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]), np.array([[0.25, 0.25, 0.5], [0.2, 0.2, 0.6]])
    expected = (0.5 * np.log(2) + 0.25 * np.log(0.5)) / 2
    logits = [(np.log(x) + 7).astype(np.float32) for x in (p, q)]
    assert mean_divergence(*reversed(logits)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "nothing to compare the engine with"),
        (["--against", "OTHER"], "built from draft"),
        (["--against", "nowhere"], "nowhere"),
        (["--against", "SELF", "--layer", "layers.9.*"], "--layer layers.9.*: the two graphs have no such layer"),
        (["--graph", "padded", "--tolerance", "0"], "--tolerance is 0.0"),
        (["--graph", "padded", "--after", "-1"], "--after is -1"),
        (["--graph", "padded", "--after", "100000"], "the prompt has 17 tokens"),
        (["--graph", "padded", "--save", "SELF"], "it exists"),
        (["--graph", "padded", "--threads", "0"], "--threads is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line(
    args: list[str], line: str, tiny_bundle: Path, tiny_pair: TinyPair, session_dir: Path,
    tmp_path: Path, refuse_cli: Refuse
) -> None:  # fmt: skip
    other = session_dir / "debug-other"
    if "OTHER" in args:
        with locked(session_dir / "debug-other.lock"):
            if not other.is_dir():
                build_bundle(tiny_pair.recipe(other, target=str(tiny_pair.draft), draft=None, check=False))
    places = {"OTHER": str(other), "SELF": str(tiny_bundle)}
    assert line in refuse_cli("debug", tiny_bundle, PROMPT, "-q", *[places.get(arg, arg) for arg in args])


def test_a_missing_draft_is_refused(tiny_bundle: Path, tmp_path_factory: Any, refuse_cli: Refuse) -> None:
    folder = shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("alone") / "b")
    manifest = load_manifest(folder)
    replace(manifest, models={"target": manifest.models["target"]}).write(folder)
    assert "has no draft model" in refuse_cli("debug", folder, "--graph", "padded", "--role", "draft", "-q")


def test_without_the_extra_the_command_says_what_to_install(tiny_bundle, tmp_path, refuse_cli, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "polygraphy" else find_spec(name, *rest)
    )
    line = refuse_cli("debug", tiny_bundle, PROMPT, "--graph", "padded", "--save", tmp_path / "saved", "-q")
    assert "`specexport debug` needs polygraphy" in line
    assert "pip install -e '.[debug,export,cpu]'" in line


def test_engines_without_layers_are_told_apart_by_their_caches(tiny_bundle: Path, tmp_path: Path) -> None:
    damaged = load_bundle(damage(tiny_bundle, tmp_path / "damaged", "layers.0.mlp.down_proj"), max_num_seqs=1)
    bundle = load_bundle(tiny_bundle, max_num_seqs=1)
    step = capture_step(bundle, "target", bundle.tokenizer.encode(PROMPT).ids, "verify")
    limits = {"tolerance": 1e-4, "num_threads": 1}
    same = compare_engines(bundle, bundle, "target", step, **limits)
    assert (same.first, same.divergence, same.rows[-1].error) == (None, 0, 0)
    assert [row.label for row in same.rows] == [
        "layers.0.keys", "layers.0.values", "layers.1.keys", "layers.1.values", "logits",
    ]  # fmt: skip
    found = compare_engines(bundle, damaged, "target", step, **limits)
    assert found.first == "layers.1.keys"  # layer 0 wrote its own before its MLP went wrong
    assert [row.within for row in found.rows] == [True, True, False, False, False]
    lines = list(summary_lines(found, 10))
    assert "first beyond the tolerance of 0.0001: layers.1.keys" in lines[0]
    assert len(lines) == 2


def test_a_tensorrt_engine_shows_no_layers_and_is_refused_where_there_is_no_gpu(
    tiny_bundle: Path, tmp_path: Path, refuse_cli: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> NoReturn:
        raise IncompatibleError("there is no NVIDIA GPU.", "run it where there is one.")

    monkeypatch.setattr(cuda_driver, "CudaDriver", no_gpu)
    engine = tmp_path / "rtx"
    shutil.copytree(tiny_bundle, engine)
    rewrite_manifest(engine, backend="tensorrt-rtx")
    for bundle, asked, said, code in (
        (engine, ["--against", tiny_bundle], "there is no NVIDIA GPU", 3),
        (engine, ["--graph", "padded"], "was built for tensorrt-rtx, whose engines do not show their layers", 3),
        (tiny_bundle, ["--against", engine], "was built for tensorrt-rtx, whose engines do not show their layers", 3),
        (engine, ["--against", tiny_bundle, "--layer", "lm_head"], "--layer", 2),
    ):
        assert said in refuse_cli("debug", bundle, PROMPT, "-q", *asked, exit_code=code)
    told: list[ProgressEvent] = []
    with pytest.raises(IncompatibleError, match="no NVIDIA GPU"):
        debug_bundle(engine, PROMPT, DebugOptions(against=tiny_bundle), progress=told.append)
    # Progress ends at the last stage, though there are no layers to compare.
    assert [(event.stage, event.step, event.num_steps) for event in told] == [
        ("load", 1, 4), ("decode", 3, 4), ("compare", 4, 4),
    ]  # fmt: skip


def test_kinds_of_weights_graphs_and_steps_that_are_not_known_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "b")
    rewrite_manifest(tmp_path / "b", quantize="int3")
    with pytest.raises(IncompatibleError, match="is known for int3"):
        debug_bundle(tmp_path / "b", PROMPT, DebugOptions(graph="padded"))
    for name, value in (("graph", "dense"), ("step", "draft")):
        with pytest.raises(InvalidRequestError, match=f"--{name} is '{value}'"):
            DebugOptions(**{"against": tmp_path, name: value})
