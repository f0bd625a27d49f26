"""Prompts of files: what JSON lines may look like, and how each bad one is named."""

import json

import pytest

from specexport.bench.prompts import read_prompts as read_bench_prompts
from specexport_runtime.cli.prompts import PromptItem, read_prompts
from specexport_runtime.errors import InvalidRequestError


def read(path):
    return list(read_prompts(None, None, path))


READERS = {
    "generate and verify": lambda path: [item.text for item in read(path)],
    "bench": lambda path: [item.text for item in read_bench_prompts([path])],
}
DEEP = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, reader, newline):
    path = tmp_path / "p.jsonl"
    path.write_bytes(newline.join(['\ufeff{"prompt": "a"}', "", '{"prompt": "\ufeffb"}', ""]).encode())
    assert READERS[reader](path) == ["a", "\ufeffb"]


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa\ufeffb".encode())
    assert list(read_prompts(None, path, None)) == [PromptItem("a\ufeffb")]
    path.write_bytes("a".encode("utf-16"))
    with pytest.raises(InvalidRequestError, match="byte 0xff at offset 0"):
        list(read_prompts(None, path, None))


@pytest.mark.parametrize("reader", READERS)
def test_only_newlines_end_a_line(tmp_path, reader):
    text = "one\u2028two\u0085three"
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
    assert READERS[reader](path) == [text]


def test_references_come_along(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "reference": "b"}\n{"prompt": "c"}')
    assert read(path) == [PromptItem("a", "b"), PromptItem("c")]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3: this is not JSON"),
        (DEEP, "line 3: this is nested too deeply"),
        ("[1]", "line 3: this is no JSON object"),
        ('{"prompt": "a \\ud800"}', r"line 3: `prompt` is no text: character 3 is '\\ud800'"),
        ('{"prompt": "a", "reference": "\\udfff"}', "line 3: `reference` is no text"),
        ('{"prompt": ' + "1" * 5000 + "}", "line 3: this is not JSON"),
    ],
    ids=["cut", "deep", "list", "surrogate", "surrogate reference", "long number"],
)
def test_a_bad_line_is_named(tmp_path, reader, line, said):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line)
    with pytest.raises(InvalidRequestError, match=said) as caught:
        READERS[reader](path)
    assert caught.value.hint.startswith(("write one object a line", "give text in UTF-8"))
