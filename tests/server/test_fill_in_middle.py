"""``suffix`` of ``/v1/completions``: the text between two others, by the tokens that a model has for it."""

import pytest
from openai import BadRequestError

from specexport_runtime.server.config import ServerConfig
from tests.support.fakes.middle_fakes import INDENT, LAYOUTS, filling_engine
from tests.support.servers.openai_help import client_of
from tests.support.servers.serving import Served

SUM = (
    "def total(rows):\n" + INDENT,
    "return sum(row.price for row in rows)",
    "\n\n\ndef mean(rows):\n    return total",
)
COPY = (
    "first = open(path).read()\nsecond = ",
    "open(other).read()\n",
    "\nthird = open(other).read()\nsecond = open(other).read()\nx = 1\n",
)
RUN_ON = ("a = 1\n", "b = 2\n\n\nclass Thing:\n    size = 5\n", "\n\nclass Thing:\n    size = 5\n    name = 6\n")
ODD = ("x<|fim_middle|>y<|end|> <fim_suffix>[PREFIX] ", " é\n  ", "  <|fim_prefix|><｜fim▁hole｜>[SUFFIX]\t\n")
EMPTY = ("", "import os\n", "os.getcwd()")
FILLED = (SUM, COPY, RUN_ON, ODD, EMPTY)
DRAFTERS = ("none", "draft-model", "lookup", "suffix", "auto")


@pytest.fixture(scope="module", params=LAYOUTS)
def served(request):
    # What is spelled like a control token is none, special or not.
    engine = lambda: filling_engine(request.param, *FILLED, special=request.param == "starcoder")  # noqa: E731
    with Served(engine, ServerConfig(model_name="fills", max_prompt_tokens=300)) as served:
        yield served


@pytest.fixture(scope="module")
def complete(served):
    with client_of(served) as client:

        def complete(filled, **params):
            prefix, _, suffix = filled
            params = {"temperature": 0, "max_tokens": 100} | params
            return client.completions.create(**{"model": "fills", "prompt": prefix, "suffix": suffix} | params)

        yield complete


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("filled", FILLED, ids=lambda filled: repr(filled[1][:8]))
def test_the_text_is_what_belongs_between(complete, filled, drafter):
    extra = {"speculative": {"drafter": drafter}}
    answer = complete(filled, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (filled[1], "stop")
    prefix, _, suffix = (len(text.replace(INDENT, " ").encode()) for text in filled)
    assert prefix + suffix + 2 <= answer.usage.prompt_tokens <= prefix + suffix + 3
    chunks = complete(filled, extra_body=extra, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == filled[1]


def test_choices_of_several_prompts_have_one_suffix(complete):
    answer = complete(SUM, prompt=[SUM[0], "no such"], n=2, logprobs=1, seed=1, max_tokens=50)
    assert [choice.text == SUM[1] for choice in answer.choices] == [True, True, False, False]
    tokens = answer.choices[0].logprobs.tokens
    assert "".join(tokens[: len(SUM[1])]) == SUM[1]
    assert len(tokens) == len(SUM[1]) + 1  # and what ended it


def test_the_end_is_shown_or_passed_if_that_is_asked_for(complete):
    shown = complete(SUM, extra_body={"skip_special_tokens": False}).choices[0]
    assert (shown.text[: len(SUM[1]) + 1], shown.finish_reason) == (SUM[1] + "<", "stop")
    going = complete(SUM, max_tokens=60, extra_body={"ignore_eos": True})
    assert (going.choices[0].finish_reason, going.usage.completion_tokens) == ("length", 60)


@pytest.mark.parametrize("drafter", ["lookup", "suffix"])
def test_copies_are_found_by_the_end_of_the_prefix(complete, drafter):
    """The prompt ends otherwise: with a control token after the suffix."""
    options = {"drafter": drafter, "num_speculative_tokens": 7, "token_origins": True, "remember": False}
    answer = complete(COPY, extra_body={"speculative": options})
    kinds = [token["kind"] for token in answer.choices[0].model_extra["tokens"]]
    assert set(kinds[:7]) == {"accepted"}
    assert kinds.count("accepted") > 0.7 * len(COPY[1])


@pytest.mark.parametrize("drafter", ["lookup", "suffix"])
def test_what_runs_on_into_the_suffix_is_copied_from_it(complete, drafter):
    options = {"drafter": drafter, "num_speculative_tokens": 7, "token_origins": True, "remember": False}
    tokens = complete(RUN_ON, extra_body={"speculative": options}).choices[0].model_extra["tokens"]
    begin = RUN_ON[1].index("class")
    kinds = [token["kind"] for token in tokens[begin + 2 : len(RUN_ON[1])]]
    assert kinds.count("accepted") > 0.7 * len(kinds)


@pytest.mark.parametrize(
    ("params", "param", "code"),
    [
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"prompt": [5, 6]}, "prompt", "unsupported_parameter"),
        ({"prompt": [[5, 6], [7]]}, "prompt", "unsupported_parameter"),
        ({"suffix": 5}, "suffix", "invalid_type"),
        ({"suffix": "x" * 150, "prompt": "y" * 150}, "prompt", "limit_exceeded"),
        ({"suffix": "x" * 5000}, "suffix", "limit_exceeded"),
        ({"max_tokens": 1999}, "max_tokens", "context_length_exceeded"),
    ],
    ids=str,
)
def test_what_cannot_be_filled_in_is_refused(complete, served, params, param, code):
    with pytest.raises(BadRequestError) as error:
        complete(SUM, **params)
    assert (error.value.body["param"], error.value.body["code"]) == (param, code)
    served.wait_until_idle()


def test_an_empty_suffix_is_none(complete):
    assert complete(SUM, suffix="").choices[0].text != SUM[1]


def test_a_model_without_the_tokens_says_so(fake_served):
    with client_of(fake_served) as client, pytest.raises(BadRequestError) as error:
        client.completions.create(model="fake", prompt="w1", suffix="w2")
    assert (error.value.body["param"], error.value.body["code"]) == ("suffix", "unsupported_parameter")
    assert "no tokens to fill in the middle" in error.value.body["message"]
