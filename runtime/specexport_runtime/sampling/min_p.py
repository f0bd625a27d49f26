"""min-p: tokens at least a fraction as likely as the most likely one stay."""

import math

import numpy as np

from specexport_runtime.sampling.cut import Cut
from specexport_runtime.sampling.distribution import Float32Array, Int64Array


def _keep(values: Float32Array, value: float, temperature: float, peak: float) -> Int64Array:
    return np.flatnonzero(values >= np.float32(peak + _reach(value, temperature)))


def _reach(value: float, temperature: float) -> float:
    return temperature * math.log(value)


MIN_P = Cut(_keep, off=0.0, low=0.0, high=1.0, help="Least share of the top; 0 is off.", reach=_reach)
