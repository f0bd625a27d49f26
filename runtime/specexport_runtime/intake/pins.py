"""Pinned prefixes: prompts that are read before any request, and keep a cache row until they are let go."""

import threading

from specexport_runtime.decoding.handle import RequestHandle
from specexport_runtime.decoding.loop import DecodeLoop
from specexport_runtime.decoding.prefixes import MIN_REUSED
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.builder import RequestBuilder
from specexport_runtime.intake.drafting import RequestOptions
from specexport_runtime.requests.results import Prompt
from specexport_runtime.sampling.params import SamplingParams

PIN_TOKENS = 4
"""Tokens that are generated after a prefix that is to be kept."""


class PinnedPrefixes:
    """The prefixes of one engine."""

    def __init__(self, builder: RequestBuilder, loop: DecodeLoop) -> None:
        self._builder, self._loop = builder, loop
        self._lock = threading.Lock()

    def pin(self, prompt: Prompt, *, cache_salt: str | None, lora: str | None) -> int:
        """Read a prompt and keep it; its number of tokens. ``InvalidRequestError`` if nothing is left to keep it in."""
        ids = self._builder.encode(prompt)
        self._loop.check_may_wait("SpecEngine.pin_prefix()")
        with self._lock:  # what is left for one depends on those before it
            return self._pin(ids, {"cache_salt": cache_salt, "lora": lora})

    def unpin(self, prompt: Prompt, *, cache_salt: str | None, lora: str | None) -> bool:
        """Let a prompt go when its row is wanted; whether it was kept."""
        slots, adapter = self._loop.decoder.slots, self._builder.find_adapter(lora)
        return slots.reuses_prefixes and slots.kept.unpin(self._builder.encode(prompt), cache_salt or "", adapter)

    def _pin(self, ids: list[int], options: RequestOptions) -> int:
        slots, longest = self._loop.decoder.slots, self._builder.max_model_len - PIN_TOKENS
        target = self._loop.decoder.target.executor
        spare = target.num_rows - slots.max_num_seqs
        if not slots.reuses_prefixes or len(slots.kept.pinned_rows) >= spare:
            raise InvalidRequestError(
                f"no row is left for a prefix: {spare} keep prefixes.", "load the engine with more prefix_rows."
            )
        if not MIN_REUSED <= len(ids) <= longest:
            raise InvalidRequestError(
                f"a prefix of {len(ids)} tokens cannot be kept.", f"give {MIN_REUSED} to {longest} tokens."
            )
        slots.memory.check_pin(len(ids) + PIN_TOKENS, slots.kept.pinned_rows)
        # A few tokens after it, so that drafters read it too. A state would be after them then, and cannot go back.
        behind = PIN_TOKENS if not target.num_pending else 1
        seq = self._builder.build(0, ids, SamplingParams(max_tokens=behind, ignore_eos=True), options)
        seq.is_pinned = True
        handle = RequestHandle(ids, seq, self._loop, stream=False)
        self._loop.submit([handle])
        handle.result()
        return len(ids)
