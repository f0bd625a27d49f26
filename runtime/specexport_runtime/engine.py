"""Public API: load a bundle, generate, stream. Imports onnxruntime and tokenizers when an engine is made."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from specexport_runtime.decoding.handle import Callback, RequestHandle, RequestListener
from specexport_runtime.decoding.loop import DecodeLoop
from specexport_runtime.engine_load import load_engine_parts
from specexport_runtime.engine_options import EngineOptions, make_options, with_keywords
from specexport_runtime.engine_parts import EngineParts, assemble, check_empty
from specexport_runtime.errors import EngineClosedError
from specexport_runtime.intake.checks import expand_per_prompt
from specexport_runtime.intake.drafting import RequestOptions, RequestSpec, request_specs, resolve_draft_plan
from specexport_runtime.intake.pins import PinnedPrefixes
from specexport_runtime.intake.prompts import PromptEncoder
from specexport_runtime.requests.request import DraftPlan
from specexport_runtime.requests.results import GenerationResult, Prompt, StreamChunk
from specexport_runtime.requests.stats import PaddingStats, PhaseTimes
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.telemetry.observers import EngineLoad, EngineObserver

_log = logging.getLogger(__name__)


class SpecEngine(PromptEncoder):
    """A target, optionally a draft, and a tokenizer, ready to generate.

    Requests of any thread share one running batch. Use :meth:`load`; the constructor serves tests and services that
    bring their own executors.

    Args:
        parts: executors, tokenizer, and what is to be known of them.
        options: how they work together; None takes the defaults. Those for opening a bundle have no effect any more.

    Raises:
        InvalidRequestError: a part cannot do what an option asks for.
    """

    stuck_after_s = 60.0
    """Seconds without a round, while requests are active, after which it counts as dead; longer than any step."""

    flush_s = 10.0
    """Seconds that :meth:`close` may take to write kept texts to ``prefix_cache_dir``; may be set while it does."""

    def __init__(self, parts: EngineParts, options: EngineOptions | None = None) -> None:
        made = assemble(parts, options or EngineOptions())
        super().__init__(made.builder, parts.chat_template, parts.special_tokens)
        self.target, self.draft, self.head = parts.target, parts.draft, parts.head
        self.cut_head, self.mask, self.token_map = parts.cut_head, parts.mask, parts.token_map
        self.max_model_len, self.lookahead = made.builder.max_model_len, parts.lookahead
        self.cost_curves = None if parts.costs is None else parts.costs.curves
        self.learned_costs = None if parts.costs is None else parts.costs.learned
        self.name, self.fingerprint = parts.name, parts.fingerprint
        self._drafting, self._suffixes = made.drafting, parts.suffixes
        self._loop = DecodeLoop(made.decoder)
        self._pins = PinnedPrefixes(made.builder, self._loop)
        self._release_lock, self._released = threading.Lock(), False

    def __repr__(self) -> str:
        capabilities = self._builder.capabilities
        usable = [name for name in capabilities.drafters if name not in capabilities.obstacles]
        rows = f"max_num_seqs={self.max_num_seqs}, max_model_len={self.max_model_len}"
        return f"SpecEngine({self.name!r}, {rows}, K<={self.lookahead}, drafters={', '.join(usable)})"

    @property
    def drafters(self) -> tuple[str, ...]:
        """What requests may name as their drafter; some may have an obstacle, see :meth:`resolve_drafting`."""
        return self._builder.capabilities.names

    @property
    def adapters(self) -> tuple[str, ...]:
        """LoRA adapters that requests may name as their ``lora``."""
        return self._builder.adapters

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at a time."""
        return self._loop.decoder.slots.max_num_seqs

    @property
    def times(self) -> PhaseTimes:
        """Phase times since the engine was last idle."""
        return self._loop.decoder.times

    @property
    def padding(self) -> PaddingStats:
        """Padding counters since the engine was last idle."""
        return self._loop.decoder.padding

    def current_load(self) -> EngineLoad:
        """How busy the engine is; may be asked from any thread at any time.

        Raises:
            EndlessWaitError: this process was forked while requests ran.
        """
        return self._loop.load

    @property
    def trouble(self) -> EngineClosedError | None:
        """Why the engine is of no use, for any thread; None if it is alive.

        An ``EngineDeadError`` if a defect ended it, three steps failed one after the other, or no round ends for
        ``stuck_after_s``; an ``EngineClosedError`` if it was closed.
        """
        return self._loop.trouble(self.stuck_after_s)

    @property
    def observers_dropped(self) -> int:
        """Observers that raised, and are not called any more."""
        return self._loop.decoder.observers.dropped

    def check_may_wait(self, what: str) -> None:
        """Refuse to wait for a request where that would never end: in a callback, a listener or an observer.

        Args:
            what: the call that would wait, for the message.

        Raises:
            EndlessWaitError: this is the decoding thread, or a process that was forked while requests ran.
        """
        self._loop.check_may_wait(what)

    def add_observer(self, observer: EngineObserver) -> None:
        """Tell ``observer`` of every step and of the end of every request from now on; never changes what is generated.

        Args:
            observer: called in the decoding thread. One that raises is dropped, which is logged.
        """
        self._loop.decoder.observers.add(observer)

    def check(self) -> None:
        """Assert that no cache row, and nothing else of a request, was left behind; for tests and after long runs.

        Raises:
            SpecexportError: something was, or a request has not ended.
        """
        self._loop.check_idle(lambda: check_empty(self._loop.decoder, self._drafting))

    @staticmethod
    @with_keywords(EngineOptions)
    def load(path: str | Path, options: EngineOptions | None = None, **changes: Any) -> "SpecEngine":
        """Load a bundle, checking versions and the hash of every file that was not checked here before.

        Args:
            path: bundle folder.
            options: how to load it; None takes the defaults.
            **changes: single options by name, in place of those of ``options``; see :class:`EngineOptions`.

        Raises:
            BundleError: the folder is no bundle, or a file is missing or altered.
            IncompatibleError: another schema, ABI or backend, or a GPU or memory that the engines do not fit.
            InvalidRequestError: a limit is out of range.
            MissingDependencyError: the runtime of the bundle's backend is not installed.
            TypeError: there is no option of a name.
        """
        options = make_options(options, changes)
        return SpecEngine(load_engine_parts(Path(path), options), options)

    def resolve_drafting(self, **options: Unpack[RequestOptions]) -> DraftPlan:
        """How a request would be drafted for; arguments as :meth:`submit`.

        Raises:
            InvalidRequestError: the engine cannot do that.
        """
        return resolve_draft_plan(options, self._builder.capabilities, self._builder.defaults)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reference: Prompt | None = None,
        callback: Callback | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestHandle:
        """Queue one request; it joins the running batch as soon as a cache row is free, in order of arrival.

        Requests of several owners get rows in turns, and those with a lower ``priority`` go first.

        Args:
            prompt: a text or token ids.
            params: sampling parameters; None is greedy.
            reference: a text or token ids that lookup may copy from, besides the prompt and what was generated.
            callback: called with each chunk in the decoding thread: keep it short. It may submit, but not wait.
            **options: how to draft: ``drafter``, ``num_speculative_tokens``, ``speculation``, ``layer_rules``,
                ``draft_exit``, ``trace``; whose it is: ``owner``, ``priority``; and the adapter, ``lora``;
                see ``specexport_runtime.intake.drafting.RequestOptions``.

        Raises:
            InvalidRequestError: the request can never be served; others are not affected.
        """
        seq = self._builder.build(0, prompt, params or SamplingParams(), options, reference, stream=True)
        handle = RequestHandle(prompt, seq, self._loop, stream=True, callback=callback)
        self._loop.submit([handle])
        return handle

    def submit_all(
        self, requests: Sequence[RequestSpec], listeners: Sequence[RequestListener] | None = None
    ) -> list[RequestHandle]:
        """Queue several requests at once, all or none of them; they join the batch before the same round.

        Args:
            requests: what to generate.
            listeners: one a request, told of its chunks and its end; the handles cannot be iterated over then.

        Raises:
            InvalidRequestError: one of them can never be served; none is queued.
            EngineClosedError: the engine was closed; an ``EngineDeadError`` if a defect ended it.
        """
        each = expand_per_prompt(listeners, len(requests), "listeners")
        handles = []
        for spec, listener in zip(requests, each, strict=True):
            seq = self._builder.build(0, spec.prompt, spec.params, spec.options, spec.reference, stream=True)
            handles.append(RequestHandle(spec.prompt, seq, self._loop, stream=listener is None, listener=listener))
        self._loop.submit(handles)
        return handles

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Prompt | None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Generate for one or many prompts: always a list of results, in the order of the prompts.

        Args:
            prompts: a text, token ids, or a list of either.
            params: sampling parameters for all, or one for each prompt; None is greedy.
            references: for each prompt what lookup may copy from, or None.
            **options: as :meth:`submit`, for all prompts.

        Raises:
            InvalidRequestError: a prompt is empty, too long or has ids out of range, or K is out of range.
            RequestFailedError: a request was ended by an exception.
            EndlessWaitError: this is a callback, a listener or an observer: nothing would be decoded meanwhile.
        """
        return list(self.iter_results(prompts, params, references=references, **options))

    def iter_results(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Prompt | None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[GenerationResult]:
        """As :meth:`generate`, but each result comes as soon as it and those before it are finished."""
        self.check_may_wait("SpecEngine.generate()")
        handles = [
            RequestHandle(prompt, self._builder.build(i, prompt, item, asked, reference), self._loop)
            for i, (prompt, item, reference, asked) in enumerate(request_specs(prompts, params, references, options))
        ]
        self._loop.submit(handles)
        return _results_in_order(handles)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reference: Prompt | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[StreamChunk]:
        """Generate for one prompt, a chunk a round. Closing the iterator early cancels the request.

        Raises:
            InvalidRequestError: as :meth:`submit`, before the first chunk.
            EndlessWaitError: as :meth:`generate`.
        """
        self.check_may_wait("SpecEngine.stream()")
        return iter(self.submit(prompt, params, reference=reference, **options))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Answer one conversation; the result's ``prompt`` is its token ids.

        Args:
            messages: as :meth:`format_chat`.
            params: sampling parameters; None is greedy.
            tools: as :meth:`format_chat`. The text has the calls as the model writes them.
            template_arguments: as :meth:`format_chat`.
            continue_final_message: as :meth:`format_chat`. The text is what follows the message.
            **options: as :meth:`submit`.

        Raises:
            InvalidRequestError: as :meth:`encode_chat` and :meth:`submit`.
            RequestFailedError: as :meth:`generate`.
            EndlessWaitError: as :meth:`generate`.
        """
        prompt = self.encode_chat(messages, tools, template_arguments, continue_final_message)
        return self.generate(prompt, params, **options)[0]

    def check_form(self, form: StructuredOutputs) -> None:
        """Make ready for texts of a form; a request with it then begins at once. May take a second; any thread.

        Raises:
            InvalidRequestError: it cannot be honoured.
            MissingDependencyError: llguidance is not installed.
        """
        self._builder.grammars.compile(form)

    def has_form(self, form: StructuredOutputs) -> bool:
        """Whether a form is ready: a request with it is queued at once."""
        return self._builder.grammars.has(form)

    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None, lora: str | None = None) -> int:
        """Read a prompt, and keep it in a row of its own: every request that begins with it goes on from there.

        It takes one of the ``prefix_rows`` for as long as the engine lives, or until :meth:`unpin_prefix`.

        Args:
            prompt: a text or token ids; the system prompt of a service, say.
            cache_salt: requests with this salt see it.
            lora: requests with this adapter go on from it.

        Returns:
            its tokens.

        Raises:
            InvalidRequestError: no row or memory is left for it, or it is too short or too long to be kept.
            EndlessWaitError: as :meth:`generate`.
        """
        return self._pins.pin(prompt, cache_salt=cache_salt, lora=lora)

    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None, lora: str | None = None) -> bool:
        """Let a prompt of :meth:`pin_prefix` go when its row is wanted.

        Returns:
            whether it was kept.
        """
        return self._pins.unpin(prompt, cache_salt=cache_salt, lora=lora)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is running and release the engines and their memory. Requests are refused from now on."""
        self._loop.close(self._release)

    def _release(self) -> None:
        with self._release_lock:
            if self._released:
                return
            self._released = True
            if self.learned_costs is not None:
                self.learned_costs.flush()
            if self._suffixes is not None:
                try:
                    self._suffixes.save()
                except OSError as error:  # everything else is to be released all the same
                    _log.warning("What was generated could not be kept in %s: %s", self._suffixes.file, error)
            if (stored := self._loop.decoder.slots.stored) is not None:
                stored.flush(lambda: self.flush_s)
            self._builder.grammars.close()
            self.target.close()
            for runner in self._drafting.values():
                runner.executor.close()


def _results_in_order(handles: Sequence[RequestHandle]) -> Iterator[GenerationResult]:
    try:
        for handle in handles:
            yield handle.result()
    finally:
        for handle in handles:
            handle.cancel()
