"""min-p: tokens at least a fraction as likely as the most likely one stay."""

import math

from specexport_runtime.sampling.cut import Cut


def _reach(value: float, temperature: float) -> float:
    return temperature * math.log(value)


MIN_P = Cut(None, off=0.0, low=0.0, high=1.0, help="Least share of the top; 0 is off.", reach=_reach)
