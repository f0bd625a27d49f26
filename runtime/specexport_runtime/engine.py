"""Public API: load a bundle, generate, stream. Imports onnxruntime and tokenizers when an engine is made."""

import logging
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from specexport_runtime.abi import kv_slack
from specexport_runtime.bundle.tokenizer_load import whole_reader
from specexport_runtime.decoding.handle import Callback, RequestHandle, RequestListener
from specexport_runtime.decoding.loop import DecodeLoop
from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.decoding.pace import Pace
from specexport_runtime.decoding.prefixes import LEAST_REUSED
from specexport_runtime.drafters.base import DrafterFactory, DrafterParts, DraftOffer, Obstacle
from specexport_runtime.drafters.head_kind import head_obstacle
from specexport_runtime.engine_load import (
    check_empty,
    describe_abilities,
    make_decoder,
    make_drafters,
    self_draft_obstacle,
    weigh_drafters,
)
from specexport_runtime.engine_options import EngineOptions, make_options
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import Executor, adapted_executor, as_copying, as_stateful, borrows_cache
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.packing.kv import BorrowedKv
from specexport_runtime.requests.builder import RequestBuilder
from specexport_runtime.requests.checks import budget_of, check_match_length, one_each
from specexport_runtime.requests.conversation import Conversation
from specexport_runtime.requests.drafting import (
    DraftDefaults,
    Drafting,
    DraftPlan,
    RequestOptions,
    RequestSpec,
    resolve_draft_plan,
)
from specexport_runtime.requests.grammars import GrammarCompiler
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sequences.results import GenerationResult, Prompt, StreamChunk, as_prompts
from specexport_runtime.sequences.stats import PaddingStats, PhaseTimes
from specexport_runtime.watch.observe import EngineLoad, EngineObserver

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specexport_runtime.bundle.arrays import CutHead, MaskInput
    from specexport_runtime.costs.curves import CostCurves
    from specexport_runtime.costs.learned import LearnedCosts
    from specexport_runtime.drafters.suffix_open import KeptSuffixes
    from specexport_runtime.requests.chat_dialect import ChatDialect

DEFAULT_BATCHED_TOKENS = 512
PIN_TOKENS = 4
"""Tokens that are generated behind a prefix that is to be kept."""
_log = logging.getLogger(__name__)


