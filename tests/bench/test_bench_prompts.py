"""Prompts of a benchmark: files, the built-in set, and what is refused."""

import json

import pytest

from specexport.bench.prompts import BenchPrompt, by_domain, mix_domains, read_prompts
from specexport_runtime.errors import InvalidRequestError


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_builtin_prompts_have_three_domains_of_eight():
    groups = by_domain(read_prompts([]))
    assert {domain: len(prompts) for domain, prompts in groups.items()} == {"code": 8, "math": 8, "copy": 8}
    texts = [prompt.text for prompts in groups.values() for prompt in prompts]
    assert len(set(texts)) == 24


def test_fields_of_a_line_and_what_stands_in_for_them(tmp_path):
    one = write(
        tmp_path / "one.jsonl",
        {"prompt": "p", "id": "x", "domain": "d", "reference": "r", "other": 1},
        {"prompt": "q"},
        {"prompt": "s\u2028t", "id": 7},
    )
    two = write(tmp_path / "two.jsonl", {"prompt": "u"})
    assert read_prompts([one, two]) == [
        BenchPrompt("x", "d", "p", "r"),
        BenchPrompt("one/2", "one", "q"),
        BenchPrompt("7", "one", "s\u2028t"),
        BenchPrompt("two/1", "two", "u"),
    ]


def test_number_is_of_each_domain_and_domains_are_chosen():
    prompts = read_prompts([], num_prompts=2, domains=["copy", "code"])
    assert [prompt.id for prompt in prompts] == ["code/0", "code/1", "copy/0", "copy/1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: this is not JSON"),
        ("[]", "line 2: this is no JSON object"),
        ('{"text": "a"}', "line 2: there is no field `prompt`"),
        ('{"prompt": ""}', "line 2: `prompt` is ''"),
        ('{"prompt": 3}', "line 2: `prompt` is 3"),
        ('{"prompt": "a", "domain": []}', "line 2: `domain` is"),
        ('{"prompt": "a", "reference": 1}', "line 2: `reference` is 1"),
        ('{"prompt": "a", "id": "x"}', "two prompts have the id 'x'"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, said):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine", "id": "x"}\n' + line + "\n")
    with pytest.raises(InvalidRequestError, match=said) as caught:
        read_prompts([path])
    assert caught.value.hint


def test_files_without_prompts_and_domains_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="did you mean 'code'"):
        read_prompts([], domains=["cod"])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(InvalidRequestError, match="has no prompts"):
        read_prompts([empty])
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_prompts([tmp_path / "none.jsonl"])
    empty.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        read_prompts([empty])


def test_mixed_domains_take_turns():
    prompts = [*(BenchPrompt(f"a{i}", "a", "x") for i in range(3)), BenchPrompt("b0", "b", "y")]
    mixed = mix_domains(prompts)
    assert [prompt.id for prompt in mixed] == ["a0", "b0", "a1", "a2"]
    assert {prompt.domain for prompt in mixed} == {"mixed"}
