"""A manifest with a right hash and wrong values: one line, exit code 2 or 3, whatever the value and wherever it is."""

import copy
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from specexport.cli import main
from specexport.inspect import describe, describe_json
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.bundle import manifest as module
from specexport_runtime.bundle.files import FileEntry, check_files
from specexport_runtime.bundle.manifest import (
    EngineFile,
    ExpertSizes,
    Manifest,
    ModelEntry,
    VocabularyInfo,
    load_manifest,
)
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.errors import BundleError, IncompatibleError, SpecexportError

ENTRY = ModelEntry(
    path="target/model.onnx",
    backend="ort-cpu",
    architecture="Tiny",
    dtype="float32",
    vocab_size=300,
    layers=(LayerGeometry(1, 8, 8),),
    inputs=("input_ids", "logit_rows"),
    num_parameters=10**6,
    max_positions=512,
    source="tiny",
    source_sha256="ab",
    passes=(("constant-fold", 3),),
    fused=(("norm-fuse", 1),),
    profiles=(Profile("decode", 1, 1, 1, 1),),
    engines=(
        EngineFile(
            "target/sm89.engine",
            "sm89",
            "tensorrt",
            "10.0",
            1000,
            {"aliased": [["a", "b"]], "profiles": [{"fused_attention": 1, "float32_matmuls": ["x"], "kind": "decode"}]},
        ),
        EngineFile("target/sm120.delta", "sm120", "tensorrt", "10.0", base="target/sm89.engine"),
    ),
    padded_path="target/model.padded.onnx",
    kv_capacity=300,
    max_num_seqs=4,
    gate_obstacle="tied",
    quantize="int8",
)
DRAFT = replace(
    ENTRY,
    head_ids_path="draft/head_ids.npy",
    num_head_ids=120,
    dropped_layers=((2, 0.75), (0, -1.0)),
    step_parameters=900,
    experts=ExpertSizes(600, 2, 8),
    num_heads=4,
)
FILES = (
    "draft/head_ids.npy",
    "target/model.onnx",
    "target/sm89.engine",
    "target/sm120.delta",
    "target/model.padded.onnx",
    "target/model.one.onnx",
)
MANIFEST = Manifest(
    name="tiny",
    build_key="key",
    recipe={"lookahead": 4},
    tools={"python": "3"},
    vocabulary=VocabularyInfo(290, "cd", 1, (2, 299), {"eos_token": "</s>"}),
    max_model_len=256,
    lookahead=4,
    models={"target": ENTRY, "draft": DRAFT},
    files={name: FileEntry("ef", 3) for name in (*FILES, "tokenizer.json")},
    verify={"passed": True},
    max_num_seqs=2,
    max_num_tokens=64,
)
DRAFT_JSON = MANIFEST.to_json()["models"]["draft"]
ABSURD = (
    None,
    True,
    0,
    -1,
    1,
    1e300,
    float("nan"),
    10**9,
    10**12,
    10**400,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "C:\\x",
    "a\x00b",
    "\ud800",
    "y" * 300,
    [],
    [None],
    [["x", "y"]],
    {},
    {"x": None},
    {"../x": {"sha256": "", "size": 1}},
)


def write(folder, data):
    data = {key: value for key, value in data.items() if key != "manifest_sha256"}
    data["manifest_sha256"] = module._digest(data)
    (folder / "manifest.json").write_text(json.dumps(data))
    return folder


