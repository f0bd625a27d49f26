"""A step of a running decode, with all inputs of its graph, copied just before ONNX Runtime gets them."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import KV_POSITIONS
from specexport_runtime.bundle.opened import Bundle
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import Executor, Float32Array, StepOutput, Want
from specexport_runtime.executors.open import open_executor
from specexport_runtime.packing.batch import ModelRunner, RowWork

StepKind = Literal["prefill", "decode", "verify"]
Feeds = dict[str, npt.NDArray[Any]]


class CapturedStep(NamedTuple):
    """One step of one sequence."""

    kind: StepKind
    tokens: tuple[int, ...]  # new in the step
    context: tuple[int, ...]  # the tokens before them, whose entries the cache holds
    # every input of the graph contract by name, the inputs of padded-KV graphs included; gates are left out
    feeds: Feeds
    logits: Float32Array  # of the engine, [R, V]

    @property
    def past(self) -> int:
        """Cache entries that were there before."""
        return len(self.context)

    def feeds_of(self, inputs: dict[str, int]) -> Feeds:
        """The feeds of a graph, by the names of its inputs."""
        return {name: self.feeds[name] for name in inputs}


class _Recorder:
    """An executor that keeps the inputs of its last step."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.feeds: Feeds = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, want: Want = "logits") -> StepOutput:
        self.feeds = self._executor.step_inputs()
        output: StepOutput = self._executor.execute(want)
        return output


def capture_step(
    bundle: Bundle, role: str, prompt: Sequence[int], kind: StepKind, *, after: int = 0, num_threads: int | None = None
) -> CapturedStep:
    """Decode until the wanted step, and run it.

    A verify step holds the next token and, as its draft, the K tokens that greedy decoding goes on with. A prefill step
    takes the first chunk of the prompt, with the logits of every token; otherwise ``after`` tokens are decoded before
    the step. The cache rows of ``bundle`` must be long enough.

    Raises InvalidRequestError if the prompt is empty or too long, IncompatibleError or BundleError if the engine cannot
    be opened.
    """
    lookahead = bundle.manifest.lookahead
    if not prompt:
        raise InvalidRequestError("the prompt has no tokens.", "give some text.")
    needed = len(prompt) + after + lookahead + 1
    if needed > bundle.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens; with what is decoded after it that is {needed}, and this bundle "
            f"takes {bundle.max_model_len}.",
            "give a shorter prompt, or a smaller --after.",
        )
    executor = open_executor(bundle, role, num_threads=num_threads, spin=False)
    try:
        return _decode(executor, list(prompt), kind, after, lookahead)
    finally:
        executor.close()


def _decode(executor: Executor, prompt: list[int], kind: StepKind, after: int, lookahead: int) -> CapturedStep:
    recorder = _Recorder(executor)
    runner = ModelRunner(cast("Executor", recorder))  # it passes on what it is not itself
    text: list[int] = []
    if kind == "prefill":
        tokens = prompt[: runner.max_chunk]
    else:
        text = _greedy(runner, prompt, after)
        tokens, past = [text.pop()], runner.kv.kv_len(0)
        for drafts in range(1, lookahead + 1 if kind == "verify" else 1):
            tokens.append(_step_greedily(runner, tokens[-1], drafts))
        runner.kv.commit(0, past)  # rolls the draft back
    past = runner.kv.kv_len(0)
    drafts = len(tokens) - 1 if kind == "verify" else 0
    logits = runner.step(0, [RowWork(tokens, len(tokens), drafts=drafts)]).copy()
    feeds = recorder.feeds
    positions = np.arange(executor.kv_capacity, dtype=KV_POSITIONS.dtype)
    feeds[KV_POSITIONS.name] = np.where(positions < past + len(tokens), positions, -1)[None, None]
    return CapturedStep(kind, tuple(tokens), tuple(text), feeds, logits)


def _greedy(runner: ModelRunner, prompt: list[int], after: int) -> list[int]:
    """Prefill, and decode ``after`` tokens; returns the whole text, whose last token is not in the cache yet."""
    runner.prefill(0, prompt[:-1])
    text = list(prompt)
    for _ in range(after):
        text.append(_step_greedily(runner, text[-1]))
    return text


def _step_greedily(runner: ModelRunner, token: int, drafts: int = 0) -> int:
    """Commit ``token``, with which so many are to be rolled back; returns what greedy decoding puts after it."""
    (found,) = runner.step(0, [RowWork([token], 1, drafts=drafts)], "token_ids").tolist()
    runner.kv.commit(0, runner.kv.kv_len(0) + 1)
    return int(found)
