"""What ``specexport::Experts`` means, in plain numpy and loops. Its lowering is tested against this.

Imports numpy only.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def experts(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_bias: Array | None,
    *,
    interleaved: int = 0,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = 0.0,
) -> Array:
    """One token and one expert at a time, in float64.

    Args:
        x: [T, H].
        expert_ids: [T, K], from 0 to E-1.
        expert_weights: [T, K].
        gate_up: [E, 2*I, H], or [E, I, H] where each output is gate and up.
        gate_up_bias: [E, 2*I] or [E, I], or None.
        down: [E, H, I].
        down_bias: [E, H], or None.
        interleaved: 1 for gate, up, gate, up …; 0 for all gates first; 2 where each output is both.
        alpha: factor inside the sigmoid.
        beta: what is added to ``up``.
        limit: of ``gate`` from above and of ``up`` on both sides; 0 for none.

    Returns:
        [T, H], float64.
    """
    output = np.zeros(x.shape, np.float64)
    for token, chosen in enumerate(expert_ids):
        for place, expert in enumerate(chosen):
            both = gate_up[expert].astype(np.float64) @ x[token]
            both = both if gate_up_bias is None else both + gate_up_bias[expert]
            if interleaved == 2:
                gate, up = both, both
            else:
                gate, up = (both[::2], both[1::2]) if interleaved else np.split(both, 2)
            if limit > 0:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            given = down[expert].astype(np.float64) @ (gate * np.exp(-np.logaddexp(0, -alpha * gate)) * (up + beta))
            given = given if down_bias is None else given + down_bias[expert]
            output[token] += expert_weights[token, place] * given
    return output
