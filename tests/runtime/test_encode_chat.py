"""Prompts of conversations: the template writes the special tokens, the tokenizer must not add them again."""

import asyncio
import json

import pytest
from click.testing import CliRunner
from tokenizers.processors import TemplateProcessing

from specexport_runtime import AsyncSpecEngine, SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError
from tests.support.fakes.engine import make_engine
from tests.support.fakes.loop import MAX_MODEL_LEN, greedy_reference, make_target

BOS = 16
TEMPLATE = "{{ bos_token }} {% for m in messages %}{{ m['content'] }} {% endfor %}"
HELLO = [{"role": "user", "content": "w3 w4"}]


def open_engine():
    engine = make_engine(chat_template=TEMPLATE, special_tokens={"bos_token": "w16"})
    engine.tokenizer.post_processor = TemplateProcessing(single="w16 $A", special_tokens=[("w16", BOS)])
    return engine


@pytest.fixture
def engine():
    return open_engine()


def test_the_beginning_of_sequence_is_there_once(engine):
    assert engine.encode("w3 w4") == [BOS, 3, 4]
    assert engine.encode("") == [BOS]
    assert engine.encode(engine.format_chat(HELLO)) == [BOS, BOS, 3, 4]  # why there is encode_chat
    assert engine.encode_chat(HELLO) == [BOS, 3, 4]


def test_a_template_that_writes_none_gets_none(engine):
    engine._chat_template = "{{ messages[0].content }}"
    assert engine.encode_chat(HELLO) == [3, 4]


def test_a_conversation_is_answered(engine):
    result = engine.chat(HELLO, SamplingParams(max_tokens=6), drafter="lookup")
    assert result.prompt == [BOS, 3, 4]
    assert result.token_ids == greedy_reference(make_target(), [BOS, 3, 4], 6)
    engine._chat_template = "{{ word }} {{ messages[0].content }}"
    more = {"template_arguments": {"word": "w9"}}
    assert engine.chat(HELLO, SamplingParams(max_tokens=1), **more).prompt == [9, 3, 4]
    with pytest.raises(InvalidRequestError, match="knows no tools"):
        engine.chat(HELLO, tools=[{"type": "function", "function": {"name": "w7"}}])

    async def ask():
        service = AsyncSpecEngine(engine)
        with pytest.raises(InvalidRequestError, match="no content"):
            await service.chat([{"role": "user"}])
        return await service.chat(HELLO, SamplingParams(max_tokens=1), owner="me", **more)

    assert asyncio.run(ask()).prompt == [9, 3, 4]


def test_generate_chat_feeds_those_tokens(monkeypatch, tmp_path):
    from specexport_runtime.cli.command import runtime_cli

    monkeypatch.setattr(SpecEngine, "load", lambda *_, **__: open_engine())
    wanted = greedy_reference(make_target(), [BOS, 3, 4], 6)
    arguments = ["generate", str(tmp_path), "w3 w4", "--chat", "--max-tokens", "6", "--max-num-seqs", "1"]
    as_json = CliRunner().invoke(runtime_cli, [*arguments, "--json"], catch_exceptions=False)
    record = json.loads(as_json.stdout)
    assert record["token_ids"] == wanted
    assert record["stats"]["num_prompt_tokens"] == 3
    assert record["prompt"].split() == ["w16", "w3", "w4"]
    text = CliRunner().invoke(runtime_cli, [*arguments, "--no-show-prompt"], catch_exceptions=False)
    assert text.stdout.split() == [f"w{token}" for token in wanted]


def test_long_or_empty_conversations_are_refused(engine):
    engine.encode_chat([{"role": "user", "content": "w1 " * (MAX_MODEL_LEN - 2)}])
    with pytest.raises(InvalidRequestError, match=f"has {MAX_MODEL_LEN} tokens"):
        engine.encode_chat([{"role": "user", "content": "w1 " * (MAX_MODEL_LEN - 1)}])
    engine._chat_template = ""
    with pytest.raises(InvalidRequestError, match="is left out"):
        engine.encode_chat(HELLO)
    engine._chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        engine.encode_chat(HELLO)
    assert engine.generate([1], SamplingParams(max_tokens=2))


def test_a_message_goes_on(engine):
    begun = [*HELLO, {"role": "assistant", "content": "w5 w6"}]
    assert engine.format_chat(begun, continue_final_message=True).endswith("w3 w4 w5 w6")
    wanted = greedy_reference(make_target(), [BOS, 3, 4, 5, 6], 4)
    assert engine.chat(begun, SamplingParams(max_tokens=4), continue_final_message=True).token_ids == wanted

    async def ask():
        service = AsyncSpecEngine(engine)
        return await service.chat(begun, SamplingParams(max_tokens=4), continue_final_message=True)

    assert asyncio.run(ask()).token_ids == wanted
    for messages in (HELLO, [*HELLO, {"role": "assistant", "content": [{"type": "image"}]}]):
        with pytest.raises(InvalidRequestError, match="cannot go on"):
            engine.encode_chat(messages, continue_final_message=True)
