"""Engines that check themselves: what must hold between rounds is asked behind each one."""

from typing import Any


def check_every_round(engine: Any) -> None:
    """From now on a round that leaves a row, a cache length or kept text wrong fails as an engine does."""
    decoder = engine._loop.decoder
    step = decoder.step

    def checked() -> Any:
        events = step()
        decoder.check()
        return events

    decoder.step = checked
