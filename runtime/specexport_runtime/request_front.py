"""How requests come to an engine: one, many, as a stream, as a conversation."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Unpack

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.handle import Callback, RequestHandle, RequestListener
from specexport_runtime.loop import DecodeLoop
from specexport_runtime.request_builder import RequestBuilder
from specexport_runtime.request_spec import RequestSpec
from specexport_runtime.requests import Drafting, DraftPlan, RequestOptions, one_each, resolve_draft_plan
from specexport_runtime.results import GenerationResult, Prompt, StreamChunk, as_prompts
from specexport_runtime.sampling import SamplingParams


class RequestFront:
    """Checks requests and queues them; all methods may be called from any thread.

    Args:
        builder: what requests are checked against.
        loop: what decodes them.
        chat_template: Jinja template of the checkpoint.
        special_tokens: named special tokens for the chat template.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        loop: DecodeLoop,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._builder = builder
        self._loop = loop
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})

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

        Args:
            prompt: a text or token ids.
            params: sampling parameters; None is greedy.
            reference: a text or token ids that lookup may copy from, besides the prompt and what was generated.
            callback: called with each chunk in the decoding thread: keep it short.
            **drafting: how to draft: ``drafter``, ``num_speculative_tokens``, ``speculation``, ``layer_rules``,
                ``draft_exit``, ``trace``; see ``requests.Drafting``.

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
        """
        return iter(self.submit(prompt, params, reference=reference, **drafting))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked.

        Raises:
            InvalidRequestError: the prompt is empty, too long for the engine, or has ids out of range.
        """
        return self._builder.encode(prompt)

    def encode_chat(self, messages: Seq[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation's prompt, checked. The template's text holds all special tokens: none is added.

        Args:
            messages: as :meth:`format_chat`.

        Raises:
            InvalidRequestError: as :meth:`format_chat`, or the prompt is empty or too long for the engine.
        """
        return self._builder.encode(self.format_chat(messages), add_special_tokens=False)

    def format_chat(self, messages: Seq[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, by the checkpoint's chat template; to generate, :meth:`encode_chat` it.

        Args:
            messages: ``{"role": …, "content": …}`` in order.

        Raises:
            InvalidRequestError: the bundle has no chat template, or the template refuses the messages.
        """
        from specexport_runtime.chat import render_chat

        if self._chat_template is None:
            raise InvalidRequestError("this bundle has no chat template.", "give a plain prompt.")
        return render_chat(self._chat_template, messages, self._special_tokens)


def _results_in_order(handles: Seq[RequestHandle]) -> Iterator[GenerationResult]:
    try:
        for handle in handles:
            yield handle.result()
    finally:
        for handle in handles:
            handle.cancel()
