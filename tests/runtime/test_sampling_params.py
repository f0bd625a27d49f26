"""Every sampling parameter is checked, and says how to fix a wrong value."""

import dataclasses
import math

import numpy as np
import pytest

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "hot", None, True]), ("top_k", [-1, 1.5, True]),
        ("top_p", [-1e-9, 1.0001, -1, math.nan]), ("min_p", [-0.01, 1.01]),
        ("repetition_penalty", [0.0, -1.0, math.inf]), ("presence_penalty", [2.1, math.nan]),
        ("frequency_penalty", [-2.1]),
        ("logit_bias", [[1, 2], {-1: 1.0}, {"a": 1.0}, {1: math.inf}, {1: math.nan}, {1: "x"}]),
        ("seed", [1.5, "x", True, 2**127, -(2**127) - 1]), ("max_tokens", [0, -5, 2.0]),
        ("logprobs", [True, 21, -1, 1.5, "3"]), ("stop", ["", ("a", ""), ("a", 3), 3, b"x"]),
        ("stop_token_ids", [(-1,), ("x",), "12", 5]), ("shown_special_tokens", [(-1,)]), ("ignore_eos", [1]),
        ("include_stop_str_in_output", ["yes"]), ("skip_special_tokens", [None]),
    ],
)  # fmt: skip
def test_out_of_range_is_refused_by_name_with_a_fix(name, values):
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{name: value})
        assert name in caught.value.message
        assert caught.value.hint


def test_edges_of_the_ranges_are_accepted_and_normalised():
    params = SamplingParams(
        temperature=np.float32(1), top_k=np.int64(3), top_p=1, min_p=1, presence_penalty=-2,
        logit_bias={np.int64(4): 1, 5: -math.inf}, seed=-(2**127), stop=["a", "b"], stop_token_ids=[np.int32(7)],
    )  # fmt: skip
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.logit_bias == {4: 1.0, 5: -math.inf}
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (7,)
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams().stop_strings == ()
    assert hash(params) == hash(dataclasses.replace(params))


def test_params_keep_their_own_bias():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 5.0
    assert params.logit_bias == {1: 1.0}


def test_bias_beyond_the_vocabulary_is_refused_by_the_sampler():
    with pytest.raises(InvalidRequestError, match="token 10"):
        Sampler(SamplingParams(logit_bias={10: 1.0}), [1], 10)
    Sampler(SamplingParams(logit_bias={9: 1.0}), [1], 10)
