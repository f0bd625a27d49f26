"""Texts that the target writes: what its drafts will have to guess. Written by our own runtime."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specexport_runtime.errors import InvalidRequestError

GROUP = 32
"""Texts between two savings."""


def write_texts(
    bundle: Path,  # of the target
    prompts: Sequence[str],
    path: Path,  # JSON lines with ``tokens`` (prompt and text) and ``num_prompt``
    settings: dict[str, Any],  # ``max_tokens``, ``temperature`` and ``seed``, and what else decides the texts
    *,
    threads: int | None = None,
    on_group: Callable[[int], None] = lambda _: None,  # hears how many texts are there
) -> None:
    """Let a bundle continue prompts, every second group greedily; ``path`` keeps the lines that it has.

    InvalidRequestError: the file is of other prompts or settings, or the bundle has no room for such texts.
    """
    key = hashlib.sha256(json.dumps([list(prompts), settings]).encode()).hexdigest()[:16]
    done = _whole_lines(path, key)
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
                on_group(min(start + GROUP, len(prompts)))
    finally:
        engine.close()


def read_texts(path: Path) -> list[list[int]]:
    """Token ids of the texts, prompts included."""
    return [json.loads(line)["tokens"] for line in path.read_text(encoding="utf-8").splitlines()]


def _whole_lines(path: Path, key: str) -> int:
    """Texts that a run before this one has finished; a line that it did not finish is cut off."""
    if not path.is_file():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    lines = whole.decode("utf-8").splitlines()
    if lines and json.loads(lines[0])["key"] != key:
        raise InvalidRequestError(
            f"{path} holds texts of other prompts or settings.", "give another folder with --work, or remove this one."
        )
    return len(lines)
