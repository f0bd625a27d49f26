"""A bundle that was altered, cut, or made for another version is refused, in one line that says how to mend it."""

import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import onnx
import pytest
from click.testing import CliRunner

from specexport_runtime import SpecEngine
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.errors import BundleError, IncompatibleError, InvalidRequestError
from specexport_runtime.executors import operators
from tests.support.cases.refusals import line_of
from tests.support.fakes.submitted import raising


@pytest.fixture
def bundle(demo_bundle, tmp_path):
    return shutil.copytree(demo_bundle, tmp_path / "bundle")


def refuse(bundle, exit_code: int = 2) -> str:
    """Run `generate` on the bundle; it must end in one line with a fix and without a traceback."""
    return line_of(CliRunner().invoke(runtime_cli, ["generate", str(bundle), "def f():"]), exit_code=exit_code)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")


def test_one_changed_byte_in_any_file_is_found(bundle):
    for path in files(bundle):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert f"{path.relative_to(bundle)} was altered" in refuse(bundle)
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    load_manifest(bundle)


def test_a_changed_byte_in_the_manifest_is_found(bundle):
    path = bundle / "manifest.json"
    whole = path.read_bytes()
    for position in (0.1, 0.35, 0.5, 0.77, 0.99):
        data = bytearray(whole)
        at = next(i for i in range(int(len(data) * position), len(data)) if chr(data[i]).isalnum())
        data[at] = ord("0") if data[at] != ord("0") else ord("1")
        path.write_bytes(data)
        with pytest.raises((BundleError, IncompatibleError)):
            load_manifest(bundle)


def rewrite(bundle, **changes):
    manifest = load_manifest(bundle)
    Manifest(**{**vars(manifest), **changes}).write(bundle)


def test_a_backend_this_runtime_does_not_know_is_incompatible(bundle):
    manifest = load_manifest(bundle)
    target = replace(manifest.models["target"], backend="abacus")
    rewrite(bundle, models={"target": target})
    assert "'abacus'" in refuse(bundle, exit_code=3)


def test_a_manifest_that_names_files_outside_the_bundle_is_refused(bundle):
    (bundle.parent / "outside").write_text("x")
    manifest = load_manifest(bundle)
    rewrite(bundle, files={**manifest.files, **hash_files(bundle, ["../outside"])})
    assert "outside the bundle" in refuse(bundle)


@pytest.mark.parametrize(
    ("name", "said"),
    [("tokenizer.json", "tokenizer.json cannot be read"), ("target/model.onnx", "cannot load this engine")],
)
def test_an_unreadable_file_is_refused_even_if_its_hash_fits(bundle, name, said):
    (bundle / name).write_text("{}")
    rewrite(bundle, files={**load_manifest(bundle).files, **hash_files(bundle, [name])})
    assert said in refuse(bundle)


def alter_engine(bundle, alter) -> None:
    """Change the target's graph, or its weights' file, and the hashes with it."""
    manifest = load_manifest(bundle)
    name = manifest.models["target"].engine.path
    model = onnx.load(bundle / name, load_external_data=False)
    alter(model, bundle / f"{name}.data")
    (bundle / name).write_bytes(model.SerializeToString())
    rewrite(bundle, files={**manifest.files, **hash_files(bundle, [name, f"{name}.data"])})


def cut_weights(model, weights) -> None:
    os.truncate(weights, weights.stat().st_size // 2)


def change_width(model, weights) -> None:
    node = next(node for node in model.graph.node if node.op_type == "BlockLinear")
    next(attribute for attribute in node.attribute if attribute.name == "N").i += 16


def change_format(model, weights) -> None:
    node = next(node for node in model.graph.node if node.op_type == "BlockEmbedding")
    next(attribute for attribute in node.attribute if attribute.name == "format").s = b"int7"


def shorten_tables(model, weights) -> None:
    for tensor in model.graph.initializer:
        if tensor.name.startswith("rotary."):
            tensor.dims[0] = 1
            (entry,) = [entry for entry in tensor.external_data if entry.key == "length"]
            entry.value = str(4 * tensor.dims[1])


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (cut_weights, "cannot load this engine"),
        (change_width, "weight has the shape"),
        (change_format, "there is no block format 'int7'"),
        (shorten_tables, "beyond the rotary tables"),
    ],
)
def test_an_operator_s_error_is_one_line_even_if_hashes_fit(bundle, alter, words):
    alter_engine(bundle, alter)
    assert words in refuse(bundle)


@pytest.mark.parametrize(
    ("content", "exit_code", "words"), [(None, 2, "is missing"), (b"no library", 3, "cannot be loaded")]
)
def test_without_its_operators_a_bundle_is_refused(demo_bundle, tmp_path, monkeypatch, content, exit_code, words):
    path = tmp_path / "operators.so"
    if content is not None:
        path.write_bytes(content)
    operators._load_library.cache_clear()
    monkeypatch.setattr(operators, "_LIBRARY", path)
    try:
        assert words in refuse(demo_bundle, exit_code=exit_code)
    finally:
        operators._load_library.cache_clear()


def test_operators_that_there_is_no_memory_for_are_not_called_broken(demo_bundle, monkeypatch):
    refused = raising(OSError("_operators.so: failed to map segment from shared object"))
    operators._load_library.cache_clear()
    monkeypatch.setattr(operators, "ctypes", SimpleNamespace(CDLL=refused))
    try:
        assert "not enough memory: needs about 0.1 GB" in refuse(demo_bundle, exit_code=3)
    finally:
        operators._load_library.cache_clear()


def test_folders_that_are_no_bundles(tmp_path):
    assert "has no manifest.json" in refuse(tmp_path)
    for folder in (tmp_path / "nothing", "x" * 5000):
        assert "there is no folder" in refuse(folder)
    for checkpoint, file in ((tmp_path, "config.json"), (tmp_path / "model.gguf", "model.gguf")):
        (tmp_path / file).touch()
        assert f"`specexport build {checkpoint} -o NEW_FOLDER`" in refuse(checkpoint)


@pytest.mark.parametrize(
    "limits", [{"max_model_len": 1}, {"max_model_len": 10**6}, {"max_num_seqs": 0}, {"num_threads": 10**5}]
)
def test_limits_out_of_range(demo_bundle, limits):
    with pytest.raises(InvalidRequestError, match=next(iter(limits))):
        SpecEngine.load(demo_bundle, **limits)
