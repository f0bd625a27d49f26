"""Sends many malformed requests to a server and says what it did wrong."""

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.support.servers.loop_pieces import LONGEST_PIECE_S, Pieces
from tests.support.servers.malformed import frame
from tests.support.servers.raw_http import BrokenAnswerError, RawRequest, problem_of, send

WORKERS = 8
BATCH = 200
SHOWN = 300


@dataclass
class Report:
    """What came back.

    Attributes:
        counts: answers by kind of request and status; ``"none"`` where the connection was closed without one.
        problems: what a server must not do, with the request's bytes.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def by_status(self) -> dict[str, int]:
        """Answers by status."""
        total: Counter[str] = Counter()
        for (_, status), count in self.counts.items():
            total[status] += count
        return dict(sorted(total.items()))


def fuzz(served: Any, requests: Sequence[RawRequest], *, key: str = "", pieces: Pieces | None = None) -> Report:
    """Send all of them, several at a time; after each batch the server must be idle, whole, and right.

    Args:
        served: a running ``serving.Served``.
        requests: what to send.
        key: with which a well-formed request is asked between batches.
        pieces: of its event loop; none may be longer than ``LONGEST_PIECE_S``.
    """
    report = Report()
    wanted = ask(served.port, key)
    size = BATCH if pieces is None else WORKERS
    with ThreadPoolExecutor(WORKERS) as pool:
        for start in range(0, len(requests), size):
            batch = requests[start : start + size]
            for request, (statuses, problems) in zip(
                batch, pool.map(lambda r: _one(served.port, r), batch), strict=True
            ):
                report.counts.update((request.kind, status) for status in statuses or ["none"])
                shown = f"{request.data[:SHOWN]!r} … {request.data[-SHOWN:]!r} ({len(request.data)} bytes)"
                report.problems += [f"{request.kind}: {problem}; sent {shown}" for problem in problems]
            _check_server(served, wanted, report, key)
            if pieces is not None and (longest := pieces.take()).cpu_s > LONGEST_PIECE_S:
                sent = ", ".join(f"{request.data[:SHOWN]!r} ({len(request.data)} bytes)" for request in batch)
                report.problems.append(f"the event loop was held: {longest}; by one of {sent}")
    return report


def ask(port: int, key: str) -> str:
    """The text that a well-formed request gets."""
    body = {"prompt": "w1 w2", "max_tokens": 12, "temperature": 0}
    head = (("Content-Type", b"application/json"), ("Authorization", f"Bearer {key}".encode()))
    (answer,) = send(port, RawRequest("well-formed", frame("/v1/completions", json.dumps(body).encode(), headers=head)))
    assert answer.status == 200, answer
    text = json.loads(answer.body)["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def _one(port: int, request: RawRequest) -> tuple[list[str], list[str]]:
    """Statuses and problems of one request."""
    try:
        answers = send(port, request)
    except (OSError, BrokenAnswerError, ValueError) as error:
        return [type(error).__name__], [f"{type(error).__name__}: {error}"]
    found = [problem_of(answer, head=request.head) for answer in answers]
    return [str(answer.status) for answer in answers], [problem for problem in found if problem is not None]


def _check_server(served: Any, wanted: str, report: Report, key: str) -> None:
    try:
        served.wait_until_idle()  # asserts the engine's invariants, and that no row is held
        if (text := ask(served.port, key)) != wanted:
            report.problems.append(f"the text of a well-formed request changed from {wanted!r} to {text!r}")
    except (AssertionError, OSError, ValueError) as error:
        report.problems.append(f"the server is not well after {sum(report.counts.values())} answers: {error!r}")
