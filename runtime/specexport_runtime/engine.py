"""Public API: load a bundle, generate, stream. Imports onnxruntime and tokenizers when an engine is made."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport_runtime.batch import ModelRunner
from specexport_runtime.decoder import Decoder
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import Executor
from specexport_runtime.handle import Callback, RequestHandle
from specexport_runtime.loop import DecodeLoop
from specexport_runtime.request_builder import RequestBuilder
from specexport_runtime.requests import (
    DraftDefaults,
    RequestOptions,
    check_match_length,
    one_each,
    parse_speculative_config,
)
from specexport_runtime.results import GenerationResult, Prompt, StreamChunk, as_prompts
from specexport_runtime.sampling import SamplingParams
from specexport_runtime.stats import PaddingStats, PhaseTimes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_BATCHED_TOKENS = 512
MAX_BACKLOG = 32  # tokens that a draft model catches up on within a drafting step: several copied drafts in a row


class SpecEngine:
    """A target, optionally a draft, and a tokenizer, ready to generate.

    Requests of any thread share one running batch. Use :meth:`load`; the constructor serves tests and services that
    bring their own executors.

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
        unpad_kv: each sequence writes its KV at its own position; False advances a batch together (the padded method
            of EMS-SD) and needs executors of padded-KV graphs.
        unpad_input: new tokens are concatenated; False pads every sequence of a step to the longest.
        max_num_batched_tokens: most tokens of one step, draft tokens and prompt chunks together; less where the
            target's engine takes less.
        draft_defaults: how to draft for requests that do not say.
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
        unpad_kv: bool = True,
        unpad_input: bool = True,
        max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
        draft_defaults: DraftDefaults = DraftDefaults(),  # noqa: B008 immutable
    ) -> None:
        if max_num_batched_tokens < 1:
            raise InvalidRequestError(f"max_num_batched_tokens is {max_num_batched_tokens}.", "give 1 or more.")
        check_match_length(draft_defaults.match_length)
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.lookahead = lookahead
        self._builder = RequestBuilder(
            tokenizer,
            target.vocab_size,
            max_model_len,
            lookahead,
            has_draft=draft is not None,
            eos_token_ids=tuple(eos_token_ids),
            defaults=draft_defaults,
        )
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        runner = ModelRunner(target, unpad_kv=unpad_kv, unpad_input=unpad_input)
        drafters: dict[str, Drafter] = {"lookup": LookupDrafter(match_length=draft_defaults.match_length)}
        if draft is not None:
            drafters["draft-model"] = ModelDrafter(
                ModelRunner(draft, unpad_kv=unpad_kv, unpad_input=unpad_input),
                vocab_size=draft_vocab_size or target.vocab_size,
                max_backlog=MAX_BACKLOG,
            )
        decoder = Decoder(runner, ChainDrafter(drafters), max_num_batched_tokens=max_num_batched_tokens)
        self._loop = DecodeLoop(decoder)

    @property
    def times(self) -> PhaseTimes:
        """Phase times since the engine was last idle."""
        return self._loop.decoder.times

    @property
    def padding(self) -> PaddingStats:
        """Padding counters since the engine was last idle."""
        return self._loop.decoder.padding

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        spin: bool = True,
        unpad_kv: bool = True,
        unpad_input: bool = True,
        max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
        match_length: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        cuda_graphs: bool | None = None,
    ) -> "SpecEngine":
        """Load a bundle, checking versions and every file's hash.

        Args:
            path: bundle folder.
            max_num_seqs: sequences decoded at a time: rows of the KV arena.
            max_model_len: most tokens of one sequence; None takes the bundle's own limit, which is also the most.
            num_threads: compute threads; None takes the cores really available.
            spin: let idle threads spin: faster on an idle machine, slower on a busy one.
            unpad_kv: each sequence writes its KV at its own position; False is the padded method, for comparison.
            unpad_input: new tokens are concatenated; False pads every sequence of a step to the longest.
            max_num_batched_tokens: most tokens of one step, draft tokens and prompt chunks together.
            match_length: fewest tokens that lookup drafting must match; None takes 2.
            speculative_config: vLLM's keys ``method``, ``model``, ``num_speculative_tokens``, ``prompt_lookup_min``;
                sets the default drafter and its K.
            cuda_graphs: on a GPU, record decode and verify steps and replay them; False runs them one kernel at a time,
                None records them with TensorRT only.

        Raises:
            BundleError: the folder is no bundle, or a file is missing or altered.
            IncompatibleError: another schema, ABI or backend, or a GPU or memory that the engines do not fit.
            InvalidRequestError: a limit is out of range.
            MissingDependencyError: the runtime of the bundle's backend is not installed.
        """
        from specexport_runtime.bundle import load_bundle

        bundle = load_bundle(Path(path), max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        manifest = bundle.manifest
        defaults = DraftDefaults()
        if speculative_config is not None:
            draft = manifest.models.get("draft")
            source = None if draft is None else draft.source
            defaults = parse_speculative_config(speculative_config, draft_source=source, built=manifest.lookahead)
        if match_length is not None:
            defaults = defaults._replace(match_length=match_length)
        check_match_length(defaults.match_length)
        executors: dict[str, Executor] = {}
        try:
            for role in sorted(manifest.models, reverse=True):  # the target first: a draft takes what it leaves
                executors[role] = bundle.make_executor(
                    role, num_threads=num_threads, spin=spin, unpad_kv=unpad_kv, cuda_graphs=cuda_graphs
                )
        except BaseException:
            for executor in executors.values():  # a GPU's memory must not wait for the garbage collector
                executor.close()
            raise
        return cls(
            executors["target"],
            bundle.tokenizer,
            draft=executors.get("draft"),
            max_model_len=bundle.max_model_len,
            lookahead=manifest.lookahead,
            draft_vocab_size=manifest.vocabulary.size,
            eos_token_ids=manifest.vocabulary.eos_token_ids,
            chat_template=bundle.chat_template,
            special_tokens=manifest.vocabulary.special_tokens,
            unpad_kv=unpad_kv,
            unpad_input=unpad_input,
            max_num_batched_tokens=max_num_batched_tokens,
            draft_defaults=defaults,
        )

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
        reference: Prompt | None = None,
        callback: Callback | None = None,
    ) -> RequestHandle:
        """Queue one request; it joins the running batch as soon as a cache row is free, in order of arrival.

        Args:
            prompt: a text or token ids.
            params: sampling parameters; None is greedy.
            drafter: ``"draft-model"``, ``"lookup"``, ``"chained"`` (lookup, and the draft model where it finds
                nothing) or ``"none"``; None takes the draft model if there is one.
            num_speculative_tokens: K of the draft model (4 if None), or tokens copied by ``"lookup"`` (7 if None).
            speculation: False decodes plainly, as ``drafter="none"``.
            reference: a text or token ids that lookup may copy from, besides the prompt and what was generated.
            callback: called with each chunk in the decoding thread: keep it short.

        Raises:
            InvalidRequestError: the request can never be served; others are not affected.
        """
        options = RequestOptions(drafter, num_speculative_tokens, speculation)
        seq = self._builder.build(0, prompt, params or SamplingParams(), options, reference, stream=True)
        handle = RequestHandle(prompt, seq, self._loop, stream=True, callback=callback)
        self._loop.submit([handle])
        return handle

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        drafter: str | None = None,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
        references: Seq[Prompt | None] | None = None,
    ) -> list[GenerationResult]:
        """Generate for one or many prompts; results come in the order of the prompts.

        Args:
            prompts: a text, token ids, or a list of either.
            params: sampling parameters for all, or one for each prompt; None is greedy.
            drafter: as :meth:`submit`, for all prompts.
            num_speculative_tokens: as :meth:`submit`.
            speculation: as :meth:`submit`.
            references: for each prompt what lookup may copy from, or None.

        Raises:
            InvalidRequestError: a prompt is empty, too long or has ids out of range, or K is out of range.
            RequestFailedError: a request was ended by an exception.
        """
        return list(
            self.iter_results(
                prompts,
                params,
                drafter=drafter,
                num_speculative_tokens=num_speculative_tokens,
                speculation=speculation,
                references=references,
            )
        )

    def iter_results(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        drafter: str | None = None,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
        references: Seq[Prompt | None] | None = None,
    ) -> Iterator[GenerationResult]:
        """As :meth:`generate`, but each result comes as soon as it and those before it are finished."""
        options = RequestOptions(drafter, num_speculative_tokens, speculation)
        batch = as_prompts(prompts)
        each = one_each(params or SamplingParams(), len(batch), "sampling parameters")
        copied = one_each(references, len(batch), "references")
        handles = [
            RequestHandle(prompt, self._builder.build(i, prompt, item, options, reference), self._loop)
            for i, (prompt, item, reference) in enumerate(zip(batch, each, copied, strict=True))
        ]
        self._loop.submit(handles)
        return _results_in_order(handles)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
        reference: Prompt | None = None,
    ) -> Iterator[StreamChunk]:
        """Generate for one prompt, a chunk a round. Closing the iterator early cancels the request.

        Raises:
            InvalidRequestError: as :meth:`submit`, before the first chunk.
        """
        return iter(
            self.submit(
                prompt,
                params,
                drafter=drafter,
                num_speculative_tokens=num_speculative_tokens,
                speculation=speculation,
                reference=reference,
            )
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked.

        Raises:
            InvalidRequestError: the prompt is empty, too long for the engine, or has ids out of range.
        """
        return self._builder.encode(prompt)

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
        """End what is running and release the engines and their memory. Requests are refused from now on."""
        self._loop.close()
        self.target.close()
        if self.draft is not None:
            self.draft.close()


def _results_in_order(handles: Seq[RequestHandle]) -> Iterator[GenerationResult]:
    try:
        for handle in handles:
            yield handle.result()
    finally:
        for handle in handles:
            handle.cancel()
