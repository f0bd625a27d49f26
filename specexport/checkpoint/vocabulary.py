"""Vocabularies in their JSON form, and texts that two ids have.

A ``tokenizer.json`` has its tokens by their texts, so that all ids of such a text but one would be written as nothing.
They get a name of their own here: the text and a mark, which the decoder drops and which no text is read as.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from specexport.checkpoint.source import Source
from specexport_runtime.bundle.tokenizer_load import TWIN_MARK
from specexport_runtime.errors import CheckpointError


def read_vocabulary(tokenizer_json: bytes, *, where: str) -> dict[int, str]:
    """Token text by id, added tokens included; raises CheckpointError for a file of no known form."""
    try:
        data: dict[str, Any] = json.loads(tokenizer_json)
        vocab = data["model"]["vocab"]
        if isinstance(vocab, Mapping):
            tokens = {int(index): str(token) for token, index in vocab.items()}
        else:  # Unigram: a list of [token, score], the position is the id
            tokens = {index: str(piece[0]) for index, piece in enumerate(vocab)}
        for added in data.get("added_tokens") or ():
            tokens[int(added["id"])] = str(added["content"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"the tokenizer.json of {where} cannot be read ({error!r}).", "save the tokenizer again in the fast format."
        ) from error
    return tokens


def read_token_texts(tokenizer_json: bytes) -> dict[int, str]:
    """Text of each id in a file's vocabulary, also of those whose text another one has."""
    lost: dict[int, str] = {}

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            lost.update({value: key for key, value in items if type(value) is int and made[key] != value})
        return made

    json.loads(tokenizer_json, object_pairs_hook=pairs)
    return lost | read_vocabulary(tokenizer_json, where="the checkpoint")


def separate_duplicate_texts(source: Source, tokenizer_json: bytes, texts: Mapping[int, str]) -> bytes:
    """A tokenizer that writes each id of ``texts`` as its text, and reads texts as before; CheckpointError if none."""
    if len(set(texts.values())) == len(texts):
        return tokenizer_json
    data, known = json.loads(tokenizer_json), read_vocabulary(tokenizer_json, where=source.name)
    read = {text: index for index, text in known.items()}
    wrong = [index for index, text in texts.items() if text in read and known.get(index) != text]
    if not wrong:
        return tokenizer_json
    vocab = data["model"]["vocab"]
    if not isinstance(vocab, dict) or data["decoder"] is None:
        raise CheckpointError(
            f"{source.name}: two tokens have the text {texts[wrong[0]]!r}, one of them is {wrong[0]}, and a tokenizer "
            f"of this kind ({data['model']['type']}) cannot hold both.",
            "give each token a text of its own.",
        )
    stays = {text: index for index, text in sorted(texts.items())}
    stays |= {text: index for text, index in read.items() if texts.get(index) == text}
    kinds = {entry["content"]: entry for entry in data["added_tokens"]}
    added = {entry["id"]: entry for entry in data["added_tokens"] if entry["content"] not in stays}
    marks = Counter[str]()
    for index, text in sorted(texts.items()):
        if text in read:
            marks[text] += stays[text] != index
            name = text if stays[text] == index else text + TWIN_MARK * marks[text]
            vocab[name] = index  # added tokens as well: their ids are else given anew
            if text in kinds:
                added[index] = kinds[text] | {"id": index, "content": name}
    data["added_tokens"] = [added[index] for index in sorted(added)]
    drop = {"type": "Replace", "pattern": {"String": TWIN_MARK}, "content": ""}
    data["decoder"] = {"type": "Sequence", "decoders": [drop, data["decoder"]]}
    return json.dumps(data, ensure_ascii=False).encode()
