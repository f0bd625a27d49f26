"""One architecture: a tiny model is made, built, held to eager transformers, and decoded with drafts and without."""

import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

WORKS, REFUSED, NOT_MADE, NOT_A_DECODER = "works", "refused", "not made", "not a decoder"
UNROLLED = "unrolled"
TRACEBACK, DIFFERS, TIMEOUT = "traceback", "differs", "timeout"
DEFECTS = (TRACEBACK, DIFFERS, TIMEOUT)

LOOKAHEAD = 4
TOLERANCE = 1e-4
"""Of the largest logit."""
_LENGTHS = (33, 40, 26)
_PROMPTS = ("abcabcabcabc", "x", "for i in range(9):\n  print(i)\n")
_MAX_PARAMETERS = 50_000_000
_NOT_CAUSAL = ("is not causal", "encoder-decoder")


class Outcome(NamedTuple):
    """What came of an architecture."""

    name: str  # its ``model_type``
    model: str  # class of the model
    outcome: str  # one of the words above
    reason: str = ""  # why not, or the traceback
    # largest difference of logits, in parts of the largest logit; None if none were compared
    error: float | None = None
    seconds: float = 0.0  # it took
    # of a deep model of it: UNROLLED, or why all layers are traced; empty if none was tried
    layers: str = ""


def attempt(name: str, folder: Path) -> Outcome:
    """Make, build and compare an architecture, by its ``model_type``, in an empty folder."""
    start = time.monotonic()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    layers = ""
    try:
        outcome, reason, error = _attempt(name, folder)
        if outcome == WORKS:
            layers, equal = _trace_deep(name)
            if not equal:
                outcome, reason = DIFFERS, "a few traced layers give another engine than all"
    except Exception:
        outcome, reason, error = TRACEBACK, traceback.format_exc(), None
    return Outcome(name, CLASSES[name], outcome, reason, error, round(time.monotonic() - start, 1), layers)


def _trace_deep(name: str) -> tuple[str, bool]:
    from tools.sweep_lib.unrolled import compare_traces

    try:
        whole, equal = compare_traces(name)
    except Exception as error:  # not every configuration bears more layers
        return _one_line(f"no deep model was made ({type(error).__name__})"), True
    return UNROLLED if whole is None else whole, equal


