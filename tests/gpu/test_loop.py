"""The executor and decoding loop over a proof engine: texts are the CPU engine's, and what ``verify`` proves holds.

The graphs are those that a build for ``tensorrt`` makes, lowering ``plugin``; the attention is our kernels. So all that
this package runs on a GPU is tried, and only NVIDIA's builder is not.
"""

from typing import TYPE_CHECKING

import pytest

from tools.proof.checkpoints import SIZES
from tools.proof.models import PLANS
from tools.proof.steps import decode, random_tokens
from tools.proof.texts import Text, read_texts

if TYPE_CHECKING:
    from tests.gpu.conftest import Engines, Rows

pytestmark = pytest.mark.gpu
LARGEST_GAP = 4e-2
"""Of the largest logit: two logits of float16, each off by 2e-2 (``steps.LOGIT_TOLERANCE``)."""


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
def test_greedy_texts_are_the_cpu_engines(drafts: bool, batch: int, proof: "Engines", rows: "Rows") -> None:
    if rows.tiny and batch == 1:
        pytest.skip("this shows nothing more of a tiny model")
    model = "tiny" if rows.tiny else "small"
    texts, lookahead = read_texts(model)[:batch], PLANS[model].lookahead
    target, draft = proof.open(), proof.open("draft") if drafts else None
    count = 5 if rows.tiny else len(texts[0].tokens)
    found = decode(target, [text.prompt for text in texts], count, draft=draft, lookahead=lookahead)
    how = f"draft model, K={lookahead}, acceptance {found.acceptance:.3f}" if found.acceptance is not None else "plain"
    report_texts(rows, f"proof: greedy, {batch} at a time, {how}", texts, found.outputs)
    assert not rows.wrong


def report_texts(rows: "Rows", what: str, texts: list[Text], outputs: list[list[int]]) -> None:
    """One row: tokens that are equal, and how narrowly the CPU engine decided where a text parts first.

    ``texts`` are the CPU engine's, ``outputs`` the proof engine's, as long or shorter.
    """
    equal, total, worst = 0, 0, 0.0
    for text, output in zip(texts, outputs, strict=True):
        same = next((i for i, token in enumerate(output) if token != text.tokens[i]), len(output))
        equal, total = equal + same, total + len(output)
        if same < len(output):
            worst = max(worst, text.gaps[same] / max(1.0, text.scale))
    parted = f"; the CPU engine's gap where they part: up to {worst:.1e} of its largest logit" if worst else ""
    rows.right(what, f"{equal} of {total} tokens as the CPU engine's, before the first that differs{parted}",
               f"all, or gaps up to {LARGEST_GAP:.0e}", worst <= LARGEST_GAP, equal=equal, worst=worst)  # fmt: skip


def test_the_proof_engine_passes_what_verify_compares_with_itself(proof: "Engines", rows: "Rows") -> None:
    tokenizers = pytest.importorskip("tokenizers")

    from specexport.rounding import logit_tolerance
    from specexport.verify.greedy import check_greedy
    from specexport.verify.logits import check_neighbours
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.engine_parts import EngineParts

    model, tiny = ("tiny" if rows.tiny else "small"), rows.tiny
    target, draft = (proof.open(role, graphs=not tiny) for role in ("target", "draft"))
    lookahead, tolerance = 2 if tiny else 4, logit_tolerance("float16", SIZES[model].layers).largest
    prompts = random_tokens(target.vocab_size, 2 if tiny else 4, 7, seed=3)
    if not tiny:
        alone = check_neighbours("target", target, prompts, lookahead=lookahead, tolerance=tolerance)
        rows.right(
            "proof: a token's logits beside others in a step",
            f"differ by up to {alone.max_relative:.1e} of the logit scale from those alone",
            f"at most {alone.tolerance:.0e}", alone.max_relative <= alone.tolerance,
        )  # fmt: skip
    vocabulary = {f"t{i}": i for i in range(target.vocab_size)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    engine = SpecEngine(EngineParts(target, words, 64 if tiny else 256, draft=draft, lookahead=lookahead))
    found = check_greedy(
        engine, prompts, lookaheads=(lookahead,) if tiny else (), max_tokens=3 if tiny else 48, tolerance=tolerance
    )
    same = sum(run.identical for run in found.runs)
    rows.right(
        "proof: verify, greedy",
        f"{same} of {len(found.runs) * found.num_prompts} outputs as plain decoding's, {found.near_ties} part where "
        f"rounding decides, {found.failures} elsewhere",
        "none elsewhere", found.passed, drafters=[f"{run.drafter}, K={run.lookahead}" for run in found.runs],
    )  # fmt: skip
    assert not rows.wrong
