"""What a GGUF file says of its tokenizer is honoured, also where transformers' conversion leaves it out."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.loaded import Checkpoint
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import GROUPED, make_model

TOKENS = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
NORMAL, CONTROL = 1, 3
# ids 259 and up; the merges make "12", two newlines, and a space with the first byte of a Roman numeral
PIECES = ["12", "\u010a\u010a", "\u0120\u00e2", "abc"]


def _load(folder: Path, *, ends: tuple[str, ...] = (), **stated: Any) -> tuple[Checkpoint, Tokenizer]:
    """A checkpoint whose file says ``stated`` of its tokenizer, which has ``ends`` as control tokens, from id 263."""
    tokens = [*TOKENS, *PIECES, *ends]
    tokens += [f"<extra{i}>" for i in range(320 - len(tokens))]
    settings: dict[str, Any] = {
        "tokens": tokens,
        "token_type": [CONTROL if i < 3 or tokens[i] in ends else NORMAL for i in range(len(tokens))],
        "merges": ["1 2", "\u010a \u010a", "\u0120 \u00e2"],
    }
    path = folder / "tiny.gguf"
    write_gguf(
        make_model("Qwen2", GROUPED),
        path,
        stated={f"tokenizer.ggml.{name}": value for name, value in (settings | stated).items()},
    )
    checkpoint = load_checkpoint(str(path))
    return checkpoint, Tokenizer.from_str(checkpoint.tokenizer_json.decode())


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    found: list[str] = tokenizer.encode(text).tokens
    return found


_GPT2 = {"12": ["12"], "\n\n7": ["\u010a", "\u010a", "7"], " \u2167": ["\u0120\u00e2"]}


@pytest.mark.parametrize(
    ("stated", "split"),
    [
        # A Roman numeral counts as a digit.
        ({"pre": "smollm"}, {"12": ["1", "2"], "\n\n7": ["\u010a\u010a", "7"], " \u2167": ["\u0120"]}),
        ({"pre": "gpt-2"}, _GPT2),
        ({"pre": None}, _GPT2),
        ({"pre": "default"}, _GPT2),
        ({"pre": "qwen2"}, {"12": ["1", "2"], "x\n\n": ["x", "\u010a\u010a"], "abc": ["a", "b", "c"]}),
        ({"pre": "llama-bpe"}, {"abc": ["<s>", "abc"]}),  # no merges lead there
        ({"pre": "llama-bpe", "add_bos_token": False}, {"abc": ["abc"]}),
    ],
)
def test_text_is_split_as_the_file_says(stated: dict[str, Any], split: dict[str, list[str]], tmp_path: Path) -> None:
    """Digits, what stands before them, new lines, and words that no merges lead to; of each, the first pieces."""
    _, tokenizer = _load(tmp_path, **stated)
    for text, pieces in split.items():
        assert _pieces(tokenizer, text)[: len(pieces)] == pieces
        assert len(_pieces(tokenizer, text)) == len(pieces) or "\u2167" in text


def test_an_unknown_way_to_split_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tiny\.gguf splits text as 'esperanto' does") as caught:
        _load(tmp_path, pre="esperanto")
    assert "Hugging Face checkpoint" in (caught.value.hint or "")


@pytest.mark.parametrize("end", ["<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|eot_id|>"])
def test_control_tokens_that_end_a_turn_end_a_text(tmp_path: Path, end: str) -> None:
    checkpoint, _ = _load(tmp_path, ends=("<|im_start|>", end))
    assert checkpoint.eos_token_ids == (2, 264)


def test_a_token_ends_a_text_by_its_kind_or_because_the_file_names_it(tmp_path: Path) -> None:
    plain = [NORMAL] * 320
    checkpoint, _ = _load(tmp_path, ends=("<|im_end|>", "<fin>"), token_type=plain, eot_token_id=264)
    assert checkpoint.eos_token_ids == (2, 264)


def test_the_end_of_a_message_does_not_end_a_harmony_turn(tmp_path: Path) -> None:
    checkpoint, _ = _load(tmp_path, ends=("<|return|>", "<|call|>", "<|end|>"))
    assert checkpoint.eos_token_ids == (2, 263, 264)


@pytest.mark.parametrize(("prefix", "first"), [(True, "\u2581a"), (False, "a"), (None, "\u2581a")])
def test_the_space_before_a_sentencepiece_text_is_the_files(tmp_path: Path, prefix: bool | None, first: str) -> None:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a"]
    tokens += [f"<extra{i}>" for i in range(320 - len(tokens))]
    stated: dict[str, Any] = {"model": "llama", "tokens": tokens, "add_bos_token": False}
    stated |= {"merges": None, "scores": [float(-i) for i in range(320)], "add_space_prefix": prefix}
    stated["token_type"] = [2, CONTROL, CONTROL] + [NORMAL] * 317
    _, tokenizer = _load(tmp_path, **stated)
    assert _pieces(tokenizer, "ab")[0] == first
    assert tokenizer.decode(tokenizer.encode("ab").ids) == "ab"
    if prefix is False:
        assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"
