"""Public API: load a bundle, generate, stream. Imports onnxruntime and tokenizers when an engine is made."""

import secrets
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport_runtime.abi import kv_slack
from specexport_runtime.batch import ModelRunner
from specexport_runtime.decoder import Decoder, RoundEvent
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.none import NoDrafter
from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.executors.base import Executor
from specexport_runtime.requests import DEFAULT_LOOKAHEAD, check_token_ids, parse_speculative_config, resolve_lookahead
from specexport_runtime.results import (
    GenerationResult,
    Prompt,
    StreamChunk,
    StreamPiece,
    as_prompts,
    make_result,
    piece_kind,
)
from specexport_runtime.sampling import SamplingParams
from specexport_runtime.sequence import Sequence
from specexport_runtime.stats import PhaseTimes
from specexport_runtime.text import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class SpecEngine:
    """A target, optionally a draft, and a tokenizer, ready to generate.

    One call generates at a time: calls from other threads wait. Use :meth:`load`; the constructor serves tests and
    services that bring their own executors.

    Args:
        target: the target's executor.
        tokenizer: tokenizer of both models.
        draft: the draft's executor; None for plain decoding only.
        max_model_len: most tokens of one sequence, prompt included.
        lookahead: largest K that may be asked for.
        draft_vocab_size: ids below it may be drafted; None takes the smaller LM head.
        eos_token_ids: ids that end a text.
        chat_template: Jinja template of the checkpoint.
        special_tokens: named special tokens for the chat template.
    """

    def __init__(
        self,
        target: Executor,
        tokenizer: "Tokenizer",
        *,
        draft: Executor | None = None,
        max_model_len: int,
        lookahead: int = 8,
        draft_vocab_size: int | None = None,
        eos_token_ids: Seq[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.lookahead = lookahead
        self.eos_token_ids = tuple(eos_token_ids)
        self.default_lookahead = DEFAULT_LOOKAHEAD
        self.times = PhaseTimes()
        """Phase times of the last finished call."""
        self._draft_vocab_size = draft_vocab_size or target.vocab_size
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._lock = threading.Lock()
        self._owner: int | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        spin: bool = True,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> "SpecEngine":
        """Load a bundle, checking versions and every file's hash.

        Args:
            path: bundle folder.
            max_num_seqs: sequences decoded at a time: rows of the KV arena.
            max_model_len: most tokens of one sequence; None takes the bundle's own limit, which is also the most.
            num_threads: compute threads; None takes the cores really available.
            spin: let idle threads spin: faster on an idle machine, slower on a busy one.
            speculative_config: vLLM's keys ``method``, ``model``, ``num_speculative_tokens``; sets the default K.

        Raises:
            BundleError: the folder is no bundle, or a file is missing or altered.
            IncompatibleError: another schema, ABI or backend.
            InvalidRequestError: a limit is out of range.
            MissingDependencyError: the runtime of the bundle's backend is not installed.
        """
        from specexport_runtime.bundle import load_bundle

        bundle = load_bundle(Path(path), max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        manifest = bundle.manifest
        default = None
        if speculative_config is not None:
            draft = manifest.models.get("draft")
            source = None if draft is None else draft.source
            default = parse_speculative_config(speculative_config, draft_source=source, built=manifest.lookahead)
        executors = {role: bundle.make_executor(role, num_threads=num_threads, spin=spin) for role in manifest.models}
        engine = cls(
            executors["target"],
            bundle.tokenizer,
            draft=executors.get("draft"),
            max_model_len=bundle.max_model_len,
            lookahead=manifest.lookahead,
            draft_vocab_size=manifest.vocabulary.size,
            eos_token_ids=manifest.vocabulary.eos_token_ids,
            chat_template=bundle.chat_template,
            special_tokens=manifest.vocabulary.special_tokens,
        )
        engine.default_lookahead = default or DEFAULT_LOOKAHEAD
        return engine

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
    ) -> list[GenerationResult]:
        """Generate for one or many prompts; results come in the order of the prompts.

        Args:
            prompts: a text, token ids, or a list of either.
            params: sampling parameters for all, or one for each prompt; None is greedy.
            num_speculative_tokens: lookahead K; None takes 4, or less if the bundle was built for less.
            speculation: False decodes plainly, one token a round, through the same loop.

        Raises:
            InvalidRequestError: a prompt is empty, too long or has ids out of range, or K is out of range.
        """
        return list(
            self.iter_results(prompts, params, num_speculative_tokens=num_speculative_tokens, speculation=speculation)
        )

    def iter_results(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
    ) -> Iterator[GenerationResult]:
        """As :meth:`generate`, but each result comes as soon as it and those before it are finished."""
        batch = as_prompts(prompts)
        lookahead = self._lookahead(num_speculative_tokens, speculation)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Seq) else list(params)
        if len(each) != len(batch):
            raise InvalidRequestError(
                f"{len(each)} sampling parameters were given for {len(batch)} prompts.", "give one, or one a prompt."
            )
        sequences = [self._sequence(i, *item) for i, item in enumerate(zip(batch, each, strict=True))]
        return self._finish_in_order(batch, sequences, lookahead)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
    ) -> Iterator[StreamChunk]:
        """Generate for one prompt, a chunk a round. Closing the iterator early frees the engine.

        Raises:
            InvalidRequestError: as :meth:`generate`, before the first chunk.
        """
        lookahead = self._lookahead(num_speculative_tokens, speculation)
        seq = self._sequence(0, prompt, params or SamplingParams(), stream=True)
        return self._stream(seq, lookahead)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked.

        Raises:
            InvalidRequestError: the prompt is empty, too long for the engine, or has ids out of range.
        """
        ids: list[int] = []
        if len(prompt):
            given = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
            ids = [int(token) if isinstance(token, np.integer) else token for token in given]
        check_token_ids(ids, vocab_size=self.target.vocab_size, max_model_len=self.max_model_len)
        return ids

    def format_chat(self, messages: Seq[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, by the checkpoint's chat template.

        Args:
            messages: ``{"role": …, "content": …}`` in order.

        Raises:
            InvalidRequestError: the bundle has no chat template, or the template refuses the messages.
        """
        from specexport_runtime.chat import render_chat

        if self._chat_template is None:
            raise InvalidRequestError("this bundle has no chat template.", "give a plain prompt.")
        return render_chat(self._chat_template, messages, self._special_tokens)

    def close(self) -> None:
        """Release the engines and their memory."""
        self.target.close()
        if self.draft is not None:
            self.draft.close()

    def _lookahead(self, requested: int | None, speculation: bool) -> int:
        built = self.lookahead if self.draft else 0
        return resolve_lookahead(requested, built=built, speculation=speculation, default=self.default_lookahead)

    def _sequence(self, index: int, prompt: Prompt, params: SamplingParams, *, stream: bool = False) -> Sequence:
        return Sequence(
            index,
            self.encode(prompt),
            params,
            vocab_size=self.target.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            text=TextStream(self.tokenizer, params),
            stream=stream,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
        )

    def _decoder(self, lookahead: int, num_sequences: int) -> Decoder:
        target = ModelRunner(self.target)
        drafter: Drafter = NoDrafter()
        if lookahead and self.draft is not None:
            runner = ModelRunner(self.draft)
            drafter = ModelDrafter(runner, vocab_size=self._draft_vocab_size, max_backlog=kv_slack(lookahead))
        return Decoder(target, drafter, lookahead=lookahead, max_num_seqs=num_sequences)

    def _run(self, sequences: Seq[Sequence], lookahead: int) -> Iterator[list[RoundEvent]]:
        with self._exclusive():
            decoder = self._decoder(lookahead, len(sequences))
            for seq in sequences:
                decoder.add(seq)
            try:
                while decoder.has_work:
                    yield decoder.step()
            finally:
                decoder.cancel()
                self.times = decoder.times

    def _finish_in_order(
        self, prompts: Seq[Prompt], sequences: Seq[Sequence], lookahead: int
    ) -> Iterator[GenerationResult]:
        done = 0
        for _ in self._run(sequences, lookahead):
            while done < len(sequences) and sequences[done].finish_reason is not None:
                yield make_result(prompts[done], sequences[done])
                done += 1

    def _stream(self, seq: Sequence, lookahead: int) -> Iterator[StreamChunk]:
        for events in self._run([seq], lookahead):
            for event in events:
                pieces = [
                    StreamPiece(text, event.tokens[j], piece_kind(event, j))
                    for j, text in enumerate(seq.take_pieces(len(event.tokens)))
                ]
                last = event is events[-1]
                yield StreamChunk(pieces, seq.finish_reason if last else None, seq.stats)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        me = threading.get_ident()
        if self._owner == me:
            raise SpecexportError(
                "this engine is already generating in this thread.", "finish or close the other stream first."
            )
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None
