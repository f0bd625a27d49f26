"""Cache keys follow from what decides an engine: its imports, not a list of names."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specexport.compile import fingerprint
from specexport.compile.fingerprint import BUNDLE_ROOT, ENGINE_ROOT, hash_sources, needed_sources
from specexport_runtime.errors import SpecexportError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of both packages that the keys are made from, to be changed."""
    for name, place in (("specexport", ROOT), ("specexport_runtime", ROOT / "runtime")):
        shutil.copytree(place / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "static"))
    monkeypatch.setattr(fingerprint, "_package_folder", lambda name: tmp_path / name)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    fingerprint._source_of.cache_clear()
    fingerprint._needs.cache_clear()


def test_what_decides_an_engine_is_in_its_key() -> None:
    names = set(needed_sources(ENGINE_ROOT))
    for decides in (
        "specexport_runtime.abi",
        "specexport_runtime.executors.paged",  # the layout of ort-cuda's caches
        "specexport.ops.spec",
        "specexport.passes.quantize_ort_cpu",
        "specexport.lowering.trt_native",
        "specexport.kernels.ragged_attention",
        "specexport.backends.trt_worker",  # named in a string only: it is another process
    ):
        assert decides in names
    for shows in ("specexport.cli", "specexport.demo", "specexport.bench.command", "specexport_runtime.engine"):
        assert shows not in names
    assert names < set(needed_sources(BUNDLE_ROOT))


def test_every_pass_lowering_and_kernel_is_in_the_key() -> None:
    names = set(needed_sources(ENGINE_ROOT))
    for folder in ("passes", "lowering", "kernels", "plugin", "checkpoint", "trace"):
        for path in (ROOT / "specexport" / folder).glob("*.py"):
            # Named by nobody, or by tools alone: a reason is owed for each.
            if path.stem in {"__init__", *NOT_PART_OF_A_BUILD}:
                continue
            assert f"specexport.{folder}.{path.stem}" in names, path


NOT_PART_OF_A_BUILD = {
    "report",  # the kernels' report of `specexport doctor`
    "sampling",  # its PTX is data of the runtime, which a test compares
    "sampling_ptx",
}


def test_a_change_changes_the_key_where_it_decides_something(package: Path) -> None:
    keys = [hash_sources(ENGINE_ROOT)]
    for name in ("specexport_runtime/executors/paged.py", "specexport/kernels/tiles.py", "specexport/cli.py"):
        (package / name).write_text((package / name).read_text() + "\n# changed\n")
        forget()
        keys.append(hash_sources(ENGINE_ROOT))
    assert len(set(keys)) == 3
    assert keys[-1] == keys[-2], "the command line decides no engine"


def test_a_missing_module_is_an_error(package: Path) -> None:
    (package / "specexport" / "passes" / "linear_pack.py").unlink()
    with pytest.raises(SpecexportError, match=r"linear_pack .* no such module"):
        hash_sources(ENGINE_ROOT)


def test_imports_in_functions_count_and_those_for_type_checkers_do_not(package: Path) -> None:
    root = package / "specexport" / "model_build.py"
    root.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from specexport.bench import runner\n"
        "def build():\n    from specexport import host\n    import specexport.progress\n"
        "WORKER = 'specexport.backends.trt_worker'\nNOTE = 'specexport.gone'\n"
    )
    names = set(needed_sources(ENGINE_ROOT))
    assert {"specexport.host", "specexport.progress", "specexport.backends.trt_worker"} <= names
    assert "specexport.bench.runner" not in names
