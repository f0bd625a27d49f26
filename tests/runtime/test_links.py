"""Bundles of symbolic links, as the hub, Nix and Kubernetes keep files: they load, and no link is written through."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specexport.debug.graph import load_graph
from specexport.verify.report import ReportPart, VerifyReport, record_report
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.files import check_files, hash_files
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import BundleError
from specexport_runtime.executors import ort_session
from specexport_runtime.executors.external_data import read_session_model

PROMPT = "def read(path):"


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def move_to(path: Path, place: Path) -> None:
    """Leave a relative link to where a file is now."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, place)
    path.symlink_to(os.path.relpath(place, path.parent))


def hub(bundle: Path, root: Path) -> Path:
    """``snapshots/X/file -> ../../blobs/HASH``."""
    for path in files_of(bundle):
        move_to(path, root / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest())
    return bundle


def store(bundle: Path, root: Path) -> Path:
    """Every file in a folder of its own, all of one name."""
    for number, path in enumerate(files_of(bundle)):
        move_to(path, root / "store" / f"{number}" / "file")
    return bundle


def weights_alone(bundle: Path, root: Path) -> Path:
    for number, path in enumerate(bundle.rglob("*.data")):
        move_to(path, root / "weights" / f"{number}")
    return bundle


def graphs_alone(bundle: Path, root: Path) -> Path:
    for number, path in enumerate(bundle.rglob("*.onnx")):
        move_to(path, root / "graphs" / f"{number}")
    return bundle


def parts(bundle: Path, root: Path) -> Path:
    """The folder a link, and those in it."""
    for path in [each for each in bundle.iterdir() if each.is_dir()]:
        move_to(path, root / "elsewhere" / f"{path.name}-1")
    (root / "current").symlink_to(bundle)
    return root / "current"


def config_map(bundle: Path, root: Path) -> Path:
    """``file -> ..data/file``, ``..data -> ..2026``."""
    mount = root / "mount"
    shutil.move(bundle, mount / "..2026")
    (mount / "..data").symlink_to("..2026")
    for path in (mount / "..2026").iterdir():
        (mount / path.name).symlink_to(f"..data/{path.name}")
    return mount


LAYOUTS = (hub, store, weights_alone, graphs_alone, parts, config_map)


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_bundle, tmp_path / "snapshots" / "main"))


@pytest.fixture(scope="module")
def flat_text(demo_bundle: Path) -> str:
    return text_of(demo_bundle)


def text_of(bundle: Path) -> str:
    engine = SpecEngine.load(bundle, max_num_seqs=1, num_threads=1)
    try:
        return engine.generate([PROMPT], SamplingParams(max_tokens=12))[0].text
    finally:
        engine.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_bundle_of_links_gives_the_same_text(layout, bundle: Path, tmp_path: Path, flat_text: str) -> None:
    linked = layout(bundle, tmp_path)
    check_files(linked, load_manifest(linked).files)
    assert text_of(linked) == flat_text


def test_weights_behind_a_link_are_named_and_not_read(bundle: Path, tmp_path: Path) -> None:
    class Options:
        def add_session_config_entry(self, key: str, value: str) -> None:
            self.said = (key, value)

    graph, options = bundle / "target" / "model.onnx", Options()
    assert read_session_model(graph, options) == str(graph)
    hub(bundle, tmp_path)
    model = read_session_model(graph, options)
    assert isinstance(model, bytes)
    assert abs(len(model) - graph.stat().st_size) < 100 * model.count(b"location")
    assert options.said[1] == str(tmp_path / "blobs")


def test_debug_opens_graphs_over_links(bundle: Path, tmp_path: Path) -> None:
    graph = load_graph(hub(bundle, tmp_path) / "draft" / "model.onnx")
    session = graph.open(["logits"], 1)
    assert {value.name for value in session.get_inputs()} == set(graph.inputs())


def test_a_report_is_never_written_through_a_link(bundle: Path, tmp_path: Path) -> None:
    linked = hub(bundle, tmp_path)
    before = hash_files(tmp_path / "blobs", [path.name for path in files_of(tmp_path / "blobs")])
    for day in ("01", "02"):
        report = VerifyReport(
            bundle="demo", build_key=load_manifest(linked).build_key, date=f"2026-01-{day}T00:00:00+00:00", tools={},
            options={}, seconds={}, parts=(ReportPart("greedy", "passed", None, ()),),
        )  # fmt: skip
        record_report(linked, report)
        check_files(linked, load_manifest(linked).files)
        for path in files_of(linked):  # what was written becomes a blob, as an upload of it would
            if not path.is_symlink():
                move_to(path, tmp_path / "written" / day / path.name)
    check_files(tmp_path / "blobs", before)
    assert load_manifest(linked).verify is not None


def strange_files(place: Path) -> Iterator[tuple[str, str]]:
    place.symlink_to("/dev/zero")
    yield "device", "is no regular file"
    place.unlink()
    os.mkfifo(place)
    yield "pipe", "is no regular file"
    place.unlink()
    place.mkdir()
    yield "folder", "is no regular file"
    place.rmdir()
    place.symlink_to("nowhere")
    yield "dangling", "is a link that leads to no file"
    place.unlink()
    place.symlink_to(place.name)
    yield "loop", "is a link that leads to no file"
    place.unlink()
    yield "nothing", "is missing"


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "target/model.onnx.data"])
def test_what_is_no_regular_file_is_never_read(name: str, bundle: Path) -> None:
    (bundle / name).unlink()
    for kind, said in strange_files(bundle / name):
        with pytest.raises(BundleError, match=name) as caught:
            SpecEngine.load(bundle)
        assert said in caught.value.message or (name, kind) == ("manifest.json", "nothing"), kind
        assert "\n" not in caught.value.message
        assert ("cp -rL" in caught.value.hint) == (kind in ("dangling", "loop"))


def test_a_link_to_weights_that_the_manifest_does_not_name_is_refused(bundle: Path, tmp_path: Path) -> None:
    np.arange(4, dtype=np.float32).tofile(tmp_path / "secret")
    (bundle / "target" / "more.data").symlink_to(tmp_path / "secret")
    with pytest.raises(BundleError, match=r"more\.data is a link that the manifest does not name"):
        SpecEngine.load(bundle)
    (bundle / "target" / "more.data").rename(bundle / "target" / "README.md")  # nothing reads it
    SpecEngine.load(bundle, max_num_seqs=1, num_threads=1).close()


def test_over_links_a_graph_names_weights_beside_it_only(bundle: Path, tmp_path: Path) -> None:
    graph = weights_alone(bundle, tmp_path) / "draft" / "model.onnx"
    data = graph.read_bytes()
    assert b"model.onnx.data" in data
    graph.write_bytes(data.replace(b"model.onnx.data", b"../weights/1.dt"))
    with pytest.raises(BundleError, match="no file of weights beside the graph"):
        ort_session.open_session(graph, 1, spin=False)
