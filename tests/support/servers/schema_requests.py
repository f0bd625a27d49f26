"""Requests that schemathesis makes of the server's own schema: such as it allows, and such as it forbids."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.support.servers.raw_http import RawRequest

BASE = "http://127.0.0.1"


def schema_requests(openapi: Mapping[str, Any], count: int, seed: int) -> list[RawRequest]:
    """About ``count`` requests over all operations; fewer where an operation has no more different ones."""
    operations = [found.ok() for found in schemathesis.openapi.from_dict(dict(openapi)).get_all_operations()]
    with_body = [operation for operation in operations if operation.method.upper() == "POST"]
    made = []
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            wanted = count // (2 * len(with_body)) if operation in with_body else min(count // 20, 25)
            cases: list[Any] = []
            with contextlib.suppress(Unsatisfiable):  # a route without parameters cannot be asked wrongly
                _collect(operation.as_strategy(generation_mode=mode), max(1, wanted), seed, cases)
            made += [raw for case in cases for raw in _raw(case, f"schema {mode.value}")]
    return made


def _collect(strategy: Any, count: int, seed: int, cases: list[Any]) -> None:
    checks = list(hypothesis.HealthCheck)
    phases = [hypothesis.Phase.generate]

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, database=None, suppress_health_check=checks, deadline=None, phases=phases)
    @hypothesis.given(strategy)
    def collect(case: Any) -> None:
        cases.append(case)

    collect()


def _raw(case: Any, kind: str) -> Iterator[RawRequest]:
    try:
        prepared = requests.Request(**case.as_transport_kwargs(base_url=BASE)).prepare()
    except (ValueError, requests.RequestException):
        return
    headers = {str(name): str(value) for name, value in prepared.headers.items()} | {"Connection": "close"}
    lines = [f"{prepared.method} {prepared.path_url} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    body = prepared.body or b""
    data = body.encode() if isinstance(body, str) else bytes(body)
    yield RawRequest(kind, "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + data)