def places(value, path=()):
    """Every place of a JSON value, inner ones included."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in children:
        yield from places(item, (*path, key))


def changed(data, path, value):
    data = copy.deepcopy(data)
    *way, last = path
    inner = data
    for key in way:
        inner = inner[key]
    inner[last] = value
    return data


def test_the_manifest_of_these_tests_loads(tmp_path):
    assert load_manifest(write(tmp_path, MANIFEST.to_json())) == MANIFEST


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("lookahead",), None, "lookahead is None, not a whole number from 1 to 64"),
        (("lookahead",), 0, "lookahead is 0"),
        (("lookahead",), -1, "lookahead is -1"),
        (("lookahead",), 1e300, "lookahead is 1e+300"),
        (("lookahead",), 65, "lookahead is 65"),
        (("lookahead",), True, "lookahead is True"),
        (("max_model_len",), 10**9, "max_model_len is 1000000000, not a whole number from 2 to 16777216"),
        (("max_model_len",), 1000, "max_model_len is 1000, not within target's 512 positions"),
        (("vocabulary", "size"), 10**12, "vocabulary.size is 1000000000000, not"),
        (("vocabulary", "size"), 301, "vocabulary.size is 301, not within target's vocabulary of 300"),
        (("vocabulary", "eos_token_ids"), ["2"], "vocabulary.eos_token_ids[0] is '2'"),
        (("vocabulary", "eos_token_ids"), [2, -1], "vocabulary.eos_token_ids[1] is -1"),
        (("vocabulary", "eos_token_ids"), [300], "an id of vocabulary.eos_token_ids is 300, not below 300"),
        (("vocabulary", "eos_token_ids"), 2, "vocabulary.eos_token_ids is 2, not a list"),
        (("vocabulary", "special_tokens"), {"eos_token": 3}, "vocabulary.special_tokens.eos_token is 3, not a text"),
        (("models", "target", "path"), "../model.onnx", "it lies outside the bundle"),
        (("models", "target", "path"), "/elsewhere/model.onnx", "it lies outside the bundle"),
        (("models", "target", "path"), "target\\..\\..\\x", "it lies outside the bundle"),
        (("models", "target", "path"), "target/other.onnx", "'target/other.onnx', not among the files"),
        (("models", "target", "engines", 0, "path"), "/e", "models.target.engines[0].path is '/e'"),
        (("models", "target", "engines", 1, "base"), "../e", "models.target.engines[1].base is '../e'"),
        (("models", "target", "engines", 1, "base"), "e", "an engine of models.target is 'e', not among the files"),
        (("models", "target", "dtype"), "int4", "models.target.dtype is 'int4', not one of float32"),
        (("models", "target", "layers"), [[1, 8]], "models.target.layers[0] is [1, 8], not a list of 3"),
        (("models", "target", "layers"), [[1, 8, 10**9]], "models.target.layers[0][2] is 1000000000"),
        (("models", "target", "vocab_size"), 10**12, "models.target.vocab_size is 1000000000000"),
        (("models", "draft", "num_head_ids"), 301, "num_head_ids of models.draft is 301, not within its vocabulary of"),
        (("models", "draft", "num_head_ids"), None, "not given where head_ids_path is, and only there"),
        (("models", "target", "num_head_ids"), 120, "not given where head_ids_path is, and only there"),
        (("models", "target"), DRAFT_JSON, "num_head_ids of models.target is 120, not null: only a draft's"),
        (("models", "draft", "head_ids_path"), "draft/x.npy", "'draft/x.npy', not among the files"),
        (("models", "draft", "head_ids_path"), "../ids.npy", "it lies outside the bundle"),
        (
            ("models", "draft", "experts"),
            [600, 9, 8],
            "experts of models.draft is ExpertSizes(parameters=600, per_token=9",
        ),
        (("models", "draft", "dropped_layers"), [[1, 1.5]], "dropped_layers[0][1] is 1.5, not a number from -1 to 1"),
        (("models", "draft", "dropped_layers"), [[1, True]], "dropped_layers[0][1] is True, not a number"),
        (("models", "draft", "dropped_layers"), [[0, 1], [0, 1]], "of models.draft is [0, 0], not different layers"),
        (("models", "draft", "dropped_layers"), [[2, 1]], "of models.draft is [2], not different layers of its check"),
        (("models", "target", "dropped_layers"), [[1, 1]], "of models.target is [1], not empty: only a draft"),
        (("models", "helper"), {}, "a name in models is 'helper', not one of target, draft"),
        (("models", "target", "surprise"), 1, "'surprise' is not known"),
        (("files", "../x"), {"sha256": "", "size": 0}, "a name in files is '../x'"),
        (("files", "tokenizer.json", "size"), -1, "files.tokenizer.json.size is -1"),
        (("max_num_seqs",), 10**8, "max_num_seqs is 100000000, not a whole number from 1 to 4096"),
    ],
)
def test_an_absurd_value_is_named(tmp_path, path, value, said):
    write(tmp_path, changed(MANIFEST.to_json(), path, value))
    with pytest.raises(BundleError) as caught:
        load_manifest(tmp_path)
    assert said in caught.value.message
    assert "manifest.json" in caught.value.message
    assert "specexport build" in caught.value.hint


def refusal_of(folder):
    """What the runtime and ``inspect`` refuse a bundle with, before they look for its files; None if they take it."""
    try:
        manifest = load_manifest(folder)
    except SpecexportError as error:
        return error
    list(describe(manifest))
    json.dumps(describe_json(manifest))
    with pytest.raises(BundleError, match="missing"):
        check_files(folder, manifest.files | {"no such file": FileEntry("", 0)})
    return None


def test_no_value_in_any_place_is_a_traceback(tmp_path):
    whole = replace(MANIFEST, models={"target": ENTRY}).to_json()
    loaded = refused = 0
    for path in places(whole):
        for value in ABSURD if path else ():
            if path[0] == "manifest_sha256":
                continue
            write(tmp_path, changed(whole, path, value))
            refusal = refusal_of(tmp_path)
            assert refusal is None or (refusal.exit_code in (2, 3) and "\n" not in str(refusal)), (path, value)
            loaded, refused = loaded + (refusal is None), refused + (refusal is not None)
    assert loaded > 100
    assert refused > 1000


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"schema_version": 4, "abi_version": 3, "recipe": ' + '{"a":' * 50_000 + "1" + "}" * 50_001,
        '{"schema_version": 1e999, "abi_version": 3}',
        '{"schema_version": null, "abi_version": 3}',
        '{"schema_version": "5", "abi_version": 3}',
        '{"schema_version": ' + "9" * 5000 + ', "abi_version": 3}',
        "3",
        "\x00",
        '"\\ud800"',
    ],
    ids=["deep list", "deep table", "infinite", "null", "text", "long", "number", "nul", "surrogate"],
)
@pytest.mark.parametrize("command", [["generate", "text"], ["explain", "text"], ["inspect"], ["verify"]])
def test_a_manifest_that_is_no_manifest_is_one_line(tmp_path, content, command):
    (tmp_path / "manifest.json").write_text(content)
    name, *rest = command
    result = CliRunner().invoke(main, [name, str(tmp_path), *rest])
    assert result.exit_code in (2, 3), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/manifest.json")
    assert "Fix: " in line


@pytest.mark.parametrize("command", [["generate", "text"], ["explain", "text"], ["inspect"]])
def test_a_wrong_value_and_an_impossible_folder_are_one_line(tmp_path, command):
    write(tmp_path, changed(MANIFEST.to_json(), ("lookahead",), 1e300))
    name, *rest = command
    for folder, said in ((tmp_path, "lookahead is 1e+300"), ("x" * 5000, "there is no folder")):
        result = CliRunner().invoke(main, [name, str(folder), *rest])
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert said in line


def older(schema):
    """The manifest as a schema wrote it, without the fields that later ones added."""
    data = MANIFEST.to_json()
    data["schema_version"] = schema
    if schema < 5:
        del data["max_num_seqs"], data["max_num_tokens"]
    for entry in data["models"].values():
        if schema < 8:
            del entry["step_parameters"], entry["num_heads"]
        if schema < 7:
            del entry["dropped_layers"]
        if schema < 6:
            del entry["head_ids_path"], entry["num_head_ids"]
        if schema < 5:
            entry["full_path"], entry["full_inputs"] = "target/gone.onnx", ["input_ids"]
        elif schema < 11:
            entry["one_token_path"], entry["one_token_inputs"] = "target/gone.onnx", ["input_ids"]
        if schema < 4:
            for name in ("num_gates", "gate_obstacle", "quantize", "fused", "full_path", "full_inputs"):
                del entry[name]
        if schema < 3:
            for name in ("lowering", "engines", "profiles", "kv_capacity", "max_num_seqs"):
                del entry[name]
    return data


@pytest.mark.parametrize("schema", module.READABLE_SCHEMAS)
def test_manifests_of_every_schema_load(tmp_path, schema):
    manifest = load_manifest(write(tmp_path, older(schema)))
    assert manifest.schema_version == schema
    assert manifest.models["draft"].head_size == (120 if schema >= 6 else 300)
    assert manifest.models["draft"].step_parameters == (DRAFT.step_parameters if schema >= 8 else None)
    assert manifest.models["draft"].kept_layers == ((1,) if schema >= 7 else (0,))
    assert manifest.models["target"].engines == (ENTRY.engines if schema >= 3 else ())


def test_another_version_is_told_before_its_values(tmp_path):
    data = MANIFEST.to_json() | {"schema_version": 99, "lookahead": "many"}
    with pytest.raises(IncompatibleError, match="schema_version is 99"):
        load_manifest(write(tmp_path, data))


def test_every_field_has_a_rule():
    with pytest.raises(TypeError, match="every field of FileEntry needs a rule"):
        module._rules_of(FileEntry, sha256=module.text)
