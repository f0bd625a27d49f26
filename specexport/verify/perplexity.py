"""What quantizing costs: perplexity on a text, against the float model's on the same tokens.

Perplexity is ``exp(mean -ln p(token | tokens before it))``. A text is cut into windows, each read from its first token
on, so that a window costs one prefill and no long cache. Both models see the same windows: the relative change is that
of the same tokens, and far more certain than either perplexity.

The loss says how likely the text is. The divergence says how far the next-token distributions are from the other
model's, whatever comes next: it is a sum over far more than one token a place, and so much more certain.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport.compile.closeness import log_softmax
from specexport.verify.tolerance import TextLimits
from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import Executor, Float32Array, Int32Array
from specexport_runtime.packing.batch import ModelRunner, RowWork

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_LIKELIEST = 64
"""Tokens of each distribution that are kept to compare with; all others count as one. What that hides of a divergence
is never negative, and little: these hold nearly all of a trained model's probability."""

WINDOW = 256
"""Tokens of a window, fewer where the bundle takes fewer."""

MAX_TOKENS = 4096
"""Most tokens of a text that are read: Gemma 3 270M takes about a minute for them on two cores, with eager torch."""

_LOGIT_BYTES = 64 * 2**20


class TopTokens(NamedTuple):
    """A model's likeliest next tokens at each of n places."""

    ids: Int32Array  # [n, k], the likeliest first
    logs: Float32Array  # [n, k], logarithms of their probabilities


class TextScore(NamedTuple):
    """What a model makes of a text."""

    loss: float  # mean of -ln p(token | tokens before it), in nats
    likeliest: TopTokens | None = None  # its distributions, to compare others with; None if it was compared itself
    # mean Kullback-Leibler divergence from the other model's, in nats; None if not compared
    divergence: float | None = None
    agreement: float | None = None  # share of the places where both have the same likeliest token; None if not compared


class TextScorer:
    """Adds up a score, a step's logits at a time.

    With ``cut_head``, an LM head that was cut, distributions are over its tokens, and places where another token comes
    are left out. ``reference`` holds the other model's distributions at the same places; None keeps this one's.
    """

    def __init__(self, cut_head: CutHead | None = None, reference: TopTokens | None = None) -> None:
        self._cut_head, self._reference = cut_head, reference
        self._loss, self._divergence, self._agreed, self._count = 0.0, 0.0, 0, 0
        self._kept: list[tuple[npt.NDArray[np.int32], Float32Array]] = []

    def add(self, logits: Float32Array, tokens: Sequence[int]) -> None:
        """Read n places: logits [n, V], or [n, N] from an engine with a cut head, and the n tokens that came."""
        for row, token in zip(logits, tokens, strict=True):
            if self._cut_head is None:
                self._score_row(row, token)
            elif token in self._cut_head.ids:
                own = row if len(row) == len(self._cut_head.ids) else row[self._cut_head.ids]
                self._score_row(own, int(self._cut_head.ids.searchsorted(token)))

    def _score_row(self, row: Float32Array, token: int) -> None:
        logs = log_softmax(row)
        self._loss -= float(logs[token])
        if self._reference is None:
            size = min(NUM_LIKELIEST, len(logs))
            ids = np.argpartition(logs, len(logs) - size)[-size:]
            ids = ids[np.argsort(-logs[ids], kind="stable")]
            self._kept.append((ids.astype(np.int32), logs[ids].astype(np.float32)))
        else:
            ids, theirs = self._reference.ids[self._count], self._reference.logs[self._count].astype(np.float64)
            self._divergence += _divergence(theirs, logs[ids])
            self._agreed += int(logs.argmax() == ids[0])
        self._count += 1

    def result(self) -> TextScore:
        """The score of all places so far; there must be one."""
        loss = self._loss / self._count
        if self._reference is not None:
            return TextScore(loss, None, self._divergence / self._count, self._agreed / self._count)
        ids, logs = zip(*self._kept, strict=True)
        return TextScore(loss, TopTokens(np.stack(ids), np.stack(logs)))


def _divergence(theirs: npt.NDArray[np.float64], ours: npt.NDArray[np.float64]) -> float:
    """Of two distributions over some tokens, by logarithms, with all other tokens as one."""
    likely = np.exp(theirs)
    rest, our_rest = (max(1.0 - float(np.exp(logs).sum()), 1e-12) for logs in (theirs, ours))
    return float(likely @ (theirs - ours)) + rest * float(np.log(rest / our_rest))


