"""Bodies with an odd value in every place, in turn."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from tests.support.cases.patience import HANG_S
from tests.support.servers.raw_http import problem_of_error
from tests.support.servers.serving import Served

ODD = [None, 0, -1, True, 1e308, "", "x" * 300, "\u0000", [], [{}], {}, {"type": "function"}, {"a": [[[{}]]]}]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places_in(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from places_in(item, (*path, i))


def check_odd_bodies(served: Served, path: str, body: dict[str, Any]) -> None:
    """Replace every part of a body in turn: the server takes it or says what is wrong, and is idle in the end."""
    statuses = set()
    with httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        for number, where in enumerate(places_in(body)):
            for value in ODD[number % 2 :: 2]:  # every other one in each place: each in each kind of place
                odd = json.loads(json.dumps(body))
                part = odd
                for key in where[:-1]:
                    part = part[key]
                part[where[-1]] = value
                answer = http.post(path, json=odd)
                statuses.add(answer.status_code)
                assert answer.status_code in (200, 400), (where, value, answer.text)
                if answer.status_code == 400:
                    assert problem_of_error(answer.content) is None
    assert statuses == {200, 400}
    served.wait_until_idle()
