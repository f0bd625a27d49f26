"""The public API over fake executors: results, streaming, limits, refusals."""

import numpy as np
import pytest

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import EngineClosedError, InvalidRequestError
from specexport_runtime.intake.speculative_config import parse_speculative_config
from tests.support.fakes.engine import WORDS, make_engine
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB, greedy_reference, make_target


@pytest.fixture
def engine():
    return make_engine()


def test_results_come_in_the_order_of_the_prompts(engine):
    prompts = ["w1 w2", "w3", "w4 w5 w6", "w7", "w8", "w9 w9"]
    params = [SamplingParams(max_tokens=5 + 3 * (i % 3)) for i in range(6)]
    results = engine.generate(prompts, params)
    assert [result.prompt for result in results] == prompts
    for result, item in zip(results, params, strict=True):
        ids = [int(word[1:]) for word in result.prompt.split()]
        assert result.token_ids == greedy_reference(make_target(), ids, item.max_tokens)
        assert result.text == "".join(f" {WORDS[i]}" for i in result.token_ids)
        assert result.finish_reason == "length"


def test_speculative_plain_and_streamed_output_agree(engine):
    params = SamplingParams(max_tokens=30)
    fast = engine.generate("w1 w2", params)[0]
    plain = engine.generate("w1 w2", params, speculation=False)[0]
    chunks = list(engine.stream("w1 w2", params))
    assert fast.token_ids == plain.token_ids
    assert plain.stats.drafted == 0
    assert [token for chunk in chunks for token in chunk.token_ids] == fast.token_ids
    drafters = [drafter for chunk in chunks for drafter in chunk.drafters]
    assert drafters == fast.drafters
    assert len(drafters) == 30
    assert drafters.count("draft-model") == fast.stats.accepted > 0
    assert plain.drafters == [""] * 30
    assert "".join(chunk.text for chunk in chunks) == fast.text
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_an_engine_shows_what_it_is(engine):
    shown, rows = repr(engine), f"max_num_seqs={engine.max_num_seqs}, max_model_len={MAX_MODEL_LEN}"
    assert shown.startswith(f"SpecEngine('of no bundle', {rows}, K<={engine.lookahead}, drafters=")
    assert "draft-model" in shown
    assert "draft-model" not in repr(make_engine(None))


def test_stream_says_where_each_token_came_from(engine):
    chunks = list(engine.stream("w1 w2", SamplingParams(max_tokens=40), num_speculative_tokens=3))
    assert [piece.kind for piece in chunks[0].pieces] == ["target"]
    for chunk in chunks[1:-1]:
        kinds = [piece.kind for piece in chunk.pieces]
        assert kinds[:-1] == ["accepted"] * (len(kinds) - 1)
        assert kinds[-1] == ("bonus" if len(kinds) == 4 else "corrected")
    stats = chunks[-1].stats
    assert sum(piece.kind == "accepted" for chunk in chunks for piece in chunk.pieces) == stats.accepted


def test_token_id_prompts_and_single_prompts(engine):
    by_ids = engine.generate([1, 2], SamplingParams(max_tokens=6))
    by_text = engine.generate("w1 w2", SamplingParams(max_tokens=6))
    assert len(by_ids) == len(by_text) == 1
    assert by_ids[0].token_ids == by_text[0].token_ids
    by_array = engine.generate(np.array([1, 2]), SamplingParams(max_tokens=6))
    assert by_array[0].token_ids == by_text[0].token_ids
    assert engine.generate([]) == []
    assert len(engine.generate([[1, 2], "w3"], SamplingParams(max_tokens=2))) == 2


def test_a_seed_gives_the_same_text_and_no_seed_does_not(engine):
    params = SamplingParams(max_tokens=30, temperature=1.5, seed=5)
    first, second = (engine.generate("w1", params)[0].token_ids for _ in range(2))
    assert first == second
    free = SamplingParams(max_tokens=30, temperature=1.5)
    assert len({tuple(engine.generate("w1", free)[0].token_ids) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        *((prompt, "empty") for prompt in ("", [[]], [""])),
        *(([bad], f"{bad[-1]} of the prompt is out of range") for bad in ([-1], [1, VOCAB], [1, 2.5])),
        ([[1] * MAX_MODEL_LEN], f"has {MAX_MODEL_LEN} tokens"),
    ],
)
def test_what_is_no_prompt_or_too_long_is_refused(engine, prompt, said):
    with pytest.raises(InvalidRequestError, match=said):
        engine.generate(prompt)
    result = engine.generate([[1] * (MAX_MODEL_LEN - 1)], SamplingParams(max_tokens=9))[0]
    assert len(result.token_ids) == 1


