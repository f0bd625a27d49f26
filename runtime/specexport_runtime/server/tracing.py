"""OpenTelemetry spans of requests, one each with no text in it, where a tracer provider is set up."""

import sys
import time
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from specexport_runtime.server.request_log import PROBES, RequestLog

if TYPE_CHECKING:
    from specexport_runtime.requests.request import Request

MAX_TRACED_SEQUENCES = 16
"""Choices of one request that get spans of their own; the numbers of all are on the request's span."""

_OPERATIONS = {"/v1/completions": "text_completion"}
_OPERATIONS |= dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat")
_PARAMS = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters that the GenAI conventions name. Stop strings are text of the client's and stay out."""
_COUNTERS = ("rounds", "drafted", "accepted")


class Tracing:
    """ASGI middleware: a server span a request, with spans for queue, prefill and decoding below it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, inside its span."""
        log: RequestLog | None = scope.get("state", {}).get("log")
        if log is None or scope["path"] in PROBES or not is_set_up():
            await self.app(scope, receive, send)
            return
        from opentelemetry import trace

        span = _start(scope)
        if not span.is_recording():  # the sampler left it out
            await self.app(scope, receive, send)
            return
        log.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                await self.app(scope, receive, send)
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(trace.StatusCode.ERROR)
            raise
        finally:
            _finish(span, scope, log)
            span.end()


def is_set_up() -> bool:
    """Whether anybody has chosen where spans go. Imports nothing: who has, has imported the library."""
    api = sys.modules.get("opentelemetry.trace")
    return api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


def _tracer() -> Any:
    from opentelemetry import trace

    return trace.get_tracer_provider().get_tracer("specexport_runtime.server")


def _start(scope: Scope) -> Any:
    from opentelemetry import propagate, trace

    # The parent is in `traceparent` and `tracestate`, unless the process was set up for other headers.
    carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    client, server = scope.get("client"), scope.get("server")
    attributes = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope.get("http_version"),
        "client.address": client[0] if client else None,
        "server.address": server[0] if server else None,
        "server.port": server[1] if server else None,
    }
    return _tracer().start_span(
        f"{scope['method']} {scope['path']}" if scope["path"] in _OPERATIONS else scope["method"],
        context=propagate.extract(carrier),
        kind=trace.SpanKind.SERVER,
        attributes={name: value for name, value in attributes.items() if value is not None},
    )


def _finish(span: Any, scope: Scope, log: RequestLog) -> None:
    from opentelemetry import trace

    route = getattr(scope.get("route"), "path", None)  # of low cardinality, unlike the path
    if route is not None:
        span.update_name(f"{scope['method']} {route}")
    error = log.error_code or next((type(s.error).__name__ for s in log.requests if s.error is not None), None)
    if log.status is not None and log.status >= 400:
        error = error or str(log.status)
    attributes = {
        "http.route": route,
        "http.response.status_code": log.status,
        "error.type": error,
        "specexport.request_id": scope["state"].get("request_id"),
        **_generation_attributes(scope["path"], log),
    }
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})
    if log.status is not None and log.status >= 500:
        span.set_status(trace.StatusCode.ERROR)
    _add_phases(span, log)


def _generation_attributes(path: str, log: RequestLog) -> dict[str, Any]:
    """Attributes of a request that reached the engine: of the GenAI conventions, and ours."""
    if not log.requests:
        return {}
    params = log.requests[0].params
    return {
        "gen_ai.operation.name": _OPERATIONS.get(path, "text_completion"),
        "gen_ai.provider.name": "specexport",
        "gen_ai.request.model": log.model,
        "gen_ai.response.model": log.model,
        "gen_ai.request.choice.count": len(log.requests) if len(log.requests) > 1 else None,
        "gen_ai.request.stream": log.streamed,
        **{f"gen_ai.request.{name}": _as_attribute(getattr(params, name)) for name in _PARAMS},
        "gen_ai.usage.input_tokens": log.total("num_prompt_tokens"),
        "gen_ai.usage.output_tokens": log.total("num_generated_tokens"),
        "gen_ai.response.finish_reasons": [sequence.finish_reason or "cancelled" for sequence in log.requests],
        **{f"specexport.{name}": log.total(name) for name in _COUNTERS},
        "specexport.queued_seconds": log.queued_s,
        "specexport.time_to_first_token_seconds": log.first_token_s,
    }


def _as_attribute(value: Any) -> Any:
    """Integers of more than 64 bits, which seeds may have, do not fit an attribute."""
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


def _add_phases(parent: Any, log: RequestLog) -> None:
    from opentelemetry import trace

    if not log.requests:
        return
    context, tracer = trace.set_span_in_context(parent), _tracer()
    now = time.perf_counter()
    epoch = time.time_ns() - int(1e9 * now)
    for choice, sequence in enumerate(log.requests[:MAX_TRACED_SEQUENCES]):
        for name, begin, end in _list_phases(sequence, now):
            span = tracer.start_span(
                f"specexport.{name}",
                context,
                start_time=epoch + int(1e9 * begin),
                attributes={"specexport.choice": choice},
            )
            if name == "decode":
                span.set_attributes({f"specexport.{key}": getattr(sequence.stats, key) for key in _COUNTERS})
            span.end(epoch + int(1e9 * end))


def _list_phases(sequence: "Request", now: float) -> list[tuple[str, float, float]]:
    """Queue, prefill and decoding of a sequence with their begin and end, as far as it came."""
    stats = sequence.stats
    end = now if stats.end_time is None else stats.end_time
    if stats.start_time <= stats.submit_time:  # it never got a cache row
        return [("queue", stats.submit_time, end)]
    phases = [("queue", stats.submit_time, stats.start_time)]
    if stats.first_token_time is None:
        return [*phases, ("prefill", stats.start_time, end)]
    phases.append(("prefill", stats.start_time, stats.first_token_time))
    return [*phases, ("decode", stats.first_token_time, end)]
