"""What a GGUF file says of its tokenizer, where transformers' conversion leaves it out.

The conversion knows some of the names in ``tokenizer.ggml.pre`` and takes GPT-2's way to split text for the others; it
ends a text at one token only; and it puts a space before every sentencepiece text.
"""

import json
from typing import Any

from specexport.checkpoint.gguf_reader import read
from specexport.checkpoint.source import Source
from specexport.checkpoint.tokenizer import TokenizerParts
from specexport.checkpoint.vocabulary import separate_duplicate_texts
from specexport_runtime.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens in tokenizer.ggml.token_type

# How text is split, by the names in tokenizer.ggml.pre: facts of the models' own tokenizers.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _WORDS + r"\p{N}" + _REST
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): (r"\p{N}", _GPT2),
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "modern-bert", "exaone4", "mellum"): (
        _GPT2,
    ),
    ("gigachat", "a.x-4.0", "roberta-bpe"): (_GPT2,),
    ("stablelm2", "hunyuan", "solar-open", "grok-2"): (_QWEN2,),
    ("glm4", "chatglm-bpe"): (_LLAMA3,),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): _DEEPSEEK3,
}
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
"""Their tokenizers take a word that is a token as it is, without merges, and begin a text with BOS."""
_ENDS = {
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<|flush|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "[EOT]", "[EOS]"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
"""Control tokens that end a turn or a text. A file names one of them, or two; models end with any."""


def apply_gguf_settings(source: Source, reader: Any, parts: TokenizerParts) -> TokenizerParts:
    """Put right what transformers' conversion of a GGUF tokenizer leaves out; CheckpointError for an unknown split."""
    if reader is None:
        return parts
    data = json.loads(parts.json)
    kind, pre = read(reader, "tokenizer.ggml.model"), read(reader, "tokenizer.ggml.pre")
    if kind == "gpt2" and pre not in (None, "default"):
        _set_pre_tokenizer(source, data, pre)
        if pre in _WHOLE_WORDS:
            data["model"]["ignore_merges"] = True
            if read(reader, "tokenizer.ggml.add_bos_token") is None and parts.bos_token_id is not None:
                data["post_processor"] = _make_bos_post_processor(parts.special_tokens["bos_token"], parts.bos_token_id)
    if kind == "llama" and read(reader, "tokenizer.ggml.add_space_prefix") is False:
        _drop_prefix_space(data)
    texts = dict(enumerate(read(reader, "tokenizer.ggml.tokens") or ()))
    tokenizer_json = separate_duplicate_texts(source, json.dumps(data, ensure_ascii=False).encode(), texts)
    return parts._replace(json=tokenizer_json, more_eos_ids=_find_eos_ids(reader, parts.eos_token_id))


def _set_pre_tokenizer(source: Source, data: dict[str, Any], pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    patterns = next((found for names, found in _SPLITS.items() if pre in names), None)
    if patterns is not None:
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in patterns
        ]
        spell = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, spell]}
    elif pre not in GGUF_PRE_TOKENIZER_SPLITS:
        raise CheckpointError(
            f"{source.name} splits text as {pre!r} does (tokenizer.ggml.pre), which is not known here: the model would "
            "read other tokens than it was trained on.",
            "give the Hugging Face checkpoint that the file was made from.",
        )


def _make_bos_post_processor(bos: str, bos_id: int) -> dict[str, Any]:
    """Post-processor that begins a text, and each of a pair, with BOS."""
    first, second = (
        [{"SpecialToken": {"id": bos, "type_id": k}}, {"Sequence": {"id": "AB"[k], "type_id": k}}] for k in (0, 1)
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _drop_prefix_space(data: dict[str, Any]) -> None:
    """No space before a text, and none to strip from a decoded one."""
    before = data.get("pre_tokenizer") or {}
    if before.get("type") == "Metaspace":
        before["prepend_scheme"] = "never"
    normalizer = data.get("normalizer") or {}
    if normalizer.get("type") == "Sequence":
        normalizer["normalizers"] = [step for step in normalizer["normalizers"] if step["type"] != "Prepend"]
    decoder = data.get("decoder") or {}
    if decoder.get("type") == "Sequence":
        decoder["decoders"] = [step for step in decoder["decoders"] if step["type"] != "Strip"]


def _find_eos_ids(reader: Any, eos: int | None) -> tuple[int, ...]:
    """Ids beside EOS that end a text: those that the file names, and control tokens known to."""
    named = [read(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    tokens = read(reader, "tokenizer.ggml.tokens") or []
    types = read(reader, "tokenizer.ggml.token_type") or []
    marked = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED) and tokens[i] in _ENDS]
    texts = {tokens[i] for i in marked}
    if {"<|return|>", "<|call|>"} <= texts or {"<|calls|>", "<|flush|>"} <= set(tokens):
        marked = [i for i in marked if tokens[i] != "<|end|>"]  # there it ends a message, not the turn
    found = sorted({i for i in (*named, *marked) if i is not None} - {eos})
    return tuple(int(i) for i in found)
