"""Engines that check themselves: what must hold between rounds is asked after each one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specexport_runtime import SpecEngine


def check_every_round(engine: Any) -> None:
    """From now on a round that leaves a row, a cache length or kept text wrong fails as an engine does."""
    decoder = engine._loop.decoder
    step = decoder.step

    def checked() -> Any:
        events = step()
        decoder.check()
        return events

    decoder.step = checked


@contextmanager
def opened(bundle: Path, rows: int = 3, **options: Any) -> Iterator[SpecEngine]:
    """An engine that checks itself in every round, and at the end."""
    usual = {"num_threads": 1, "spin": False, "adaptive": False, "max_num_seqs": rows}
    engine = SpecEngine.load(bundle, **(usual | options))
    check_every_round(engine)
    try:
        yield engine
        engine.check()
    finally:
        engine.close()
