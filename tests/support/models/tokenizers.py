"""Tokenizers of every kind."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


@cache
def byte_level():
    """Byte-level BPE with some merges, across and inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    merges = []
    for text in [" a", "ab", " hello", "中", "文", "é", "😀", "\ufffd"]:
        parts = list(spell(text)[0][0])
        while len(parts) > 1:
            pair = (parts[0], parts[1])
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(pair)
            parts[:2] = ["".join(pair)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|im|>")])
    return tokenizer


def sentencepiece(decoder):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "a", "b", "c", "▁a", "▁▁", "▁ab", "中", "é", ".", "\n"]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@cache
def llama_like():
    """Metaspace pieces, byte fallback, one leading space stripped from the whole text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(decoders.Sequence(steps))


@cache
def gemma_like():
    """The same without stripping."""
    return sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


@cache
def metaspace():
    """The Metaspace decoder strips the space of the first piece; byte tokens after it are joined."""
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


@cache
def wordpiece():
    words = ["[UNK]", "the", "cat", "##s", "##ing", ".", ",", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
