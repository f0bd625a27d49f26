"""The life of a request, streamed or not: submit all its choices, pass on what they get, cancel what is left over."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, cast

from fastapi import Response
from starlette.types import Receive, Scope, Send

from specexport_runtime.async_engine import MAX_AT_A_TIME, AsyncRequest, AsyncSpecEngine, Lane
from specexport_runtime.errors import InvalidRequestError, SpecexportError
from specexport_runtime.requests.results import GenerationResult, StreamChunk, StreamPiece
from specexport_runtime.server.admission import require_engine
from specexport_runtime.server.answer_format import AnswerFormat, build_usage, prompt_logprobs_json, prompt_pieces
from specexport_runtime.server.errors import (
    ApiError,
    as_api_error,
    client_gone_error,
    request_timeout_error,
    unavailable_error,
)
from specexport_runtime.server.json_text import LongList
from specexport_runtime.server.log_format import log_fields
from specexport_runtime.server.messages_format import MessagesFormat
from specexport_runtime.server.responses_format import ResponsesFormat
from specexport_runtime.server.sse import EventStream
from specexport_runtime.server.state import ServerState
from specexport_runtime.server.token_text import TokenTexts
from specexport_runtime.server.translate import RequestPlan

_log = logging.getLogger(__name__)

_FEW, _MANY = 2**9, 2**14  # of what is told of tokens: up to two milliseconds, up to sixty


class ChoiceUpdate(NamedTuple):
    """What came for one choice; ``ended`` if nothing more will."""

    choice: int
    chunks: list[StreamChunk]
    ended: bool = False


AnswerForm = AnswerFormat | MessagesFormat | ResponsesFormat
"""JSON of one answer, as an endpoint has it."""


class PreparedRequest(NamedTuple):
    """What is known of a request when it was read."""

    plan: RequestPlan
    form: AnswerForm
    texts: TokenTexts | None  # needed where the plan asks for log-probabilities


class Answer(Response):
    """The answer to one request, made while it is sent."""

    def __init__(
        self,
        lease: Callable[[], AbstractAsyncContextManager[ServerState]],  # of the model that answers
        owner: str,
        prepare: Callable[[ServerState], Awaitable[PreparedRequest]],
        timeout_s: float,  # the request's, waiting included
    ) -> None:
        super().__init__()
        self._lease, self._owner, self._prepare, self._timeout_s = lease, owner, prepare, timeout_s
        self._engine: AsyncSpecEngine
        self._plan: RequestPlan
        self._form: AnswerForm
        self._echoed: set[int] = set()  # choices whose echo was told to its end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send; an ``ApiError`` says that nothing was sent yet, and nothing will be."""
        stream, log = EventStream(send), scope.get("state", {}).get("log")
        requests: list[AsyncRequest] = []
        try:
            async with interrupt_on_disconnect(receive, self._timeout_s), self._lease() as model:
                self._engine = require_engine(model)
                with self._engine.hold_place(self._owner):
                    self._plan, self._form, self._texts = await self._prepare(model)
                self._pieces: list[list[StreamPiece]] = [[] for _ in self._plan.specs]
                self._results: list[GenerationResult | None] = [None] * len(self._plan.specs)
                requests = await self._submit()
                if log is not None:
                    log.follow([request.handle.request for request in requests if request.handle is not None])
                if self._plan.stream:
                    await stream.start()
                    async with stream.kept_alive():
                        await self._send_events(requests, stream)
                else:
                    await self._send_whole(requests, scope, receive, send)
        except Exception as error:
            if not stream.started:
                raise
            if log is not None:
                log.error_code = as_api_error(error).code
            await _send_error_event(stream, error, scope, self._form)
        finally:
            for request in requests:
                request.cancel()  # no effect on those that ended

    async def _submit(self) -> list[AsyncRequest]:
        count, waiting = len(self._plan.specs), self._engine.max_waiting
        rows = self._engine.engine.max_num_seqs
        for most in (None if waiting is None else rows + waiting, self._engine.max_requests_per_owner):
            if most is not None and count > most:
                message = f"{count} choices at a time are more than this server ever takes."
                raise ApiError(400, message, param="n", code="limit_exceeded")
        try:
            return await self._engine.submit_all(self._plan.specs)
        except InvalidRequestError as error:  # the rest was checked before
            raise ApiError(400, f"speculative: {error}", param="speculative", code="invalid_value") from None

    async def _send_whole(self, requests: list[AsyncRequest], scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(merge_updates(requests)) as batches:
            async for batch in batches:
                for update in batch:
                    self._record_update(requests, update)
        num_entries = self._count_entries()
        if num_entries <= _FEW:
            body = self._build_body(requests)
        else:  # other clients should not wait while they are written
            lane: Lane = "brief" if num_entries <= _MANY else "long"
            body = await self._engine.run_aside(
                partial(self._build_body, requests), self._owner, lane=lane, is_taken=True
            )
        await Response(body, media_type="application/json")(scope, receive, send)

    def _count_entries(self) -> int:
        """What an answer tells of tokens besides its text; 0 for no more than that."""
        plan, told = self._plan, sum(map(len, self._pieces))
        prompts = plan.num_prompt_tokens if plan.scores or plan.prompt_logprobs is not None else 0
        is_plain = plan.logprobs is None and not plan.origins and plan.conversation is None
        return prompts * 21 + (0 if is_plain else told * (1 + (plan.logprobs or 0)))

    def _build_body(self, requests: Sequence[AsyncRequest]) -> bytes:
        """The body of an answer that is not streamed; all choices have ended."""
        choices, results = [], self._list_finished()
        for i, result in enumerate(results):
            pieces, text, echo = self._pieces[i], result.text, self._plan.echoes[i].text
            if self._plan.only_echo:
                pieces, text = [], ""
            else:
                echo = self._plan.echoes[i].before(_count_replaced_characters(requests[i]))
            text = echo + text
            if self._plan.logprobs is not None:
                pieces = [p._replace(offset=min(len(echo) + p.offset, len(text))) for p in pieces]
            if self._plan.scores and self._texts is not None:
                first = results[i - i % self._plan.num_choices]  # it was scored for all choices of its prompt
                ids, params = cast("Sequence[int]", self._plan.specs[i].prompt), self._plan.specs[i].params
                pieces = [*prompt_pieces(first.prompt_logprobs or [], ids, self._texts, params), *pieces]
            choices.append(self._form.choice(i, text, pieces, result.finish_reason))
        return self._form.whole(choices, self._usage(), self._prompt_logprobs(results))

    def _prompt_logprobs(self, results: Sequence[GenerationResult]) -> list[LongList] | None:
        """Of each choice's prompt, in vLLM's shape; None where they were not asked for."""
        count, n = self._plan.prompt_logprobs, self._plan.num_choices
        if count is None or self._texts is None:
            return None
        each = [prompt_logprobs_json(result.prompt_logprobs or [], self._texts, count) for result in results[::n]]
        return [each[i // n] for i in range(len(results))]

    async def _send_events(self, requests: list[AsyncRequest], stream: EventStream) -> None:
        opening = b"".join([self._form.opening(i, echo.settled_text) for i, echo in enumerate(self._plan.echoes)])
        if opening:
            await stream.write(opening)
        async with aclosing(merge_updates(requests)) as batches:
            async for batch in batches:
                events = []
                for update in batch:
                    pieces, finish = self._record_update(requests, update)
                    if pieces or finish:
                        drafted = sum(chunk.drafted for chunk in update.chunks)
                        usage = self._compute_partial_usage(requests) if self._plan.continuous_usage else None
                        events.append(self._build_remaining_echo(requests, update.choice, pieces, finish))
                        events.append(self._form.chunk(update.choice, pieces, finish, drafted, usage))
                if body := b"".join(events):
                    await stream.write(body)
        closing = partial(self._form.closing, self._usage())
        is_long = self._plan.logprobs is not None and not self._form.closes_briefly
        await stream.finish(await self._engine.run_aside(closing, self._owner, is_taken=True) if is_long else closing())

    def _build_remaining_echo(
        self, requests: Sequence[AsyncRequest], choice: int, pieces: Sequence[StreamPiece], finish: str | None
    ) -> bytes:
        """What the answer's first text leaves of the echo's end, in an event before it."""
        echo = self._plan.echoes[choice]
        if not echo.open_end or choice in self._echoed or not (finish or any(piece.text for piece in pieces)):
            return b""
        self._echoed.add(choice)
        return self._form.opening(
            choice, echo.before(_count_replaced_characters(requests[choice]))[len(echo.settled_text) :]
        )

    def _record_update(
        self, requests: list[AsyncRequest], update: ChoiceUpdate
    ) -> tuple[list[StreamPiece], str | None]:
        """Note what came for a choice; its new pieces, and why it ended."""
        chunks = update.chunks
        pieces = chunks[0].pieces if len(chunks) == 1 else [piece for chunk in chunks for piece in chunk.pieces]
        if not self._plan.stream:
            self._pieces[update.choice].extend(pieces)
        if update.ended:
            self._results[update.choice] = _result(requests[update.choice])
        finish = chunks[-1].finish_reason if chunks else None
        return pieces, None if finish == "cancelled" else finish  # the result tells of that

    def _list_finished(self) -> list[GenerationResult]:
        return [result for result in self._results if result is not None]

    def _compute_partial_usage(self, requests: list[AsyncRequest]) -> dict[str, Any]:
        """Of a stream that goes on."""
        handles = [request.handle for request in requests]
        generated = sum(handle.request.num_generated for handle in handles if handle is not None)
        prompt = self._plan.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _usage(self) -> dict[str, Any]:
        cached = [None if result is None else result.stats.cached_tokens or 0 for result in self._results]
        n = self._plan.num_choices
        # Of a prompt's choices, the one that had to read the most: the others went on from what it read.
        each = [[count for count in cached[i : i + n] if count is not None] for i in range(0, len(cached), n)]
        stats = [result.stats for result in self._list_finished()]
        usage = build_usage(self._plan.num_prompt_tokens, stats, sum(min(counts, default=0) for counts in each))
        if self._plan.only_echo:
            usage |= {"completion_tokens": 0, "total_tokens": self._plan.num_prompt_tokens}
        return usage


async def merge_updates(requests: list[AsyncRequest]) -> AsyncGenerator[list[ChoiceUpdate]]:
    """What comes for any of the requests, all that is there at a time, until all have ended."""
    if len(requests) == 1:
        async for chunks in requests[0].batches():
            yield [ChoiceUpdate(0, chunks)]
            if len(chunks) == MAX_AT_A_TIME:
                await asyncio.sleep(0)  # what a client did not read for long is not told of in one piece
        yield [ChoiceUpdate(0, [], ended=True)]
        return
    queue: asyncio.Queue[ChoiceUpdate] = asyncio.Queue()

    async def pump(index: int, request: AsyncRequest) -> None:
        with suppress(SpecexportError):  # the result raises it again
            async for chunks in request.batches():
                queue.put_nowait(ChoiceUpdate(index, chunks))
        queue.put_nowait(ChoiceUpdate(index, [], ended=True))

    pumps = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    left = len(requests)
    try:
        while left:
            batch = [await queue.get()]
            while not queue.empty() and sum(len(update.chunks) for update in batch) < MAX_AT_A_TIME:
                batch.append(queue.get_nowait())
            left -= sum(update.ended for update in batch)
            yield batch
            if not queue.empty():
                await asyncio.sleep(0)
    finally:
        for task in pumps:
            task.cancel()


def _count_replaced_characters(request: AsyncRequest) -> int:
    """Characters that the echo loses at its end, when the answer has text, or has ended."""
    assert request.handle is not None  # noqa: S101  # it was submitted
    text = request.handle.request.text
    return 0 if text is None else text.replaced


def _result(request: AsyncRequest) -> GenerationResult:
    """The result of a request that has ended; raises its failure, or an ``ApiError`` if it was cancelled."""
    assert request.handle is not None  # noqa: S101  # it was submitted
    result = request.handle.result(0)
    if result.finish_reason == "cancelled":
        raise unavailable_error("draining", "The server is shutting down and could not finish this request.")
    return result


async def _send_error_event(stream: EventStream, error: Exception, scope: Scope, form: AnswerForm) -> None:
    """Tell of an error in a stream that has begun; the status was sent long ago."""
    told = as_api_error(error)
    if told.status == 499:
        return  # the client is gone
    if told.status == 500:
        request_id = scope.get("state", {}).get("request_id")
        _log.error("A request failed while it was streamed.", exc_info=error, extra=log_fields(request_id=request_id))
    await stream.finish(form.failure(told))


@asynccontextmanager
async def interrupt_on_disconnect(receive: Receive, timeout_s: float) -> AsyncIterator[None]:
    """Interrupts its block, wherever it waits, when the client goes away (``ApiError`` 499) or the time is up (504)."""
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        with suppress(RuntimeError):  # it was up already, in this very turn of the loop
            limit.reschedule(0)  # now

    try:
        async with asyncio.timeout(timeout_s) as limit:
            watcher = asyncio.create_task(watch())
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if not limit.expired():
            raise  # one of the block's own
        raise (client_gone_error() if gone else request_timeout_error(timeout_s)) from None
