"""How to load an engine: one frozen record for every way in (Python, commands, server, Ray Serve)."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Keyword arguments of ``SpecEngine.load``.

    Attributes:
        max_num_seqs: sequences decoded at a time: rows of the KV arena; None takes the bundle's own default, else 8.
        max_model_len: most tokens of one sequence; None takes the bundle's own limit, which is also the most.
        num_threads: compute threads; None takes the cores really available.
        spin: let idle threads spin: faster on an idle machine, slower on a busy one.
        unpad_kv: each sequence writes its KV at its own position; False is the padded method, for comparison.
        unpad_input: new tokens are concatenated; False pads every sequence of a step to the longest.
        max_num_batched_tokens: most tokens of one step, draft tokens and prompt chunks together; None takes the
            bundle's own default, else 512.
        ttft_budget_ms: milliseconds to the first token: prompts that cannot keep them yield to those that can. None
            reads the oldest first.
        itl_budget_ms: milliseconds between two rounds of a sequence: prompts are read in chunks that fit into them.
            None reads as much as ``max_num_batched_tokens`` lets.
        match_length: fewest tokens that lookup drafting must match; None takes 2.
        speculative_config: vLLM's keys ``method``, ``model``, ``num_speculative_tokens``, ``prompt_lookup_min``; sets
            the default drafter and its K.
        cuda_graphs: on a GPU, record decode and verify steps and replay them; False runs them one kernel at a time,
            None records them where the engine can be recorded: on ``ort-cuda`` not with layers to switch off.
        adaptive: let draft lengths be chosen (``"auto"``, the default of requests that do not say) by what steps cost.
            It begins with what was learned on this machine, else with what the sizes of the models promise, and learns
            from what rounds take. False offers no ``"auto"`` lengths: requests that do not say draft with the draft
            model, if there is one, and a fixed K.
        suffix_memory_mb: megabytes for what drafter ``suffix`` keeps of earlier texts, 16 bytes a token; None takes 16.
        corpus: folder of text files that drafter ``suffix`` may copy from in every request.
        suffix_file: file that keeps the texts of drafter ``suffix`` from one engine to the next, or ``"cache"`` for one
            in the user's cache; None forgets them.
        enable_prefix_caching: keep texts of requests that ended in the rows of the KV arena, and let later ones that
            begin alike go on from there: the same bits, without reading them again. False reads every prompt whole.
        prefix_rows: rows of the KV arena that keep texts beside those of ``max_num_seqs``; each costs a row's memory.
        kv_cache_memory_bytes: most memory of the KV caches of all models together, in bytes or as a text such as
            ``"2GiB"``: ``max_num_seqs`` may then be more than fit at their full length. A request begins when all that
            it may come to need fits beside the others. On the CPU, on Linux. None: rows take what is written to them,
            and keep it.
        lora: the LoRA adapter of requests that name none, one of those that requests may choose; None for none.
        share_threads: on the CPU, let target and a large draft take the same threads: faster, but from then on ONNX
            Runtime refuses every session of this process with threads of its own. The commands and the server do so.
    """

    max_num_seqs: int | None = None
    max_model_len: int | None = None
    num_threads: int | None = None
    spin: bool = True
    unpad_kv: bool = True
    unpad_input: bool = True
    max_num_batched_tokens: int | None = None
    ttft_budget_ms: float | None = None
    itl_budget_ms: float | None = None
    match_length: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    cuda_graphs: bool | None = None
    adaptive: bool = True
    enable_prefix_caching: bool = True
    prefix_rows: int = 0
    kv_cache_memory_bytes: int | str | None = None
    suffix_memory_mb: int | None = None
    corpus: str | Path | None = None
    suffix_file: str | Path | None = None
    lora: str | None = None
    share_threads: bool = False


OPTION_NAMES = tuple(field.name for field in fields(EngineOptions))
GONE = {
    "prepacked": "weights are packed in the bundle, and every process maps them from there",
    "tune_profile": "the length of drafts is chosen by what rounds take; num_speculative_tokens pins it",
}
"""Options of earlier releases that change nothing any more, and why."""


def make_options(options: EngineOptions | None, changes: Mapping[str, Any]) -> EngineOptions:
    """``options`` (None: the defaults) with some of them changed.

    Raises:
        TypeError: there is no option of a name.
    """
    for name in changes:
        if name in GONE:
            warnings.warn(f"{name} changes nothing any more ({GONE[name]}): leave it out.", FutureWarning, stacklevel=3)
        elif name not in OPTION_NAMES:
            near = get_close_matches(name, OPTION_NAMES, n=1)
            raise TypeError(f"there is no engine option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    given = {} if options is None else {name: getattr(options, name) for name in OPTION_NAMES}
    return EngineOptions(**{**given, **{name: value for name, value in changes.items() if name not in GONE}})
