"""A manifest with a right hash and wrong values: one line, exit code 2 or 3, whatever the value and wherever it is."""

import copy
import json
from dataclasses import replace
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from specexport.cli import main
from specexport.inspect import describe, describe_briefly, describe_json
from specexport_runtime.abi import ABI_VERSION
from specexport_runtime.bundle import manifest as module
from specexport_runtime.bundle.files import FileEntry, check_files
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import BundleError, IncompatibleError, SpecexportError
from specexport_runtime.schema import from_json, map_paths, to_json
from tests.support.cases.manifests import DRAFT, ENTRY, FILES, HEAD, MANIFEST, write

DRAFT_JSON = MANIFEST.to_json()["models"]["draft"]
LAST = {"number": 1, "similarity": 1.0}
ABSURD = (
    None, True, 0, -1, 1, 1e300, float("nan"), 10**9, 10**12, 10**400, "", "x", "../x", "/etc/passwd", "C:\\x",
    "a\x00b", "\ud800", "y" * 300, [], [None], [["x", "y"]], {}, {"x": None}, {"../x": {"sha256": "", "size": 1}},
)  # fmt: skip


def places(value, path=()):
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


def test_a_manifest_survives_writing_and_reading(tmp_path):
    assert load_manifest(write(tmp_path, MANIFEST.to_json())) == MANIFEST
    MANIFEST.write(tmp_path)
    assert load_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("lookahead",), None, "lookahead is None, not a whole number from 1 to 64"),
        (("lookahead",), True, "lookahead is True"),
        (("max_model_len",), 10**9, "max_model_len is 1000000000, not a whole number from 2 to 16777216"),
        (("max_model_len",), 1000, "max_model_len is 1000, not within target's 512 positions"),
        (("vocabulary", "size"), 10**12, "vocabulary.size is 1000000000000, not"),
        (("vocabulary", "size"), 301, "vocabulary.size is 301, not within target's vocabulary of 300"),
        (("vocabulary", "eos_token_ids"), ["2"], "vocabulary.eos_token_ids[0] is '2'"),
        (("vocabulary", "eos_token_ids"), [300], "an id of vocabulary.eos_token_ids is 300, not below 300"),
        (("vocabulary", "eos_token_ids"), 2, "vocabulary.eos_token_ids is 2, not a list"),
        (("vocabulary", "special_tokens"), {"eos_token": 3}, "vocabulary.special_tokens.eos_token is 3, not a text"),
        (("models", "target", "engine", "path"), "../model.onnx", "it lies outside the bundle"),
        (("models", "target", "engine", "path"), "target\\..\\..\\x", "it lies outside the bundle"),
        (("models", "target", "engine", "path"), "target/other.onnx", "'target/other.onnx', not among the files"),
        (("models", "target", "engine", "files", 0, "path"), "/e", "models.target.engine.files[0].path is '/e'"),
        (
            ("models", "target", "engine", "files", 1, "path"),
            "e",
            "a file of models.target is 'e', not among the files",
        ),
        (("models", "target", "dtype"), "int4", "models.target.dtype is 'int4', not one of float32"),
        (("models", "target", "attention", "layers", 0), {"kv_heads": 1, "k_dim": 8}, "it lacks 'v_dim'"),
        (("models", "target", "attention", "layers", 0, "v_dim"), 10**9, "layers[0].v_dim is 1000000000, not a whole"),
        (("models", "target", "engine", "packed_bytes"), [1], "engine.packed_bytes is [1], not a list of 2"),
        (("models", "draft", "cut_lm_head", "num_rows"), 301, "of models.draft is 301, not within its vocabulary of"),
        (("models", "target"), DRAFT_JSON, "not null: only a draft's LM head may be cut"),
        (("models", "draft", "cut_lm_head", "ids_path"), "draft/x.npy", "'draft/x.npy', not among the files"),
        (
            ("models", "head", "draft_head", "mask_path"),
            "head/x.npy",
            "a file of models.head is 'head/x.npy', not among",
        ),
        (("models", "head", "draft_head", "reads_draft"), 1, "draft_head.reads_draft is 1, not true or false"),
        (
            ("models", "draft", "parameters", "experts", "per_token"),
            9,
            "experts of models.draft is ExpertSizes(parameters=600, per_token=9",
        ),
        (
            ("models", "draft", "dropped_layers"),
            [LAST | {"similarity": 1.5}],
            "similarity is 1.5, not a number from -1",
        ),
        (("models", "draft", "dropped_layers"), [LAST, LAST], "of models.draft is [1, 1], not different layers"),
        (("models", "draft", "dropped_layers"), [LAST | {"number": 2}], "of models.draft is [2], not different layers"),
        (("models", "target", "dropped_layers"), [LAST], "of models.target is [1], not empty: only a draft"),
        (("models", "helper"), {}, "a name in models is 'helper', not one of target, draft"),
        (
            ("models", "head", "attention", "target_layers"),
            [3],
            "not layers of the target whose caches are of the sizes",
        ),
        (("models", "draft", "attention", "target_layers"), [0], "not empty: only a draft head reads caches"),
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
    list(describe_briefly(manifest))
    json.dumps(describe_json(manifest))
    with pytest.raises(BundleError, match="missing"):
        check_files(folder, manifest.files | {"no such file": FileEntry("", 0)})
    return None


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.whole)])
def test_no_value_in_any_place_is_a_traceback(tmp_path, share):
    """A share of the values in each place, other ones in the next; all of them in the long lane."""
    models = {"target": ENTRY, "head": HEAD}
    whole = replace(MANIFEST, models=models, files={name: FileEntry("ef", 3) for name in FILES}).to_json()
    loaded = refused = 0
    for number, path in enumerate(places(whole)):
        for value in ABSURD[number % share :: share] if path else ():
            if path[0] == "manifest_sha256":
                continue
            write(tmp_path, changed(whole, path, value))
            refusal = refusal_of(tmp_path)
            assert refusal is None or (refusal.exit_code in (2, 3) and "\n" not in str(refusal)), (path, value)
            loaded, refused = loaded + (refusal is None), refused + (refusal is not None)
    assert loaded > 100 / share
    assert refused > 1000 / share


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"schema_version": 4, "abi_version": 3, "recipe": ' + '{"a":' * 50_000 + "1" + "}" * 50_001, "{", "[]",
        '{"schema_version": 1}', '{"schema_version": 1e999, "abi_version": 3}',
        '{"schema_version": null, "abi_version": 3}', '{"schema_version": "5", "abi_version": 3}',
        '{"schema_version": ' + "9" * 5000 + ', "abi_version": 3}', '"\\ud800"',
    ],
    ids=["deep list", "deep table", "cut", "list", "no abi", "infinite", "null", "text", "long", "surrogate"],
)  # fmt: skip
@pytest.mark.parametrize("command", [["generate", "text"], ["inspect"], ["verify"]])
def test_a_manifest_that_is_no_manifest_is_one_line(tmp_path, content, command):
    (tmp_path / "manifest.json").write_text(content)
    name, *rest = command
    result = CliRunner().invoke(main, [name, str(tmp_path), *rest])
    assert result.exit_code in (2, 3), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/manifest.json")
    assert "Fix: " in line


