"""The perplexity part: right numbers, in windows, and a limit for each quantization."""

import math
from itertools import chain

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from specexport.verify import perplexity
from specexport.verify.tolerance import text_limits
from specexport_runtime.errors import IncompatibleError, InvalidRequestError
from tests.support.fakes.verify_fakes import VOCAB, make_executor, word_tokenizer

WINDOWS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [4, 4], [9, 8, 7]]


def make_tokenizer(*, bos: bool = False) -> Tokenizer:
    tokenizer = word_tokenizer()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="w22 $A", special_tokens=[("w22", 22)])
    return tokenizer


def exact_loss(windows):
    executor, total = make_executor(), 0.0
    for window in windows:
        for i in range(1, len(window)):
            logits = executor.logits_after(window[:i]).astype(np.float64)
            total -= math.log(np.exp(logits[window[i]]) / np.exp(logits).sum())
    return total / sum(len(window) - 1 for window in windows)


@pytest.mark.parametrize("most", [None, 4])
def test_the_loss_is_that_of_the_formula_however_it_is_cut(most):
    executor = make_executor()
    executor.max_num_tokens = most  # an engine with profiles takes K+1 tokens a step
    found = perplexity.score_engine(executor, WINDOWS, lookahead=3)
    assert found.loss == pytest.approx(exact_loss(WINDOWS), rel=1e-6)
    assert max(shape.num_tokens for shape in executor.calls) == (10 if most is None else 4)
    assert perplexity.count_predicted(WINDOWS) == 13
    beside = perplexity.score_engine(executor, WINDOWS, lookahead=3, reference=found.likeliest)
    assert beside == perplexity.TextScore(found.loss, None, pytest.approx(0, abs=1e-6), 1.0)
    logits = (np.stack([executor.logits_after(w[: i + 1]) for i in range(len(w))]) for w in WINDOWS)
    assert perplexity.score_logits(logits, WINDOWS).loss == pytest.approx(found.loss, rel=1e-6)


def test_windows_are_led_by_bos_and_end_with_the_text():
    text = " ".join(f"w{i % 20}" for i in range(50))
    plain = perplexity.make_windows([text], make_tokenizer(), vocab_size=VOCAB, max_model_len=20)
    assert [len(window) for window in plain] == [20, 20, 10]
    assert list(chain.from_iterable(plain)) == [i % 20 for i in range(50)]
    led = perplexity.make_windows([text, "w3"], make_tokenizer(bos=True), vocab_size=VOCAB, max_model_len=20)
    assert [window[0] for window in led] == [22] * 4
    assert [len(window) for window in led] == [20, 20, 13, 2]
    assert led[-1] == [22, 3]
    short = perplexity.make_windows([text, text], make_tokenizer(), vocab_size=VOCAB, max_model_len=256, max_tokens=60)
    assert [len(window) for window in short] == [50, 10]
    for text, vocab_size in (("w3", VOCAB), ("", VOCAB), ("w1 w9 w2", 9)):
        with pytest.raises(InvalidRequestError):
            perplexity.make_windows([text], make_tokenizer(), vocab_size=vocab_size, max_model_len=20)


def judge(loss, kind="int8", divergence=0.0):
    limits, score = text_limits(kind, "float32", 2), perplexity.TextScore(loss, None, divergence, 1.0)
    return perplexity.compare_perplexity(
        "target", score, 2.0, 100, approximation=kind, limits=limits, reference="eager"
    )


def random_places(scale, vocab_size=200):
    generator = np.random.default_rng(4)
    theirs = generator.normal(0, 4, (30, vocab_size)).astype(np.float32)
    return theirs, theirs + generator.normal(0, scale, theirs.shape).astype(np.float32), [0] * len(theirs)


def test_the_divergence_is_that_of_the_whole_distributions():
    for scale, vocab_size in ((0.05, 200), (0.5, 200), (0.5, 40)):
        theirs, ours, tokens = random_places(scale, vocab_size)
        first = perplexity.TextScorer()
        first.add(theirs, tokens)
        likeliest = first.result().likeliest
        second = perplexity.TextScorer(reference=likeliest)
        second.add(ours[:10], tokens[:10])  # in any pieces
        second.add(ours[10:], tokens[10:])
        found = second.result()
        p, q = (np.exp(x - x.max(axis=1, keepdims=True)).astype(np.float64) for x in (theirs, ours))
        p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
        exact = float((p * np.log(p / q)).sum(axis=1).mean())
        assert found.divergence == pytest.approx(exact, rel=0.02)
        assert found.divergence <= exact * (1 + 1e-6)
        assert found.agreement == (theirs.argmax(axis=1) == ours.argmax(axis=1)).mean()
        assert found.loss == pytest.approx(-np.log(q[:, 0]).mean(), rel=1e-6)


def test_divergences_and_losses_beyond_their_limits_fail():
    limit = judge(2.0).divergence_limit
    assert judge(2.0, divergence=0.99 * limit).passed
    for options in ({"divergence": 1.01 * limit}, {"divergence": math.nan}, {"loss": math.nan}, {"loss": math.inf}):
        assert not judge(**{"loss": 2.0} | options).passed
    assert judge(1e4).perplexity == math.inf


def test_the_change_is_judged_by_the_limit_of_the_quantization():
    limit = judge(2.0).limit
    assert judge(2.0 + math.log1p(limit * 0.99)).passed
    assert not judge(2.0 + math.log1p(limit * 1.01)).passed
    assert judge(1.5).passed
    assert judge(2.1).change == pytest.approx(math.exp(0.1) - 1)
    assert judge(2.0).perplexity == judge(2.0).reference_perplexity == pytest.approx(math.exp(2))
    assert judge(2.0, None).limit < limit < judge(2.0, "int4").limit
    with pytest.raises(IncompatibleError, match="int3"):
        judge(2.0, "int3")
