"""Trees on a real engine: texts as without drafts, whatever drafts, in ragged batches."""

import pytest

from specexport_runtime import SamplingParams, SpecEngine, StructuredOutputs

TEXTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
    "The sum of 12 and 30 is",
    "one two three one two four one two five one two",
    "x",
]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
KINDS = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
    "penalties": SamplingParams(max_tokens=24, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4),
    "stop strings": SamplingParams(max_tokens=40, stop=["re", "\n\n"]),
    "grammar": SamplingParams(max_tokens=24, structured_outputs=StructuredOutputs(json=SCHEMA)),
    "log-probabilities": SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2),
}


@pytest.fixture(scope="module")
def engine(demo_bundle):
    engine = SpecEngine.load(demo_bundle, num_threads=1, spin=False, max_num_seqs=3, max_model_len=128)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(engine):
    return {name: told(engine, params, drafter="none") for name, params in KINDS.items()}


def told(engine, params, **options):
    results = engine.generate(TEXTS, params, **options)
    return [(result.text, result.token_ids, result.finish_reason, result.logprobs) for result in results]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("drafter", "lookahead", "size"),
    [
        ("draft-model", 4, 12), ("lookup", 7, 16), ("suffix", 1, 4), ("self", 3, 9), ("chained", 7, 16),
        ("auto", None, "auto"),
    ],
)  # fmt: skip
def test_texts_are_those_of_plain_decoding(engine, plain, drafter, lookahead, size, name):
    options = {"drafter": drafter, "num_speculative_tokens": lookahead, "tree_size": size}
    assert told(engine, KINDS[name], **options) == plain[name]


def test_more_is_accepted_of_a_tree_than_of_its_chain(engine):
    tokens = []
    for size in (0, 12):
        results = engine.generate(
            TEXTS, KINDS["greedy"], drafter="draft-model", num_speculative_tokens=3, tree_size=size
        )
        tokens.append(sum(len(each.token_ids) for each in results) / sum(each.stats.rounds for each in results))
    assert tokens[1] > 1.04 * tokens[0]


def test_a_seed_s_text_does_not_depend_on_the_batch(engine):
    params = [SamplingParams(max_tokens=20, temperature=0.9, seed=i, ignore_eos=True) for i in range(len(TEXTS))]
    options = {"drafter": "draft-model", "num_speculative_tokens": 3, "tree_size": 9}
    together = [each.token_ids for each in engine.generate(TEXTS, params, **options)]
    alone = [engine.generate([text], each, **options)[0].token_ids for text, each in zip(TEXTS, params, strict=True)]
    assert together == alone
