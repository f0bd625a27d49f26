"""Checkpoints without tokenizer.json: other vocabularies are read, or one line says what reading them takes."""

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from specexport.checkpoint import tokenizer
from specexport.checkpoint.source import Source
from specexport.checkpoint.tokenizer import TokenizerParts, load_tokenizer
from specexport_runtime.errors import CheckpointError

WORDS = ("he", "ll", "hello")
RANKED = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)).encode()
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = json.dumps({text: i for i, text in enumerate([*BYTES, "he", "<|endoftext|>"])})
TEKKEN = json.dumps(
    {
        "config": {"pattern": r"\S+|\s+", "default_vocab_size": 259, "default_num_special_tokens": 2},
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for i, token in enumerate([*(bytes([i]) for i in range(256)), b"he"])
        ],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(("<unk>", "<s>"))
        ],
    }
)


def pieces_model() -> bytes:
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{i:02X}>", 6) for i in range(256))]
    pieces += [(text, 1) for text in ("▁", *"hello", *WORDS)]
    for text, kind in pieces:
        piece = model.pieces.add()
        piece.piece, piece.score, piece.type = text, 0.0, kind
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    return bytes(model.SerializeToString())


def checkpoint(folder: Path, files: dict[str, str | bytes], model: str, named: str | None) -> Source:
    files = {"config.json": json.dumps({"model_type": model}), **files}
    if named is not None:
        files["tokenizer_config.json"] = json.dumps({"tokenizer_class": named})
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return Source("tiny", folder, None, ())


def refuse(source: Source) -> tuple[str, str]:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(source)
    assert caught.value.exit_code == 2
    return caught.value.message, caught.value.hint or ""


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As on a machine that has not these packages, whatever this one has."""
    monkeypatch.setattr(tokenizer, "_is_installed", lambda package: package not in packages)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("tokenizer.model", "LlamaTokenizer"),
        ("tokenizer.model", "GemmaTokenizer"),
        ("tokenizer.model", None),
        ("spiece.model", "T5Tokenizer"),
    ],
)
def test_the_package_for_sentencepiece_is_named(name, named, tmp_path, monkeypatch):
    without(monkeypatch, "sentencepiece", "tiktoken")
    source = checkpoint(tmp_path, {name: pieces_model()}, "llama", named)
    message, hint = refuse(source)
    assert message == f"tiny: reading {name} takes sentencepiece, not installed here."
    assert hint == "pip install sentencepiece, or add its tokenizer.json to the checkpoint."


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken"])
def test_the_package_for_ranked_bytes_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "tiktoken")
    message, hint = refuse(checkpoint(tmp_path, {name: RANKED}, "llama", None))
    assert message == f"tiny: reading {name} takes tiktoken, not installed here."
    assert hint.startswith("pip install tiktoken, or add its tokenizer.json")


@pytest.mark.parametrize(
    ("files", "model", "named", "said"),
    [
        ({}, "llama", None, "no tokenizer.json and no vocabulary"),
        ({}, "llama", "LlamaTokenizer", "LlamaTokenizer finds no vocabulary"),
        ({}, "qwen2", None, "Qwen2Tokenizer finds no vocabulary"),
        ({"vocab.json": VOCABULARY, "merges.txt": "h e\n"}, "llama", "LlamaTokenizer", "LlamaTokenizer finds no"),
        ({"vocab.txt": "[UNK]\nhello\n"}, "gpt2", "GPT2Tokenizer", "GPT2Tokenizer finds no vocabulary"),
        ({"vocab.json": VOCABULARY, "merges.txt": "h e\n"}, "llama", None, "class makes nothing of vocab.json"),
        ({"vocab.json": "{"}, "gpt2", None, "cannot be loaded from vocab.json"),
    ],
)
def test_a_tokenizer_without_its_vocabulary_is_refused(files, model, named, said, tmp_path):
    message, hint = refuse(checkpoint(tmp_path, files, model, named))
    assert said in message
    assert "sentencepiece" not in message
    assert hint.startswith("add its tokenizer.json to the checkpoint")


def encoded(parts: TokenizerParts, text: str) -> list[int]:
    found: list[int] = Tokenizer.from_str(parts.json.decode()).encode(text, add_special_tokens=False).ids
    return found


@pytest.mark.parametrize("model", ["gpt2", "qwen2"])
def test_a_vocabulary_with_merges_is_read(model: str, tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"vocab.json": VOCABULARY, "merges.txt": "#version: 0.2\nh e\n"}
    parts = load_tokenizer(checkpoint(tmp_path, files, model, None))
    assert encoded(parts, "he h") == [256, BYTES.index("Ġ"), BYTES.index("h")]


def test_word_pieces_are_read(tmp_path: Path) -> None:
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##s"]
    parts = load_tokenizer(checkpoint(tmp_path, {"vocab.txt": "\n".join(lines)}, "bert", None))
    assert encoded(parts, "hellos x") == [5, 6, 1]


def test_tekken_is_read(tmp_path: Path) -> None:
    parts = load_tokenizer(checkpoint(tmp_path, {"tekken.json": TEKKEN}, "mistral", None))
    assert encoded(parts, "he é") == [256 + 2, 32 + 2, 0xC3 + 2, 0xA9 + 2]


class Pieces:
    """What sentencepiece would say: each letter is a piece, with a space before the text."""

    def __init__(self, model_file: str) -> None:
        assert model_file.endswith("tokenizer.model")

    def encode(self, text: str) -> list[int]:
        return [0, *map(ord, text)]

    def id_to_piece(self, token: int) -> str:
        return chr(token) if token else "▁"


class Splits:
    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012
    prefix = True

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [*([0] if self.prefix else []), *map(ord, text)]}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [chr(token) if token else "▁" for token in ids]


def test_other_pieces_than_sentencepiece_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sentencepiece")
    module.SentencePieceProcessor = Pieces  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    source, splits = checkpoint(tmp_path, {"tokenizer.model": pieces_model()}, "llama", None), Splits()
    tokenizer.check_vocabulary(source, splits)
    splits.prefix = False
    with pytest.raises(CheckpointError, match=r"Splits splits 'Hello world' in other pieces than tokenizer\.model"):
        tokenizer.check_vocabulary(source, splits)
