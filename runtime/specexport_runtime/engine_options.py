"""How to load an engine: one frozen record for every way in (Python, commands, server, Ray Serve)."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Keyword arguments of ``SpecEngine.load``."""

    # Sequences decoded at a time: rows of the KV arena; None takes the bundle's own default, else 8.
    max_num_seqs: int | None = None
    # Most tokens of one sequence; None takes the bundle's own limit, which is also the most.
    max_model_len: int | None = None
    num_threads: int | None = None  # compute threads; None takes the cores really available
    spin: bool = True  # let idle threads spin: faster on an idle machine, slower on a busy one
    unpad_kv: bool = True  # each sequence writes its KV at its own position; False is the padded method, for comparison
    unpad_input: bool = True  # new tokens are concatenated; False pads every sequence of a step to the longest
    # Most tokens of one step, draft tokens and prompt chunks together; None takes the bundle's own default, else 512.
    max_num_batched_tokens: int | None = None
    # Milliseconds to the first token: prompts that cannot keep them yield to prompts that can. None reads the oldest
    # first.
    ttft_budget_ms: float | None = None
    # Milliseconds between two rounds of a sequence: prompts are read in chunks that fit into them. None reads as much
    # as ``max_num_batched_tokens`` lets.
    itl_budget_ms: float | None = None
    match_length: int | None = None  # fewest tokens that lookup drafting must match; None takes 2
    # vLLM's keys ``method``, ``model``, ``num_speculative_tokens``, ``prompt_lookup_min``; sets the default drafter and
    # its K.
    speculative_config: Mapping[str, Any] | None = None
    # On a GPU, record decode and verify steps and replay them; False runs them one kernel at a time, None records them
    # where the engine can be recorded: on ``ort-cuda`` not with layers to switch off.
    cuda_graphs: bool | None = None
    # Let draft lengths be chosen (``"auto"``, the default of requests that do not say) by what steps cost. It begins
    # with what was learned on this machine, else with what the sizes of the models promise, and learns from what rounds
    # take. False offers no ``"auto"`` lengths: requests that do not say draft with the draft model, if there is one,
    # and a fixed K.
    adaptive: bool = True
    # Keep texts of requests that ended in the rows of the KV arena, and let later ones that begin alike go on from
    # there: the same bits, without reading them again. False reads every prompt whole.
    enable_prefix_caching: bool = True
    prefix_rows: int = 0  # rows of the KV arena that keep texts beside ``max_num_seqs``; each costs a row's memory
    # Most memory of the KV caches of all models together, in bytes or as a text such as ``"2GiB"``: ``max_num_seqs``
    # may then be more than fit at their full length. A request begins when all that it may come to need fits beside the
    # others. On the CPU, on Linux. None: rows take what is written to them, and keep it.
    kv_cache_memory_bytes: int | str | None = None
    # Megabytes for what drafter ``suffix`` keeps of earlier texts, 16 bytes a token; None takes 16.
    suffix_memory_mb: int | None = None
    corpus: str | Path | None = None  # folder of text files that drafter ``suffix`` may copy from in every request
    # File that keeps the texts of drafter ``suffix`` from one engine to the next, or ``"cache"`` for one in the user's
    # cache; None forgets them.
    suffix_file: str | Path | None = None
    lora: str | None = None  # LoRA adapter of requests that name none; None for none
    # On the CPU, let target and a large draft take the same threads: faster, but from then on ONNX Runtime refuses
    # every session of this process with threads of its own. The commands and the server do so.
    share_threads: bool = False


OPTION_NAMES = tuple(field.name for field in fields(EngineOptions))
GONE = {
    "prepacked": "weights are packed in the bundle, and every process maps them from there",
    "tune_profile": "the length of drafts is chosen by what rounds take; num_speculative_tokens pins it",
}
"""Options of earlier releases that change nothing any more, and why."""


def make_options(options: EngineOptions | None, changes: Mapping[str, Any]) -> EngineOptions:
    """``options`` (None: the defaults) with some of them changed; ``TypeError`` for a name that is no option."""
    for name in changes:
        if name in GONE:
            warnings.warn(f"{name} changes nothing any more ({GONE[name]}): leave it out.", FutureWarning, stacklevel=3)
        elif name not in OPTION_NAMES:
            near = get_close_matches(name, OPTION_NAMES, n=1)
            raise TypeError(f"there is no engine option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    given = {} if options is None else {name: getattr(options, name) for name in OPTION_NAMES}
    return EngineOptions(**{**given, **{name: value for name, value in changes.items() if name not in GONE}})