@pytest.mark.parametrize("schema", [1, module.SCHEMA_VERSION - 1])
def test_older_schemas_are_refused_with_the_command_that_rebuilds(tmp_path, schema):
    with pytest.raises(IncompatibleError) as caught:
        load_manifest(write(tmp_path, MANIFEST.to_json() | {"schema_version": schema}))
    path = tmp_path / "manifest.json"
    assert caught.value.message == f"{path}: schema_version is {schema}, this runtime reads {module.SCHEMA_VERSION}."
    assert caught.value.hint == f"build it again: `specexport build … -o {tmp_path} --force`, as it was built."
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("abi", [ABI_VERSION - 1, ABI_VERSION + 1])
def test_other_abis_are_refused_with_the_command_that_rebuilds(tmp_path, abi):
    with pytest.raises(IncompatibleError, match=f"abi_version is {abi}, this runtime speaks {ABI_VERSION}") as caught:
        load_manifest(write(tmp_path, MANIFEST.to_json() | {"abi_version": abi}))
    assert "--force" in caught.value.hint


def test_another_version_is_told_before_its_values(tmp_path):
    data = MANIFEST.to_json() | {"schema_version": 99, "lookahead": "many"}
    with pytest.raises(IncompatibleError, match="schema_version is 99") as caught:
        load_manifest(write(tmp_path, data))
    assert "upgrade" in caught.value.hint


def test_every_field_has_a_rule():
    class Odd(NamedTuple):
        value: complex

    with pytest.raises(TypeError, match="there is no rule for <class 'complex'>"):
        from_json(Odd, {"value": 1})


def test_paths_are_changed_wherever_they_are():
    moved = map_paths(DRAFT, lambda path: f"b/{path}")
    assert moved != DRAFT
    found = sorted(value for _, value in strings(to_json(moved)) if value.startswith("b/"))
    assert found == sorted(f"b/{value}" for _, value in strings(to_json(DRAFT)) if "/" in value)
    assert map_paths(moved, lambda path: path.removeprefix("b/")) == DRAFT


def strings(value):
    return [(path, each) for path in places(value) if isinstance(each := at(value, path), str)]


def at(value, path):
    for key in path:
        value = value[key]
    return value
