"""Prefix reuse, pauses and budgets on a real engine: the same texts, and log-probabilities to the last bit."""

import pytest

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.structured import StructuredOutputs
from tests.support.fakes.rounds import opened

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
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    folder = tmp_path_factory.mktemp("prefixes") / "int8"
    target, draft = str(demo_pair / "target"), str(demo_pair / "draft")
    build_bundle(BuildRecipe(target=target, draft=draft, output=str(folder), quantize="int8", check=False))
    return folder


def compare(bundle, drafter, temperature, **options):
    """What :func:`converse` finds with and without reuse, the former with ``options``."""
    runs = []
    for own in (options, {"enable_prefix_caching": False}):
        with opened(bundle, **({"rows": 2} | own)) as engine:
            runs.append(converse(engine, drafter, temperature))
    (found, cached), (wanted, nothing) = runs
    assert nothing == [[None, None]] * len(SAID)
    first, *later = cached
    assert first == [0, 0]
    # Layers are chosen by the whole prompt, so drafting with them reads it again.
    assert all((count > 40) == (drafter != "self") for turn in later for count in turn)
    return found, wanted


@pytest.mark.parametrize(
    ("drafter", "temperature", "budget"),
    [("none", 0.0, True), ("draft-model", 0.0, False), ("draft-model", 0.8, True), ("lookup", 0.8, False)],
)
def test_int8_engines_give_the_same_bits(int8_bundle, drafter, temperature, budget):
    """Also where rows begin at pages, and memory goes back: there is room for two conversations, and for no others."""
    options = {"kv_cache_memory_bytes": "4MiB", "max_model_len": 256, "rows": 4} if budget else {}
    found, wanted = compare(int8_bundle, drafter, temperature, **options)
    assert found == wanted


@pytest.mark.parametrize("drafter", ["draft-model", "lookup", "self"])
def test_float_engines_give_the_same_bits(demo_bundle, drafter):
    found, wanted = compare(demo_bundle, drafter, 0.0)
    assert found == wanted


def paused(engine, marks, drafter, **sampling):
    """A request that gives its row to a more urgent one each time that it has so many tokens."""
    marks, params = list(marks), SamplingParams(**({"max_tokens": 90, "ignore_eos": True, "logprobs": 3} | sampling))
    urgent = SamplingParams(max_tokens=3)

    def watch(chunk):
        if marks and chunk.stats.num_generated_tokens >= marks[0]:
            del marks[0]
            engine.submit(STARTS[1], urgent, priority=-1)

    options = {} if drafter in ("none", "lookup") else {"num_speculative_tokens": 3}
    result = engine.submit(STARTS[0], params, drafter=drafter, callback=watch, **options).result()
    assert not marks
    return result


def pause_both(engine, drafter, **sampling):
    alone, again = (paused(engine, marks, drafter, **sampling) for marks in ((), (8, 60)))
    assert (alone.stats.preemptions, again.stats.preemptions) == (0, 2)
    assert alone.stats.accepted_lengths == again.stats.accepted_lengths
    return alone, again


@pytest.mark.parametrize("reuse", [False, True], ids=["read again", "kept"])
def test_a_pause_changes_no_bit_of_an_int8_engine(int8_bundle, reuse):
    rows = {"prefix_rows": 1} if reuse else {"enable_prefix_caching": False}
    with opened(int8_bundle, 1, **rows) as engine:
        for drafter, temperature in (("none", 0.8), ("draft-model", 0.0), ("draft-model", 0.8), ("lookup", 0.8)):
            alone, again = pause_both(engine, drafter, temperature=temperature, seed=4, repetition_penalty=1.1)
            assert (again.token_ids, again.logprobs, again.text) == (alone.token_ids, alone.logprobs, alone.text)


def test_a_pause_changes_no_bit_of_a_float_engine(demo_bundle):
    with opened(demo_bundle, 1, enable_prefix_caching=False) as engine:
        for drafter in ("draft-model", "self"):
            alone, again = pause_both(engine, drafter)
            assert (again.token_ids, again.logprobs) == (alone.token_ids, alone.logprobs)


def test_a_text_of_a_given_form_goes_on_where_it_was(int8_bundle):
    pytest.importorskip("llguidance")
    form = StructuredOutputs(regex="[a-z]{40}-[0-9]{60}")
    with opened(int8_bundle, 1) as engine:
        sampling = {"max_tokens": 110, "temperature": 1.0, "seed": 2, "structured_outputs": form, "ignore_eos": False}
        alone, again = (paused(engine, marks, "lookup", **sampling) for marks in ((), (20, 70)))
    assert again.stats.preemptions >= 1
    assert again.text == alone.text
    assert again.stats.drafters == alone.stats.drafters


def test_a_pinned_prefix_stays(demo_bundle):
    with opened(demo_bundle, 1, prefix_rows=1) as engine:
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


def test_rows_for_prefixes_are_refused_where_nothing_is_kept(demo_bundle):
    with pytest.raises(InvalidRequestError, match="prefix_rows is 2, and this engine keeps no prefixes"):
        SpecEngine.load(demo_bundle, prefix_rows=2, enable_prefix_caching=False)
    with pytest.raises(InvalidRequestError, match="prefix_rows is -1"):
        SpecEngine.load(demo_bundle, prefix_rows=-1)