class SpecEngine:
    """A target, optionally a draft, and a tokenizer, ready to generate.

    Requests of any thread share one running batch. Use :meth:`load`; the constructor serves tests and services that
    bring their own executors.

    Args:
        target: the target's executor.
        tokenizer: tokenizer of both models. Texts are read whole, even if it is set to cut or to fill them.
        draft: the draft model's executor, if there is one.
        head: the draft head's, if there is one; the target's executor then gives features.
        max_model_len: most tokens of one sequence, prompt included.
        lookahead: largest K that may be asked for.
        draft_vocab_size: ids below it may be drafted; None takes the smaller LM head.
        draft_head: the token ids of the LM head of either; None where it has all.
        mask: of a head that drafts all tokens in one step: what stands for unknown tokens.
        eos_token_ids: ids that end a text.
        chat_template: Jinja template of the checkpoint.
        special_tokens: named special tokens for the chat template.
        unpad_kv: each sequence writes its KV at its own position; False advances a batch together (the padded method
            of EMS-SD) and needs executors of padded-KV graphs.
        unpad_input: new tokens are concatenated; False pads every sequence of a step to the longest.
        max_num_seqs: sequences that run at a time; None takes all rows of the target, which are otherwise more.
        enable_prefix_caching: let requests go on from what cache rows have of their prompts, where rows can be copied.
        kv_cache_memory_bytes: most memory of the KV caches of all models; None: what their rows have. The executors
            must be able to give memory back.
        max_num_batched_tokens: most tokens of one step, draft tokens and prompt chunks together; less where the
            target's engine takes less.
        ttft_budget_ms: milliseconds to the first token within which prompts overtake those that cannot keep them.
        itl_budget_ms: milliseconds between rounds within which prompts are read beside them.
        draft_defaults: how to draft for requests that do not say.
        cost_curves: what steps cost, for requests that let K be chosen (``"auto"``) and for traces; None refuses the
            former.
        learned_costs: mends the curves by what rounds take; None takes them as they are.
        self_obstacle: why the target cannot draft with its own layers, for messages; None finds out.
        drafters: drafters of the user's own, by the names that requests use.
        suffixes: what was generated earlier; None begins with nothing.
        fingerprint: identifies weights, recipe and compiler; None if they are not known.
        adapters: names of the LoRA adapters that requests may choose, in the order of their numbers in the engine.
        default_adapter: the one of requests that name none; None for none.
    """

    def __init__(
        self,
        target: Executor,
        tokenizer: "Tokenizer",
        *,
        draft: Executor | None = None,
        head: Executor | None = None,
        max_model_len: int,
        lookahead: int = 8,
        draft_vocab_size: int | None = None,
        draft_head: "CutHead | None" = None,
        mask: "MaskInput | None" = None,
        eos_token_ids: Seq[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        unpad_kv: bool = True,
        unpad_input: bool = True,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | str | None = None,
        max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
        ttft_budget_ms: float | None = None,
        itl_budget_ms: float | None = None,
        draft_defaults: DraftDefaults = DraftDefaults(),  # noqa: B008 immutable
        cost_curves: "CostCurves | None" = None,
        learned_costs: "LearnedCosts | None" = None,
        self_obstacle: Obstacle | None = None,
        drafters: Mapping[str, DrafterFactory] | None = None,
        suffixes: "KeptSuffixes | None" = None,
        fingerprint: str | None = None,
        adapters: Seq[str] = (),
        default_adapter: str | None = None,
    ) -> None:
        if max_num_batched_tokens < 1:
            raise InvalidRequestError(f"max_num_batched_tokens is {max_num_batched_tokens}.", "give 1 or more.")
        check_match_length(draft_defaults.match_length)
        ttft_s, itl_s = (None if ms is None else ms / 1000 for ms in (ttft_budget_ms, itl_budget_ms))
        pace = Pace(ttft_s, itl_s)
        self.target = target
        self.draft, self.head = draft, head
        self.draft_head, self.mask = draft_head, mask
        self.tokenizer = tokenizer = whole_reader(tokenizer)
        self.max_model_len = max_model_len
        self.lookahead = lookahead
        self.cost_curves, self.learned_costs = cost_curves, learned_costs
        self.fingerprint = fingerprint
        runner = ModelRunner(target, unpad_kv=unpad_kv, unpad_input=unpad_input)
        own = {"unpad_kv": unpad_kv, "unpad_input": unpad_input}
        self._drafting = {
            name: ModelRunner(executor, kv=BorrowedKv(runner.kv) if borrows_cache(executor) else None, **own)
            for name, executor in (("draft", draft), ("head", head))
            if executor is not None
        }
        memory = MemoryBudget(
            [runner, *self._drafting.values()],
            limit=budget_of(kv_cache_memory_bytes),
            slack=kv_slack(lookahead),
            max_model_len=max_model_len,
        )
        layers_obstacle = self_obstacle or self_draft_obstacle(runner)
        offer = DraftOffer(draft is not None, layers_obstacle, head_obstacle(runner, has_head=head is not None))
        parts = DrafterParts(
            runner,
            self._drafting.get("draft"),
            draft_vocab_size or target.vocab_size,
            draft_defaults.match_length,
            None if suffixes is None else suffixes.store,
            draft_head,
            self._drafting.get("head"),
            mask,
        )
        made = make_drafters(parts, offer, drafters)
        weighed = weigh_drafters(made, cost_curves)
        builder = RequestBuilder(
            tokenizer,
            target.vocab_size,
            max_model_len,
            describe_abilities(
                offer,
                made,
                lookahead=lookahead,
                weighed=weighed,
                num_layers=getattr(target, "num_gates", 0) // 2,
                fixed_layers=getattr(target, "fixed_layers", None) is not None,
            ),
            eos_token_ids=tuple(eos_token_ids),
            defaults=draft_defaults,
            grammars=GrammarCompiler(tokenizer, target.vocab_size, eos_token_ids),
            adapters=tuple(adapters),
        )
        if default_adapter is not None:
            adapted_executor(target).default_adapter = builder.find_adapter(default_adapter) or 0
        decoder = make_decoder(
            runner,
            made,
            weighed,
            cost_curves,
            lookahead=lookahead,
            max_num_batched_tokens=max_num_batched_tokens,
            learned=learned_costs,
            max_num_seqs=max_num_seqs,
            pace=pace,
            reuses_prefixes=enable_prefix_caching and _can_reuse([runner, *self._drafting.values()]),
            memory=memory,
        )
        self._builder = builder
        self._loop = DecodeLoop(decoder)
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._chat_dialects: dict[tuple[str, str], ChatDialect] = {}
        self._release_lock, self._pin_lock = threading.Lock(), threading.Lock()
        self._released = False
        self._suffixes = suffixes

    @property
    def drafters(self) -> tuple[str, ...]:
        """What requests may name as their drafter; some may have an obstacle, see :meth:`resolve_drafting`."""
        return self._builder.abilities.names

    @property
    def adapters(self) -> tuple[str, ...]:
        """LoRA adapters that requests may name as their ``lora``."""
        return self._builder.adapters

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at a time."""
        return self._loop.decoder.rows.max_num_seqs

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

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: EngineOptions | None = None,
        *,
        drafters: Mapping[str, DrafterFactory] | None = None,
        **changes: Any,
    ) -> "SpecEngine":
        """Load a bundle, checking versions and the hash of every file that was not checked here before.

        Args:
            path: bundle folder.
            options: how to load it; None takes the defaults.
            drafters: drafters of your own, made when the engine is loaded; requests name them like any other.
            **changes: single options by name, in place of those of ``options``; see :class:`EngineOptions`.

        Raises:
            BundleError: the folder is no bundle, or a file is missing or altered.
            IncompatibleError: another schema, ABI or backend, or a GPU or memory that the engines do not fit.
            InvalidRequestError: a limit is out of range.
            MissingDependencyError: the runtime of the bundle's backend is not installed.
            TypeError: there is no option of a name.
        """
        from specexport_runtime.engine_load import load_engine_parts

        options = make_options(options, changes)
        parts = load_engine_parts(Path(path), options)
        manifest = parts.bundle.manifest
        return cls(
            parts.target,
            parts.bundle.tokenizer,
            draft=parts.draft,
            head=parts.head,
            max_model_len=parts.bundle.max_model_len,
            lookahead=manifest.lookahead,
            draft_vocab_size=manifest.vocabulary.size,
            draft_head=parts.draft_head,
            mask=parts.mask,
            eos_token_ids=manifest.vocabulary.eos_token_ids,
            chat_template=parts.bundle.chat_template,
            special_tokens=manifest.vocabulary.special_tokens,
            unpad_kv=options.unpad_kv,
            unpad_input=options.unpad_input,
            max_num_seqs=parts.bundle.max_num_seqs,
            enable_prefix_caching=options.enable_prefix_caching,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            max_num_batched_tokens=(
                manifest.max_num_tokens or DEFAULT_BATCHED_TOKENS
                if options.max_num_batched_tokens is None
                else options.max_num_batched_tokens
            ),
            ttft_budget_ms=options.ttft_budget_ms,
            itl_budget_ms=options.itl_budget_ms,
            draft_defaults=parts.defaults,
            cost_curves=None if parts.costs is None else parts.costs.curves,
            learned_costs=None if parts.costs is None else parts.costs.learned,
            self_obstacle=parts.self_obstacle,
            drafters=drafters,
            suffixes=parts.suffixes,
            fingerprint=manifest.build_key,
            adapters=manifest.models["target"].chosen_adapters,
            default_adapter=options.lora,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`format_chat` can make a prompt of a conversation."""
        return self._chat_template is not None

    def resolve_drafting(self, **drafting: Unpack[Drafting]) -> DraftPlan:
        """How a request would be drafted for; arguments as :meth:`submit`.

        Raises:
            InvalidRequestError: the engine cannot do that.
        """
        return resolve_draft_plan(RequestOptions(**drafting), self._builder.abilities, self._builder.defaults)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reference: Prompt | None = None,
        callback: Callback | None = None,
        **drafting: Unpack[Drafting],
    ) -> RequestHandle:
        """Queue one request; it joins the running batch as soon as a cache row is free, in order of arrival.

        Requests of several owners get rows in turns, and those with a lower ``priority`` go first.

        Args:
            prompt: a text or token ids.
            params: sampling parameters; None is greedy.
            reference: a text or token ids that lookup may copy from, besides the prompt and what was generated.
            callback: called with each chunk in the decoding thread: keep it short. It may submit, but not wait.
            **drafting: how to draft: ``drafter``, ``num_speculative_tokens``, ``speculation``, ``layer_rules``,
                ``draft_exit``, ``trace``; whose it is: ``owner``, ``priority``; and the adapter, ``lora``;
                see ``requests.Drafting``.

        Raises:
            InvalidRequestError: the request can never be served; others are not affected.
        """
        options = RequestOptions(**drafting)
        seq = self._builder.build(0, prompt, params or SamplingParams(), options, reference, stream=True)
        handle = RequestHandle(prompt, seq, self._loop, stream=True, callback=callback)
        self._loop.submit([handle])
        return handle

    def submit_all(
        self, requests: Seq[RequestSpec], listeners: Seq[RequestListener] | None = None
    ) -> list[RequestHandle]:
        """Queue several requests at once, all or none of them; they join the batch before the same round.

        Args:
            requests: what to generate.
            listeners: one a request, told of its chunks and its end; the handles cannot be iterated over then.

        Raises:
            InvalidRequestError: one of them can never be served; none is queued.
            EngineClosedError: the engine was closed.
        """
        each = one_each(listeners, len(requests), "listeners")
        handles = []
        for spec, listener in zip(requests, each, strict=True):
            options = RequestOptions(**spec.drafting)
            seq = self._builder.build(0, spec.prompt, spec.params, options, spec.reference, stream=True)
            handles.append(RequestHandle(spec.prompt, seq, self._loop, stream=listener is None, listener=listener))
        self._loop.submit(handles)
        return handles

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        references: Seq[Prompt | None] | None = None,
        **drafting: Unpack[Drafting],
    ) -> list[GenerationResult]:
        """Generate for one or many prompts; results come in the order of the prompts.

        Args:
            prompts: a text, token ids, or a list of either.
            params: sampling parameters for all, or one for each prompt; None is greedy.
            references: for each prompt what lookup may copy from, or None.
            **drafting: as :meth:`submit`, for all prompts.

        Raises:
            InvalidRequestError: a prompt is empty, too long or has ids out of range, or K is out of range.
            RequestFailedError: a request was ended by an exception.
            EndlessWaitError: this is a callback, a listener or an observer: nothing would be decoded meanwhile.
        """
        return list(self.iter_results(prompts, params, references=references, **drafting))

    def iter_results(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        references: Seq[Prompt | None] | None = None,
        **drafting: Unpack[Drafting],
    ) -> Iterator[GenerationResult]:
        """As :meth:`generate`, but each result comes as soon as it and those before it are finished."""
        self.check_may_wait("SpecEngine.generate()")
        options = RequestOptions(**drafting)
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
        reference: Prompt | None = None,
        **drafting: Unpack[Drafting],
    ) -> Iterator[StreamChunk]:
        """Generate for one prompt, a chunk a round. Closing the iterator early cancels the request.

        Raises:
            InvalidRequestError: as :meth:`submit`, before the first chunk.
            EndlessWaitError: as :meth:`generate`.
        """
        self.check_may_wait("SpecEngine.stream()")
        return iter(self.submit(prompt, params, reference=reference, **drafting))

    def check_form(self, form: StructuredOutputs) -> None:
        """Make ready for texts of a form; a request with it then begins at once. May take a second; any thread.

        Raises:
            InvalidRequestError: it cannot be honoured.
            MissingDependencyError: llguidance is not installed.
        """
        self._builder.grammars.compile(form)

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
        ids = self._builder.encode(prompt)
        self._loop.check_may_wait("SpecEngine.pin_prefix()")
        with self._pin_lock:  # what is left for one depends on those before it
            return self._pin(ids, RequestOptions(cache_salt=cache_salt, lora=lora))

    def _pin(self, ids: list[int], options: RequestOptions) -> int:
        rows, spare = self._loop.decoder.rows, self.target.num_rows - self.max_num_seqs
        if not rows.reuses_prefixes or len(rows.kept.pinned_rows) >= spare:
            raise InvalidRequestError(
                f"no row is left for a prefix: {spare} keep prefixes.", "load the engine with more prefix_rows."
            )
        if not LEAST_REUSED <= len(ids) <= self.max_model_len - PIN_TOKENS:
            raise InvalidRequestError(
                f"a prefix of {len(ids)} tokens cannot be kept.",
                f"give {LEAST_REUSED} to {self.max_model_len - PIN_TOKENS} tokens.",
            )
        rows.memory.check_pin(len(ids) + PIN_TOKENS, rows.kept.pinned_rows)
        # A few tokens behind it, so that drafters read it too. A state would be behind them then, and cannot go back.
        behind = PIN_TOKENS if as_stateful(self.target) is None else 1
        params = SamplingParams(max_tokens=behind, ignore_eos=True)
        seq = self._builder.build(0, ids, params, options)
        seq.is_pinned = True
        handle = RequestHandle(ids, seq, self._loop, stream=False)
        self._loop.submit([handle])
        handle.result()
        return len(ids)

    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None, lora: str | None = None) -> bool:
        """Let a prompt of :meth:`pin_prefix` go when its row is wanted.

        Returns:
            whether it was kept.
        """
        rows, adapter = self._loop.decoder.rows, self._builder.find_adapter(lora)
        return rows.reuses_prefixes and rows.kept.unpin(self._builder.encode(prompt), cache_salt or "", adapter)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked.

        Raises:
            InvalidRequestError: the prompt is empty, too long for the engine, or has ids out of range.
        """
        return self._builder.encode(prompt)

    def encode_chat(
        self,
        messages: Seq[Mapping[str, Any]],
        tools: Seq[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation's prompt, checked. The template's text holds all special tokens: none is added.

        Args:
            messages: as :meth:`format_chat`.
            tools: as :meth:`format_chat`.
            template_arguments: as :meth:`format_chat`.

        Raises:
            InvalidRequestError: as :meth:`format_chat`, or the prompt is empty or too long for the engine.
        """
        text = self.format_chat(messages, tools, template_arguments)
        return self._builder.encode(text, add_special_tokens=False)

    def format_chat(
        self,
        messages: Seq[Mapping[str, Any]],
        tools: Seq[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's chat template; to generate, :meth:`encode_chat` it.

        Args:
            messages: ``{"role": …, "content": …}`` in order; arguments of ``tool_calls`` are objects.
            tools: functions that may be called, as OpenAI writes them.
            template_arguments: more variables of the template, ``{"enable_thinking": False}`` say.

        Raises:
            InvalidRequestError: the bundle has no chat template, or the template refuses the messages.
        """
        return self.chat_dialect().render(messages, tools, template_arguments)

    def chat_dialect(self, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> "ChatDialect":
        """How the model writes conversations: what to do with functions, their calls, and thinking.

        Args:
            tool_call_parser: name of the format of calls; ``"auto"`` finds it in the chat template.
            reasoning_parser: ``"none"`` leaves what a model thinks in its text.

        Raises:
            InvalidRequestError: the bundle has no chat template, or there is no parser of that name.
        """
        from specexport_runtime.requests.chat_dialect import ChatDialect

        if self._chat_template is None:
            raise InvalidRequestError("this bundle has no chat template.", "give a plain prompt.")
        names = (tool_call_parser, reasoning_parser)
        found = self._chat_dialects.get(names)
        if found is None or found.template != self._chat_template:
            found = self._chat_dialects[names] = ChatDialect(
                self._chat_template,
                self._special_tokens,
                self.tokenizer,
                self._builder.eos_token_ids,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
            )
        return found

    def conversation(self, messages: Seq[Mapping[str, Any]] = (), *, chat_template: str | None = None) -> Conversation:
        """A conversation whose prompts go on from what was generated, token for token, so that little is read again.

        Args:
            messages: what was said before, the system's message too.
            chat_template: Jinja template in place of the checkpoint's.

        Raises:
            InvalidRequestError: there is no chat template, or the messages are no turns of a user and an assistant.
        """
        from specexport_runtime.requests.chat import render_whole

        template = self._chat_template if chat_template is None else chat_template
        if template is None:
            raise InvalidRequestError("this bundle has no chat template.", "give one as chat_template.")
        render = partial(render_whole, template, special_tokens=self._special_tokens)
        return Conversation(render, self.tokenizer, [dict(message) for message in messages])

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
            self.target.close()
            for runner in self._drafting.values():
                runner.executor.close()


def _can_reuse(runners: Seq[ModelRunner]) -> bool:
    """Whether every engine keeps its rows as prefix reuse needs them: where it says, and without padding."""
    return all(runner.unpad_kv and as_copying(runner.executor) is not None for runner in runners)


def _results_in_order(handles: Seq[RequestHandle]) -> Iterator[GenerationResult]:
    try:
        for handle in handles:
            yield handle.result()
    finally:
        for handle in handles:
            handle.cancel()
