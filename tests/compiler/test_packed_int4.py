"""Packed weights of quantized engines: the same logits with and without, and a file that lies is never used."""

import re
from pathlib import Path

import numpy as np
import pytest
from pairs import TinyPair, locked

from specexport.build.pipeline import build_bundle
from specexport_runtime.bundle.opened import Bundle, load_bundle
from specexport_runtime.executors import ort_probe, ort_session, prepacked
from specexport_runtime.executors.open import open_executor
from specexport_runtime.executors.ort_probe import ProbedStep, difference
from specexport_runtime.executors.packed_alignment import align_packed
from specexport_runtime.packing.batch import ModelRunner, RowWork

GRAPHS = [("target", True), ("target", False), ("draft", True), ("draft", False)]


@pytest.fixture(scope="session")
def folder(session_dir: Path, tiny_pair: TinyPair) -> Path:
    """An int4 target with gates and an int8 draft; a padded graph in each."""
    path = session_dir / "packed-int4"
    with locked(session_dir / "packed-int4.lock"):
        if not path.is_dir():
            build_bundle(tiny_pair.recipe(path, quantize="int4", draft_quantize="int8", self_draft=True))
    return path


@pytest.fixture
def bundle(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setattr(prepacked, "MIN_WEIGHT_BYTES", 0)
    monkeypatch.setattr(ort_session, "MIN_EXTERNAL_BYTES", 64)
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    return load_bundle(folder, max_num_seqs=4, max_model_len=96)


def run_steps(bundle: Bundle, role: str, *, unpad_kv: bool = True, packed: bool = True) -> list[np.ndarray]:
    """Logits of a prefill and of steps of 1, 2 and K+1 tokens, then of four rows with one token each."""
    executor = open_executor(bundle, role, num_threads=1, spin=False, unpad_kv=unpad_kv, prepacked=packed)
    runner = ModelRunner(executor, unpad_kv=unpad_kv)
    logits = []
    for width in (20, 1, 2, bundle.manifest.lookahead + 1):
        logits.append(runner.step(0, [RowWork(range(3, 3 + width), width)]).copy())
        runner.kv.commit(0, runner.kv.kv_len(0) + width)
    logits.append(runner.step(0, [RowWork([token], 1) for token in (5, 6, 7, 8)]).copy())
    executor.close()
    return logits


@pytest.mark.parametrize(("role", "unpad_kv"), GRAPHS)
def test_packed_logits_are_the_unpacked_ones(
    role: str, unpad_kv: bool, bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run_steps(bundle, role, unpad_kv=unpad_kv, packed=False)
    for _ in range(2):  # made, then found
        for want, got in zip(expected, run_steps(bundle, role, unpad_kv=unpad_kv), strict=True):
            assert np.isfinite(want).all()
            np.testing.assert_array_equal(want, got)
    assert not caplog.records
    assert len(list((tmp_path / "cache" / "prepacked").glob("*/model.onnx"))) == 1


@pytest.mark.parametrize(("role", "unpad_kv"), GRAPHS)
def test_a_file_that_gives_other_logits_is_not_used(
    role: str,
    unpad_kv: bool,
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    written: list[Path] = []

    def spoil(graph: Path, data: Path) -> int:
        written.append(graph)
        align_packed(graph, data)
        content = bytearray(data.read_bytes())
        offsets = [int(found[1]) for found in re.finditer(rb"\|(\d+);\d+;", graph.read_bytes())]
        assert offsets
        for offset in offsets:
            content[offset : offset + 16] = bytes(16)
        data.write_bytes(content)
        return 0

    monkeypatch.setattr(ort_session, "align_packed", spoil)
    expected = run_steps(bundle, role, unpad_kv=unpad_kv, packed=False)
    for _ in range(2):
        for want, got in zip(expected, run_steps(bundle, role, unpad_kv=unpad_kv), strict=True):
            np.testing.assert_array_equal(want, got)
    graphs = 1
    assert len(written) == graphs, "it is not made at each load"
    refused = list((tmp_path / "cache" / "prepacked").glob("*/record.json"))
    assert not list((tmp_path / "cache" / "prepacked").glob("*/model.onnx*"))
    assert len(refused) == len(caplog.records) == graphs
    assert all("Packed weights are not kept" in record.getMessage() for record in caplog.records)


def test_the_probe_covers_verify_steps_of_the_bundle(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[int, ...]] = []
    probe = ort_probe.probe_session
    monkeypatch.setattr(
        ort_session, "probe_session", lambda session, widths: (seen.append(widths), probe(session, widths))[1]
    )
    open_executor(bundle, "target", num_threads=1, spin=False)
    assert seen == [(1, 2, bundle.manifest.lookahead + 1, ort_probe.PREFILL_WIDTH)] * 2
    open_executor(bundle, "target", num_threads=1, spin=False)
    assert len(seen) == 2, "a file that was proved is not probed again"


def test_the_reason_names_the_step() -> None:
    steps = [ProbedStep(1, "a", is_finite=True), ProbedStep(5, "b", is_finite=True)]
    assert difference(steps, list(steps)) is None
    assert difference(steps, [steps[0], ProbedStep(5, "c", is_finite=True)]) == (
        "they give other logits in a step of 5 tokens"
    )
    assert difference(steps, [steps[0], ProbedStep(5, "c", is_finite=False)]) == (
        "they give logits that are not finite in a step of 5 tokens"
    )
    broken = [steps[0], ProbedStep(5, "b", is_finite=False)]
    assert difference(broken, broken) == "its own logits are not finite in a step of 5 tokens"