@pytest.mark.parametrize("lookahead", [0, -1, 9])
def test_lookahead_outside_what_was_built_is_refused(engine, lookahead):
    with pytest.raises(InvalidRequestError, match=f"num_speculative_tokens is {lookahead}; .* 1 to 8") as caught:
        engine.generate("w1", num_speculative_tokens=lookahead)
    assert "--lookahead" in caught.value.hint
    with pytest.raises(InvalidRequestError, match="1 to 8"):
        engine.stream("w1", num_speculative_tokens=lookahead)  # at once, not at the first chunk


def test_as_many_parameters_as_prompts(engine):
    with pytest.raises(InvalidRequestError, match="2 sampling parameters"):
        engine.generate(["w1"], [SamplingParams(), SamplingParams()])


def test_default_lookahead_never_exceeds_what_was_built():
    engine = make_engine("same", lookahead=2)
    stats = engine.generate("w1", SamplingParams(max_tokens=31))[0].stats
    assert max(stats.accepted_histogram) == 2


def test_an_abandoned_stream_frees_its_row(engine):
    stream = engine.stream("w1", SamplingParams(max_tokens=60))
    next(stream)
    assert len(engine.generate("w1", SamplingParams(max_tokens=3))[0].token_ids) == 3  # they share the batch
    stream.close()
    assert len(engine.generate("w1", SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_stats_have_the_documented_fields(engine):
    result = engine.generate("w1 w2", SamplingParams(max_tokens=20))[0]
    stats = result.stats.to_json()
    assert stats["num_prompt_tokens"] == 2
    assert stats["num_generated_tokens"] == 20
    assert stats["acceptance_rate"] == stats["accepted"] / stats["drafted"]
    assert stats["mean_accepted_length"] == 1 + stats["accepted"] / sum(stats["accepted_histogram"].values())
    assert stats["tokens_per_second"] > 0
    assert 0 < stats["time_to_first_token_s"] <= result.stats.end_time - result.stats.start_time
    assert engine.times.total > 0


def test_each_drafter_has_its_own_counts(engine):
    """Against the trace: what each drafted, and what passed. Their sums are the sequence's."""
    result = engine.generate("w1 w2 w3 w1 w2", SamplingParams(max_tokens=60), drafter="chained", trace=True)[0]
    stats, expected = result.stats.to_json(), {}
    for each in result.trace:
        if each.drafted:
            counts = expected.setdefault(each.drafter, {"rounds": 0, "drafted": 0, "accepted": 0})
            counts["rounds"] += 1
            counts["drafted"] += len(each.drafted)
            counts["accepted"] += each.accepted
    assert set(expected) == {"lookup", "draft-model"}
    assert stats["drafters"] == {
        name: {**each, "branches": 0, "accepted_branches": 0} for name, each in expected.items()
    }
    for name in ("drafted", "accepted"):
        assert sum(counts[name] for counts in expected.values()) == stats[name] > 0
    assert sum(counts["rounds"] for counts in expected.values()) == result.stats.draft_rounds
    plain = engine.generate("w1", SamplingParams(max_tokens=3), drafter="none")[0].stats
    assert plain.to_json()["drafters"] == {}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_speculative_token": 3}, "'num_speculative_tokens'"),
        ({"method": "eagle"}, "this bundle has no head"),
        ({"method": "mlp_speculator"}, "'mlp_speculator'"),
        ({"model": "other"}, "'draft-name'"),
        ({"num_speculative_tokens": 9}, "1 to 8"),
        ({"num_speculative_tokens": "3"}, "integer"),
        ({"method": "ngram", "prompt_lookup_max": 4}, "longest match"),
        ({"method": "ngram", "model": "draft-name"}, "takes no model"),
        ({"prompt_lookup_min": 2}, "needs method 'ngram'"),
        ({"method": "none", "num_speculative_tokens": 2}, "drafts no tokens"),
    ],
)
def test_speculative_config_is_honoured_or_refused(config, words):
    with pytest.raises(InvalidRequestError, match=words):
        parse_speculative_config(config, sources={"draft-model": "draft-name"}, built=8)
    full = {"method": "draft_model", "model": "draft-name", "num_speculative_tokens": 3}
    assert parse_speculative_config(full, sources={"draft-model": "draft-name"}, built=8)[:2] == ("draft-model", 3)
    assert parse_speculative_config({}, sources={"draft-model": "draft-name"}, built=2).lookahead == 2
    with pytest.raises(InvalidRequestError, match="no draft"):
        parse_speculative_config({}, sources={}, built=8)


