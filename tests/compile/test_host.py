"""How a build treats the process it runs in."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from specexport.host import seldom_collected


class Node:
    """Refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process that builds; the suite freezes what test files import."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_made_within_is_collected_and_what_was_there_is_not_looked_at() -> None:
    before, within = Node(), []
    thresholds, old = gc.get_threshold(), weakref.ref(before)
    with seldom_collected():
        assert gc.get_threshold()[0] == 50_000
        node = Node()
        within.append(weakref.ref(node))
        del before, node
        gc.collect()
        assert within[0]() is None
        assert old() is not None, "it was there before"
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0, "a collection looks at it again"


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_else_froze_stays_frozen() -> None:
    node = Node()
    gc.freeze()
    with pytest.raises(ValueError, match="stop"), seldom_collected():
        raise ValueError("stop")
    assert not any(known is node for known in gc.get_objects()), "a collection looks at it again"