def _attempt(name: str, folder: Path) -> tuple[str, str, float | None]:
    from specexport.checkpoint.load import load_checkpoint
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe
    from specexport_runtime.errors import CheckFailedError, SpecexportError, UserInputError

    try:
        _make(name, folder / "model")
    except Exception as error:
        return NOT_MADE, _one_line(f"{type(error).__name__}: {error}"), None
    recipe = BuildRecipe(target=str(folder / "model"), output=str(folder / "bundle"), max_model_len=128)
    try:
        build_bundle(recipe, use_cache=False)
    except UserInputError as error:
        reason = _one_line(error.message)
        return (NOT_A_DECODER if any(words in reason for words in _NOT_CAUSAL) else REFUSED), reason, None
    except CheckFailedError as error:
        return DIFFERS, _one_line(str(error)), None
    except SpecexportError as error:
        return TRACEBACK, _one_line(f"{type(error).__name__}: {error}"), None
    worst = _compare(load_checkpoint(str(folder / "model")), folder / "bundle")
    if not worst <= TOLERANCE:
        return DIFFERS, f"logits differ from eager transformers by {worst:.1e} of the largest one", worst
    return (DIFFERS, reason, worst) if (reason := _decode(folder / "bundle")) else (WORKS, "", worst)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def _make(name: str, folder: Path) -> None:
    """Write a tiny checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.models.tiny_models import randomize, save_checkpoint
    from tools.sweep_lib.shrink import shrink

    config = shrink(name)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > _MAX_PARAMETERS:
        raise ValueError(f"{count} parameters are left")
    model = randomize(AutoModelForCausalLM.from_config(config))
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("its logits are not finite")
    save_checkpoint(model, folder)


def _compare(checkpoint: Any, bundle: Path) -> float:
    """Largest difference of logits, in parts of the largest logit, in rounds of every width with some right drafts."""
    from specexport.trace.check import compute_reference_logits
    from specexport_runtime.bundle.manifest import load_manifest
    from specexport_runtime.executors.ort import OrtExecutor
    from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork

    entry = load_manifest(bundle).models["target"]
    random = np.random.default_rng(7)
    sequences = [random.integers(3, 256, length).tolist() for length in _LENGTHS]
    expected = compute_reference_logits(checkpoint, sequences)
    largest = max(float(np.abs(logits).max()) for logits in expected)
    executor = OrtExecutor(
        bundle / entry.engine.path, entry, num_rows=3, kv_capacity=64, num_threads=1, spin=False, lookahead=LOOKAHEAD
    )
    runner, worst = ModelRunner(executor), 0.0

    def note(row: int, start: int, logits: npt.NDArray[np.float32]) -> None:
        nonlocal worst
        found = float(np.abs(logits - expected[row][start : start + len(logits)]).max()) / largest
        worst = max(worst, found if np.isfinite(found) else float("inf"))

    for row, chunks in enumerate([(9,), (5, 1, 8), (2, 2)]):
        for chunk in chunks:
            start = runner.kv.kv_len(row)
            note(row, start, runner.step(row, [RowWork(sequences[row][start : start + chunk], chunk)]))
            runner.kv.commit(row, start + chunk)
    width = 0
    while any(runner.kv.kv_len(row) < len(ids) for row, ids in enumerate(sequences)):
        work, right = [], []
        for row, ids in enumerate(sequences):
            start = runner.kv.kv_len(row)
            width = (width + 1) % (LOOKAHEAD + 2)  # 0 drafts to K drafts, and a round without the row
            drafts = min(width, len(ids) - start - 1)
            if drafts < 0 or width > LOOKAHEAD:
                work.append(IDLE)
                right.append(0)
                continue
            good = int(random.integers(0, drafts + 1))
            wrong = random.integers(3, 256, drafts - good).tolist()
            work.append(RowWork([*ids[start : start + 1 + good], *wrong], 1 + drafts, drafts=drafts))
            right.append(1 + good)
        if not any(right):
            continue
        logits = runner.step(0, work)
        for row, count in enumerate(right):
            if count:
                start, begin = runner.kv.kv_len(row), runner.logit_starts[row]
                note(row, start, logits[begin : begin + count])
                runner.kv.commit(row, start + count)
    return worst


def _scripted(texts: Sequence[Sequence[int]]) -> Any:
    """A drafter of how known texts go on, with every fifth token wrong."""
    from specexport_runtime.drafters.base import Drafter, DrafterTraits, Proposal
    from tests.support.models.tiny_models import VOCAB

    class Scripted(Drafter):
        traits = DrafterTraits(default_lookahead=LOOKAHEAD, is_free=True)

        def propose(self, requests: Any, lookaheads: Any, begun: Any = None) -> Any:  # noqa: ARG002
            proposals = []
            for request, limit in zip(requests, lookaheads, strict=True):
                known = list(request.tokens)
                text = next((text for text in texts if list(text[: len(known)]) == known), ())
                ahead = enumerate(text[len(known) : len(known) + limit], len(known))
                proposals.append(Proposal([(token + (at % 5 == 0)) % VOCAB for at, token in ahead]))
            return proposals

    return Scripted()


def _decode(bundle: Path) -> str:
    """Why texts with drafts are not those without, ragged and greedy; empty if they are."""
    from specexport_runtime import SamplingParams, SpecEngine

    texts: list[list[int]] = []
    engine = SpecEngine.load(
        bundle,
        max_num_seqs=2,
        num_threads=1,
        spin=False,
        adaptive=False,
        drafters={"scripted": lambda _: _scripted(texts)},
    )
    with closing(engine):
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        prompts = [engine.encode(prompt) for prompt in _PROMPTS]
        plain = [result.token_ids for result in engine.generate(prompts, params, drafter="none")]
        texts += [[*prompt, *ids] for prompt, ids in zip(prompts, plain, strict=True)]
        for drafter, lookahead in (("scripted", LOOKAHEAD), ("scripted", 1), ("lookup", LOOKAHEAD)):
            found = engine.generate(prompts, params, drafter=drafter, num_speculative_tokens=lookahead)
            if [result.token_ids for result in found] != plain:
                return f"greedy text with drafter {drafter} and K {lookahead} is not that without"
            if drafter == "scripted" and not sum(result.stats.accepted for result in found):
                return "no scripted draft was accepted"
        engine.check()
    return ""