def test_a_head_in_a_speculative_config_is_the_bundles_own_and_ngram_is_lookup():
    parse = lambda config: parse_speculative_config(config, sources={"head": "my-head"}, built=8)  # noqa: E731
    assert parse({"method": "eagle3", "model": "my-head", "num_speculative_tokens": 3})[:2] == ("head", 3)
    assert parse({})[0] == "head"
    assert [parse({"method": name})[0] for name in ("eagle", "mtp", "medusa", "dflash", "dspark")] == ["head"] * 5
    with pytest.raises(InvalidRequestError, match="names head 'other'; this bundle was built with 'my-head'"):
        parse({"method": "eagle3", "model": "other"})
    with pytest.raises(InvalidRequestError, match="this bundle has no draft"):
        parse({"method": "draft_model"})
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3}
    assert parse_speculative_config(config, sources={}, built=8)[:3] == ("lookup", 5, 3)
    assert parse_speculative_config({"method": "ngram"}, sources={}, built=8)[:3] == ("lookup", 7, 2)


def test_our_own_methods_as_the_default_of_an_engine():
    def engine_of(config):
        return make_engine(
            draft_defaults=parse_speculative_config(config, sources={"draft-model": "draft-name"}, built=8)
        )

    plain = engine_of({"method": "none"})
    assert plain.generate("w1 w2")[0].stats.drafted == 0
    assert plain.generate("w1 w2", drafter="draft-model")[0].stats.drafted > 0
    with pytest.raises(InvalidRequestError, match="name a drafter"):
        plain.generate("w1 w2", num_speculative_tokens=2)
    for config, lookahead in (({"method": "chained"}, 4), ({"method": "chained", "num_speculative_tokens": 2}, 2)):
        chained = engine_of(config)
        trace = chained.generate("w1 w2 w3 w1 w2", SamplingParams(max_tokens=40), trace=True)[0].trace
        drafted = {
            name: [len(each.drafted) for each in trace if each.drafter == name] for name in ("lookup", "draft-model")
        }
        assert drafted["lookup"]
        assert max(drafted["draft-model"]) == lookahead


def test_a_default_that_the_target_cannot_honour_is_refused_at_load(demo_bundle):
    options = {"max_num_seqs": 1, "num_threads": 1, "spin": False, "speculative_config": {"method": "self"}}
    with pytest.raises(InvalidRequestError, match="unpadded KV"):
        SpecEngine.load(demo_bundle, unpad_kv=False, **options)
    engine = SpecEngine.load(demo_bundle, **options)
    stats = engine.generate("def f(x):", SamplingParams(max_tokens=24, ignore_eos=True))[0].stats
    assert max(stats.accepted_histogram) <= 3
    assert stats.layer_choice is not None


@pytest.mark.parametrize("text", ["w1 \ud800", "\udcff", "é \udfff"])
def test_halves_of_surrogate_pairs_are_no_text(engine, text):
    asks = (
        lambda: engine.generate(text),
        lambda: engine.submit("w1", drafter="lookup", reference=text),
        lambda: engine.submit("w1", SamplingParams(stop=("fine", text))),
        lambda: engine.encode(text),
    )
    for ask in asks:
        with pytest.raises(InvalidRequestError, match=r"is no text: character \d is '\\ud") as caught:
            ask()
        assert "UTF-8" in caught.value.hint


def test_what_is_no_prompt_parameter_or_part_is_told(engine):
    for call, words in (
        (lambda: engine.generate("w1", {"max_tokens": 3}), "SamplingParams"),
        (lambda: engine.generate(5), "token ids"),
        (lambda: SpecEngine("engines/demo"), "SpecEngine.load"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            call()
    with pytest.raises(TypeError, match=r"SamplingParams\(max_tokens=5\)"):
        engine.generate("w1", max_tokens=5)


def test_a_block_closes_its_engine():
    with make_engine() as engine:
        assert engine.generate("w1", SamplingParams(max_tokens=1))[0].token_ids
    with pytest.raises(EngineClosedError):
        engine.generate("w1")
