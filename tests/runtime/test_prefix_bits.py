"""Prefix reuse on a real engine, also within a budget: the same texts, and log-probabilities to the last bit."""

from contextlib import closing

import pytest

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError

STARTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n",
    "The sum of 12 and 30 is 42, and the sum of 30 and 41 is",
)
SAID = ("# Now without them:\n", "def mul(a, b):\n", "class Numbers:\n    def __init__(self")


def converse(engine, drafter, temperature):
    """Two conversations side by side: tokens and log-probabilities of every turn, and how much was not read again."""
    said = [engine.encode(text)[1:] for text in SAID]
    histories, found, cached = [engine.encode(text) for text in STARTS], [], []
    for turn, ids in enumerate(said):
        params = [
            SamplingParams(max_tokens=20, temperature=temperature, seed=10 * turn + i, logprobs=3) for i in range(2)
        ]
        k = {} if drafter in ("none", "lookup") else {"num_speculative_tokens": 3}
        results = engine.generate(histories, params, drafter=drafter, **k)
        found += [(result.token_ids, result.logprobs) for result in results]
        cached.append([result.stats.cached_tokens for result in results])
        histories = [[*old, *new.token_ids, *ids] for old, new in zip(histories, results, strict=True)]
    return found, cached


@pytest.fixture(scope="module")
def int8_bundle(demo_pair, tmp_path_factory):
    from specexport.build.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    folder = tmp_path_factory.mktemp("prefixes") / "int8"
    target, draft = str(demo_pair / "target"), str(demo_pair / "draft")
    build_bundle(BuildRecipe(target=target, draft=draft, output=str(folder), quantize="int8", check=False))
    return folder


def compare(bundle, drafter, temperature, **options):
    """What :func:`converse` finds with and without reuse, the former with ``options``."""
    runs = []
    for own in ({**options}, {"enable_prefix_caching": False}):
        with closing(
            SpecEngine.load(bundle, **{"max_num_seqs": 2, "num_threads": 1, "spin": False, "adaptive": False, **own})
        ) as engine:
            engine._loop._check = True
            runs.append(converse(engine, drafter, temperature))
            engine.check()
    (found, cached), (wanted, nothing) = runs
    assert nothing == [[None, None]] * len(SAID)
    first, *later = cached
    assert first == [0, 0]
    # Layers are chosen by the whole prompt, so drafting with them reads it again.
    assert all((count > 40) == (drafter != "self") for turn in later for count in turn)
    return found, wanted


@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.parametrize(
    ("drafter", "temperature"), [("none", 0.0), ("draft-model", 0.0), ("draft-model", 0.8), ("lookup", 0.8)]
)
def test_int8_engines_give_the_same_bits(int8_bundle, drafter, temperature, budget):
    """Also where rows begin at pages, and memory goes back: there is room for two conversations, and for no others."""
    options = {"kv_cache_memory_bytes": "4MiB", "max_model_len": 256, "max_num_seqs": 4} if budget else {}
    found, wanted = compare(int8_bundle, drafter, temperature, **options)
    assert found == wanted


@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup", "self"])
def test_float_engines_give_the_same_texts(demo_bundle, drafter):
    """A float matrix product adds up otherwise in a longer step: the last bits differ, as they do between any steps."""
    found, wanted = compare(demo_bundle, drafter, 0.0)
    for (tokens, logprobs), (their_tokens, their_logprobs) in zip(found, wanted, strict=True):
        assert tokens == their_tokens
        each = [entry.logprob for entry in logprobs]
        assert each == pytest.approx([entry.logprob for entry in their_logprobs], abs=1e-5)


def test_a_pinned_prefix_stays(demo_bundle):
    with closing(
        SpecEngine.load(demo_bundle, max_num_seqs=1, prefix_rows=1, num_threads=1, spin=False, adaptive=False)
    ) as engine:
        system = engine.encode(STARTS[0])
        assert engine.pin_prefix(system) == len(system)
        with pytest.raises(InvalidRequestError, match="no row is left for a prefix: 1 keep prefixes"):
            engine.pin_prefix(STARTS[1])
        for text in (STARTS[1], SAID[2] * 3, STARTS[1] * 2):
            engine.generate(text, SamplingParams(max_tokens=20))
        known = engine.generate([[*system, 5, 6]], SamplingParams(max_tokens=4))[0]
        assert known.stats.cached_tokens == len(system)
        other = engine.generate([[*system, 5, 6]], SamplingParams(max_tokens=4), cache_salt="other")[0]
        assert other.stats.cached_tokens == 0
        assert other.token_ids == known.token_ids
        assert engine.unpin_prefix(system)
        assert not engine.unpin_prefix(system)
        with pytest.raises(InvalidRequestError, match="a prefix of 3 tokens cannot be kept"):
            engine.pin_prefix([1, 2, 3])
        engine.check()


def test_rows_for_prefixes_are_refused_where_nothing_is_kept(demo_bundle):
    with pytest.raises(InvalidRequestError, match="prefix_rows is 2, and this engine keeps no prefixes"):
        SpecEngine.load(demo_bundle, prefix_rows=2, enable_prefix_caching=False)
    with pytest.raises(InvalidRequestError, match="prefix_rows is -1"):
        SpecEngine.load(demo_bundle, prefix_rows=-1)