@dataclass(frozen=True)
class PerplexityResult:
    """One engine with quantized weights or caches against the float model."""

    role: str  # ``"target"`` or ``"draft"``
    passed: bool  # change and divergence are within their limits
    approximation: str | None  # see ``ModelEntry.approximation``
    num_tokens: int  # predicted
    perplexity: float  # the engine's
    reference_perplexity: float  # the float model's
    change: float  # ``perplexity / reference_perplexity - 1``; negative if the engine happens to be better
    limit: float  # largest change allowed
    # mean Kullback-Leibler divergence of the next-token distributions from the float model's, in nats; see
    # ``text_score``
    divergence: float
    divergence_limit: float  # largest one allowed, in nats
    agreement: float  # share of the tokens where both have the same likeliest one
    reference: str  # what the float model was, in words


def make_windows(
    texts: Sequence[str], tokenizer: "Tokenizer", *, vocab_size: int, max_model_len: int, max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    """Windows of at least two tokens, each led by what the tokenizer puts before a text (BOS where it does).

    No window spans two texts. Raises InvalidRequestError if no text has two tokens, or one has a token that the model
    does not know. After ``max_tokens`` in all, the rest is left out.
    """
    lead = list(tokenizer.encode("").ids)
    size = min(WINDOW, max_model_len) - len(lead)
    windows: list[list[int]] = []
    left = max_tokens
    for text in texts:
        ids = list(tokenizer.encode(text, add_special_tokens=False).ids)[:left]
        left -= len(ids)
        windows += [lead + ids[start : start + size] for start in range(0, len(ids), size)]
    windows = [window for window in windows if len(window) >= 2]
    if not windows:
        raise InvalidRequestError("the text has no two tokens, so nothing can be predicted.", "give a longer one.")
    if max(map(max, windows)) >= vocab_size:
        raise InvalidRequestError(f"the text has token ids of {vocab_size} and more.", "give one that the model knows.")
    return windows


def score_engine(
    executor: Executor,
    windows: Sequence[Sequence[int]],  # token ids, at least two each; the first of each is only read
    *,
    lookahead: int,  # K: engines with profiles compute the logits of K+1 tokens a step, and no more
    cut_head: CutHead | None = None,  # see ``TextScorer``
    reference: TopTokens | None = None,  # of :func:`score_logits` or another engine, to be compared with
) -> TextScore:
    """What an engine makes of a text; nothing else may use the engine meanwhile."""
    runner = ModelRunner(executor)
    most = runner.max_chunk if executor.max_num_tokens is None else lookahead + 1
    size = max(1, min(most, _LOGIT_BYTES // (4 * executor.vocab_size)))
    scorer = TextScorer(cut_head, reference)
    count_predicted(windows, cut_head)  # refuses a text of which nothing is predicted
    for window in windows:
        runner.kv.release(0)
        for start in range(0, len(window) - 1, size):
            chunk = list(window[start : min(start + size, len(window) - 1)])
            logits = runner.step(0, [RowWork(chunk, len(chunk))])
            scorer.add(logits, window[start + 1 : start + 1 + len(chunk)])
            runner.kv.commit(0, start + len(chunk))
    return scorer.result()


def score_logits(
    logits: Iterator[Float32Array], windows: Sequence[Sequence[int]], cut_head: CutHead | None = None
) -> TextScore:
    """What a model makes of a text, of its logits [len, V] for each window in turn."""
    scorer = TextScorer(cut_head)
    count_predicted(windows, cut_head)
    for rows, window in zip(logits, windows, strict=True):
        scorer.add(rows[:-1], window[1:])
    return scorer.result()


def count_predicted(windows: Sequence[Sequence[int]], cut_head: CutHead | None = None) -> int:
    """Tokens of all windows but the first of each, of a cut LM head's alone (InvalidRequestError for none)."""
    if cut_head is None:
        return sum(len(window) - 1 for window in windows)
    known = sum(int(np.isin(window[1:], cut_head.ids).sum()) for window in windows)
    if not known:
        raise InvalidRequestError("the draft's LM head has no token of the text.", "give a text of the kind it drafts.")
    return known


def compare_perplexity(
    role: str,  # ``"target"`` or ``"draft"``
    score: TextScore,  # the engine's
    float_loss: float,  # the float model's, in nats a token
    num_tokens: int,  # predicted
    *,
    approximation: str | None,  # see ``ModelEntry.approximation``
    limits: TextLimits,
    reference: str,  # what the float model was, in words
) -> PerplexityResult:
    """Judge an engine's score, compared with the float model's distributions, by the largest differences allowed."""
    change = math.expm1(score.loss - float_loss) if abs(score.loss - float_loss) < 700 else math.inf
    divergence = math.nan if score.divergence is None else score.divergence
    return PerplexityResult(
        role,
        change <= limits.perplexity and divergence <= limits.divergence,  # false for NaN
        approximation,
        num_tokens,
        perplexity=_perplexity(score.loss),
        reference_perplexity=_perplexity(float_loss),
        change=change,
        limit=limits.perplexity,
        divergence=divergence,
        divergence_limit=limits.divergence,
        agreement=math.nan if score.agreement is None else score.agreement,
        reference=reference,
    )


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
