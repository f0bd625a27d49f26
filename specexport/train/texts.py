"""Texts that the target writes: what its drafts will have to guess. Written by our own runtime."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specexport_runtime.errors import InvalidRequestError

GROUP = 32
"""Texts between two savings."""


def write_texts(
    bundle: Path,  # of the target
    prompts: Sequence[str],
    path: Path,  # JSON lines with ``tokens`` (prompt and text), ``num_prompt`` and ``key``
    settings: dict[str, Any],  # ``max_tokens``, ``temperature`` and ``seed``, and what else decides the texts
    *,
    threads: int | None = None,
    on_group: Callable[[int], None] = lambda _: None,  # hears how many texts are there
) -> None:
    """Let a bundle continue prompts, every second group greedily; ``path`` keeps the lines that it has."""
    key = texts_key(prompts, settings)
    _cut_half_line(path)
    done = len(read_texts(path, key)) if path.is_file() else 0
    if done >= len(prompts):
        return
    from specexport_runtime import SamplingParams, SpecEngine

    engine = SpecEngine.load(bundle, num_threads=threads)
    room = engine.max_model_len - settings["max_tokens"]
    try:
        if room < 1:
            raise InvalidRequestError(
                f"max_tokens is {settings['max_tokens']}, and a sequence of {bundle} takes "
                f"{engine.max_model_len} tokens.",
                "give fewer, or build the bundle with a larger --max-model-len.",
            )
        with path.open("a", encoding="utf-8") as file:
            for start in range(done - done % GROUP, len(prompts), GROUP):
                temperature = settings["temperature"] if (start // GROUP) % 2 else 0.0
                group = prompts[start : start + GROUP]
                tokens = [engine.tokenizer.encode(prompt).ids[-room:] for prompt in group]
                params = [
                    SamplingParams(
                        max_tokens=settings["max_tokens"], temperature=temperature, seed=settings["seed"] + start + i
                    )
                    for i in range(len(group))
                ]
                for number, (ids, result) in enumerate(zip(tokens, engine.generate(tokens, params), strict=True)):
                    if start + number >= done:
                        line = {"tokens": [*ids, *result.token_ids], "num_prompt": len(ids), "key": key}
                        file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
                on_group(min(start + GROUP, len(prompts)))
    finally:
        engine.close()


def texts_key(prompts: Sequence[str], settings: dict[str, Any]) -> str:
    """Names the texts that these prompts and settings give."""
    return hashlib.sha256(json.dumps([list(prompts), settings]).encode()).hexdigest()[:16]


def read_texts(path: Path, key: str) -> list[list[int]]:
    """Token ids of the texts, prompts included; InvalidRequestError for a damaged line and for another key."""
    texts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = json.loads(line)
            tokens, written_for = [int(token) for token in found["tokens"]], found["key"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidRequestError(
                f"{path} is damaged in line {number}.",
                "remove the file: its texts are written again.",
            ) from error
        if written_for != key:
            raise InvalidRequestError(
                f"{path} holds texts of other prompts or settings.",
                "give another folder with --work, or remove this one.",
            )
        texts.append(tokens)
    return texts


def _cut_half_line(path: Path) -> None:
    """Cut off the line that a run before this one did not finish."""
    if path.is_file():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)
