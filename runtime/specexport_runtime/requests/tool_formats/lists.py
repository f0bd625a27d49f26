"""Calls that are a JSON list of objects, or one object."""

import json

from specexport_runtime.requests.tool_formats.base import Style
from specexport_runtime.requests.tool_formats.events import Feed, Reading
from specexport_runtime.requests.tool_formats.objects import read_object


def read_list(feed: Feed, names: frozenset[str]) -> Reading:
    """A list of calls, or one; ``feed`` stands before it. What is behind the last good one is left."""
    if feed.next == "{":
        return (yield from read_object(feed, names))
    if not (yield from feed.takes("[")):
        return False
    while True:
        yield from feed.skip_space()
        if not (yield from read_object(feed, names)):
            return False
        feed.mark = feed.at
        yield from feed.skip_space()
        if not (yield from feed.takes(",")):
            break
    yield from feed.takes("]")
    return True


def list_rule(style: Style, *, several: bool) -> str:
    """The rule ``list`` of a grammar: objects, at least one."""
    more = f" ({json.dumps(style.item)} object)*" if several else ""
    return f'list: "[" object{more} "]"\n'
