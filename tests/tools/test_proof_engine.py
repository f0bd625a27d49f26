"""The proof engine, interpreted: executor and loop over the plugin lowering's graph give eager greedy texts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.trace.check import compute_reference_logits
from tests.gpu.conftest import Rows
from tests.gpu.test_loop import report_texts
from tests.support.references.engine_harness import make_checkpoint
from tools.proof import export, texts
from tools.proof.checkpoints import SIZES, ensure_pair, make_tensors
from tools.proof.graph import Graph, from_json, shipped_graph, to_json
from tools.proof.models import PLANS, ensure_engine, kv_capacity

WORKER = Path(__file__).parents[1] / "support" / "references" / "proof_worker.py"
HALF_NOISE = 2.5e-3  # of the largest logit: transformers' own float16 is up to 1.9e-3 off in two layers


def run_worker(folder: Path, *scenarios: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(WORKER), str(folder), *scenarios],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def load_float32(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return make_checkpoint(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proof")
    ensure_engine(folder, "tiny", "target")
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def decoded(pair: Path) -> Any:
    return run_worker(pair, "plain", "drafted", "itself")


@pytest.fixture(scope="module")
def eager(checkpoints: Path) -> Any:
    target, _ = ensure_pair(checkpoints, "tiny", decisive=False)
    return load_float32(target)


def require_greedy(eager: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is eager transformers' best one, and ahead of all others by more than float16 can hide."""
    (logits,) = compute_reference_logits(eager, [[*prompt, *tokens]])
    rows = logits[len(prompt) - 1 : -1]
    assert rows.argmax(1).tolist() == tokens
    second, best = np.partition(rows, -2, axis=1)[:, -2:].T
    assert (best - second).min() > 2 * HALF_NOISE * np.abs(logits).max(), "another prompt: rounding may decide here"


@pytest.mark.parametrize("scenario", ["plain", "drafted", "itself"])
def test_greedy_texts_are_eager_transformers(scenario: str, decoded: Any, eager: Any) -> None:
    from tests.support.references.proof_worker import PROMPTS

    prompts = {"plain": PROMPTS[:1], "drafted": PROMPTS, "itself": PROMPTS[1:2]}[scenario]
    found = decoded[scenario]
    assert len(found["outputs"]) == len(prompts)
    for prompt, tokens in zip(prompts, found["outputs"], strict=True):
        require_greedy(eager, prompt, tokens)


def test_sampled_texts_are_drawn_on_the_device_as_on_the_host(pair: Path) -> None:
    """The real kernels, interpreted, in the real loop."""
    found = run_worker(pair, "sampled")["sampled"]
    assert found["found"][0] == found["found"][1]
    assert found["found"][2] == found["found"][3]
    steps, fetches = found["counts"]
    assert steps > 4
    assert fetches <= 1, "rows of this model are flat: after four of them one comes whole"


def test_drafts_are_refused_and_accepted_and_graphs_replayed(decoded: Any) -> None:
    assert decoded["plain"]["replays"] == [0]
    assert decoded["drafted"]["acceptance"] < 0.5
    assert decoded["itself"]["acceptance"] == 1.0
    assert decoded["itself"]["rounds"] == 2  # the first token, then 5 and 5
    assert all(min(decoded[name]["replays"]) >= 2 for name in ("drafted", "itself"))


def test_a_kept_graph_is_what_the_compiler_makes(checkpoints: Path) -> None:
    """The others are told from it below: a trace takes seconds, that of the large model a minute."""
    text = export.export_role("tiny", "target", checkpoints)
    assert (export.FOLDER / "tiny-target.json").read_text() == text, "python -m tools.proof.export"
    assert to_json(from_json(text)) == text


def pattern(graph: Graph) -> list[str]:
    """Operators, plugins without their sizes, and without splits."""
    ops = [node.op.partition("_float16")[0] for node in graph.nodes]
    return [op for op in ops if op != "combine_splits"]


@pytest.mark.parametrize("model", list(PLANS))
def test_larger_kept_graphs_are_the_tiny_one_with_more_layers(model: str) -> None:
    two, one = (pattern(shipped_graph("tiny", role)) for role in ("target", "draft"))
    start = next(i for i, (a, b) in enumerate(zip(two, one, strict=False)) if a != b)
    layer = two[start : start + len(two) - len(one)]
    for role in ("target", "draft"):
        graph = shipped_graph(model, role)
        layers = len(graph.caches) // 2
        assert pattern(graph) == one[:start] + layer * (layers - 1) + one[start:]
        assert graph.caches[0].shape[2] == kv_capacity(PLANS[model])
        assert any(node.op.startswith("combine_splits") for node in graph.nodes) == (model != "tiny")
        tensors = dict.fromkeys(key for key, _ in make_tensors(SIZES["tiny"], seed=1, decisive=False))
        assert {key for key in graph.weights.values() if ".0." in key or "layers" not in key} <= set(tensors)
    assert len(shipped_graph(model, "target").caches) // 2 == SIZES[model].layers


@pytest.mark.parametrize("model", list(texts.NUM_TOKENS))
def test_the_kept_texts_are_eager_transformers(model: str, checkpoints: Path) -> None:
    """The CPU engine's, that is: a near tie may be decided otherwise here."""
    target, _ = ensure_pair(checkpoints, model, decisive=False)
    kept = texts.read_texts(model)
    assert [text.prompt for text in kept] == texts.prompts_of(model)
    rows = compute_reference_logits(load_float32(target), [[*text.prompt, *text.tokens] for text in kept])
    for text, logits in zip(kept, rows, strict=True):
        chosen = logits[len(text.prompt) - 1 : -1]
        best = chosen[np.arange(len(text.tokens)), text.tokens]
        others = chosen.copy()
        others[np.arange(len(text.tokens)), text.tokens] = -np.inf
        np.testing.assert_allclose(best - others.max(1), text.gaps, atol=2e-4)
        assert float(np.abs(chosen).max()) == pytest.approx(text.scale, abs=0.01)


def test_a_text_may_part_from_the_cpu_engines_only_where_that_was_nearly_a_tie() -> None:
    kept = [texts.Text([1], [5, 6, 7], [0.5, gap, 0.5], 2.0) for gap in (0.5, 0.01)]
    rows = Rows(None, tiny=True)
    for what, outputs in (("same", [5, 6, 7]), ("apart", [5, 8, 7])):
        for i, text in enumerate(kept):
            report_texts(rows, f"{what} {i}", [text], [outputs])
    verdicts = {what: verdict for what, (_, verdict, _) in rows.found.items()}
    assert verdicts == {"same 0": "ok", "same 1": "ok", "apart 0": "wrong", "apart 1": "ok"}
    assert len(rows.wrong) == 1
    assert rows.found["apart 1"][2]["equal"] == 1
    assert rows.found["apart 0"][2]["worst"] == 0.25
