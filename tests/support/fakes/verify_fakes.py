"""Engines over fake executors for the tests of verify."""

import numpy as np
from tokenizers import Tokenizer

from specexport_runtime import SpecEngine
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.logit_rows import argmax_ids
from tests.support.fakes.engine import make_tokenizer
from tests.support.fakes.engine_of import engine_of

VOCAB = 23
CAPACITY = 140
MAX_MODEL_LEN = 128
LOOKAHEAD = 4

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [3, 3, 3, 2]]

DRAFTS = {"same": {}, "good": {"noise": 0.8}, "random": {"seed": 99}, "adversarial": {"negate": True}}


def make_executor(kind: type[FakeExecutor] = FakeExecutor, **options: object) -> FakeExecutor:
    return kind(VOCAB, 8, CAPACITY, **options)


def word_tokenizer() -> Tokenizer:
    return make_tokenizer(VOCAB)


def make_engine(draft: str | None = "good", target: FakeExecutor | None = None, **options: object) -> SpecEngine:
    return engine_of(
        target or make_executor(), word_tokenizer(), draft=make_executor(**DRAFTS[draft]) if draft else None,
        max_model_len=MAX_MODEL_LEN, **{"lookahead": LOOKAHEAD} | options,
    )  # fmt: skip


class WidthDependent(FakeExecutor):
    """A target whose two likeliest tokens are ``gap`` apart, and change places in steps of several tokens."""

    def __init__(self, *sizes: int, gap: float = 1e-6, **options: object) -> None:
        super().__init__(*sizes, **options)
        self.gap = gap

    def logits_after(self, tokens, mask=None):
        logits = super().logits_after(tokens, mask).copy()
        first, second = np.argsort(logits)[::-1][:2]
        logits[second] = logits[first] - np.float32(self.gap)
        return logits

    def execute(self, want="logits"):
        wide = self._shape.max_new_tokens > 1
        logits = super().execute().copy()
        if wide:
            first, second = np.argsort(logits, axis=1)[:, ::-1][:, :2].T
            rows = np.arange(len(logits))
            logits[rows, second], logits[rows, first] = logits[rows, first], logits[rows, second]
        return logits if want == "logits" else argmax_ids(logits)
