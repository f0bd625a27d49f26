"""Text and tokenizer of the demo pair: the running Python's own standard library.

Every machine that can run this project has this text, and its licence (PSF-2.0)
allows it, so anyone can train the pair again without downloading anything.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|endoftext|>"
MAX_POSITIONS = 1024

# Tests and generated tables would be most of the bytes and little of the style:
# character maps and help topics teach a small model to recite, not to write code.
SKIPPED_FOLDERS = frozenset(
    {
        "__phello__",
        "dist-packages",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)

# A line break keeps the indentation after it, so "new line, eight spaces" is one
# token; digits stand alone, so numbers do not fill a small vocabulary.
SPLIT_PATTERN = (
    r"(?:\r?\n)+[ \t]*"
    r"| ?[\p{L}_]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}_]+"
    r"|[ \t]+(?=[ \t])"
    r"|\s"
)


@dataclass(frozen=True)
class Corpus:
    """The standard library's files, split once and for all by content."""

    train: list[str]  # texts to train on
    heldout: list[str]  # texts never trained on, neither model nor tokenizer

    @staticmethod
    def size(texts: list[str]) -> int:
        """Returns the texts' size in bytes of UTF-8."""
        return sum(len(text.encode()) for text in texts)


def load_corpus(root: Path | None = None, heldout_percent: int = 2) -> Corpus:
    """Reads the standard library's sources, by default those of the running Python.

    The split hashes each file's content: it depends neither on the order in which files are listed nor on where Python
    is installed.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    corpus = Corpus([], [])
    seen = set()
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if any(f in SKIPPED_FOLDERS or f.startswith("config-") for f in folders):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if not text.strip() or digest in seen:
            continue
        seen.add(digest)
        held = int.from_bytes(digest[:4], "big") % 100 < heldout_percent
        (corpus.heldout if held else corpus.train).append(text)
    return corpus


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer for Python source; it adds no token to what it encodes.

    ``vocab_size`` counts the separator and the 256 bytes too.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer as transformers' AutoTokenizer expects it.

    The settings are written by hand because transformers would record its own version's class name, which other
    versions do not know.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "pad_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[torch.Tensor]:
    """Encodes texts, each led by the separator."""
    start = tokenizer.token_to_id(SEPARATOR)
    encoded = tokenizer.encode_batch(texts)
    return [torch.tensor([start, *item.ids], dtype=torch.int64) for item in encoded]


def batches(docs: list[torch.Tensor], length: int, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields batches of token ids, shape (rows, length + 1), for ever; each epoch joins the documents in a new order.

    The models predict ``length`` tokens a row.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(docs), generator=generator).tolist()
        stream = torch.cat([docs[i] for i in order])
        # A random start moves the windows' edges from epoch to epoch.
        start = int(torch.randint(length, (1,), generator=generator))
        windows = stream[start:].unfold(0, length + 1, length)
        shuffled = torch.randperm(len(windows), generator=generator)
        for chosen in shuffled.split(rows):
            if len(chosen) == rows:
                yield windows[chosen]
