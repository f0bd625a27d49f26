"""Waiting in tests: for what will happen, however busy the machine is. The only limit ends what would never end."""

import functools
import time
from collections.abc import Callable

import httpx

HANG_S = 120.0

get = functools.partial(httpx.get, timeout=HANG_S)
post = functools.partial(httpx.post, timeout=HANG_S)
request = functools.partial(httpx.request, timeout=HANG_S)
stream = functools.partial(httpx.stream, timeout=HANG_S)


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)
