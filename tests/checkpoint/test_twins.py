"""Two ids with one text: each is written as that text, and the text is read as it was before."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.source import Source
from specexport.checkpoint.tokenizer import load_tokenizer
from specexport.checkpoint.vocabulary import read_token_texts, separate_duplicate_texts
from specexport_runtime.errors import CheckpointError
from specexport_runtime.requests.text import decode_continuation
from specexport_runtime.requests.token_bytes import get_token_name, token_bytes
from specexport_runtime.server.token_text import TokenTexts
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import GROUPED, make_model


def added(index: int, text: str) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": text, "special": True, **plain}


def check(tokenizer: Tokenizer, texts: dict[int, bytes], first: str = "a") -> None:
    """Each way that a token becomes text, against the file's own words."""
    size = max(texts) + 1
    as_bytes, single = token_bytes(tokenizer, size), TokenTexts(tokenizer)
    (before,) = tokenizer.encode(first, add_special_tokens=False).ids
    for index, text in texts.items():
        whole = text.decode("utf-8", errors="replace")
        assert tokenizer.decode([before, index, index], skip_special_tokens=False) == first + 2 * whole, index
        assert decode_continuation(tokenizer, [before], [index, index, before]) == 2 * whole + first, index
        assert (as_bytes[index], single[index].data) == (text, text), index
        assert not (get_token_name(tokenizer, index) or "").endswith("\ufdd0")


def test_twins_of_a_gguf_file(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *letters, "the", "th", "<user>", "th", "a", "<user>", "<s>", "th", "the"]
    tokens += [f"<extra{i}>" for i in range(320 - len(tokens))]
    kinds = [{"<": 3}.get(text[0], 1) if len(text) > 1 else 1 for text in tokens]
    stated = {"tokens": tokens, "token_type": kinds, "merges": ["t h", "th e"], "pre": "qwen2"}
    write_gguf(
        make_model("Qwen2", GROUPED),
        tmp_path / "tiny.gguf",
        stated={f"tokenizer.ggml.{name}": value for name, value in stated.items()},
    )
    tokenizer = Tokenizer.from_str(load_checkpoint(str(tmp_path / "tiny.gguf")).tokenizer_json.decode())
    spelled = {index: text.encode() for index, text in enumerate(tokens) if tokens.count(text) > 1}
    assert len(spelled) == 11
    check(tokenizer, spelled, first="b")
    last = {text: index for index, text in enumerate(tokens)}  # as llama.cpp reads a text
    for text in ("the", "th", "a", "<user>", "<s>"):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [last[text]]


def sentencepiece() -> dict[str, Any]:
    """Byte tokens from id 3 on, then a few pieces."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocab = {name: index for index, name in enumerate(names)}
    model = models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    data: dict[str, Any] = json.loads(tokenizer.to_str())
    return data


def doubled(data: dict[str, Any], twins: dict[str, int]) -> bytes:
    """A ``tokenizer.json`` whose vocabulary names some texts again: the later id is the one that counts."""
    text = json.dumps(data, ensure_ascii=False)
    for name, index in twins.items():
        entry = json.dumps(name, ensure_ascii=False) + ": "
        assert text.count(entry) == 1
        text = text.replace(entry, f"{entry}{index}, {entry}")
    return text.encode()


def test_twins_of_a_tokenizer_json(tmp_path: Path) -> None:
    data = sentencepiece()
    data["added_tokens"] = [added(270, "<x>"), added(271, "<x>"), added(272, "<y>")]
    twins = {"<0xE2>": 264, "<0x41>": 265, "\u2581a": 266, "b": 267}
    (tmp_path / "tokenizer.json").write_bytes(doubled(data, twins))
    source = Source("tiny", tmp_path, None, ())
    tokenizer = Tokenizer.from_str(load_tokenizer(source).json.decode())
    texts = {264: b"\xe2", 3 + 0xE2: b"\xe2", 265: b"A", 3 + 0x41: b"A", 266: b" a", 262: b" a", 267: b"b", 261: b"b"}
    check(tokenizer, texts | {270: b"<x>", 271: b"<x>", 272: b"<y>"})
    assert tokenizer.encode("<x>b\u2581a<y>").ids == [271, 261, 262, 272], "as transformers reads it"
    assert tokenizer.decode([270, 271, 260, 272]) == "a"
    assert decode_continuation(tokenizer, [260], [264, 3 + 0x82, 3 + 0xAC]) == "\u20ac", (
        "one character of three byte tokens"
    )


def test_a_vocabulary_without_twins_stays_as_it_is() -> None:
    whole = json.dumps(sentencepiece()).encode()
    assert separate_duplicate_texts(Source("tiny", Path(), None, ()), whole, read_token_texts(whole)) == whole


def test_a_list_of_pieces_holds_twins_by_itself_and_a_bare_tokenizer_none() -> None:
    source = Source("tiny", Path(), None, ())
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("a", -2.0)], unk_id=0))
    pieces.decoder = decoders.Fuse()
    whole = pieces.to_str().encode()
    assert separate_duplicate_texts(source, whole, read_token_texts(whole)) == whole
    assert token_bytes(pieces, 4) == [b"<unk>", b"a", b"b", b"a"]
    data = sentencepiece() | {"decoder": None}
    whole = doubled(data, {"b": 263})
    with pytest.raises(CheckpointError, match=r"tiny: two tokens have the text 'b'.*263"):
        separate_duplicate_texts(source, json.dumps(data).encode(), read_token_texts(whole))
