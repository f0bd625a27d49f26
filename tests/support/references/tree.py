"""References for drafts that are trees."""

import numpy as np

from specexport_runtime.drafters.siblings import LEAST_RATIO


def best_beside(logits, token, count):
    """The ``count`` likeliest tokens beside one, by sorting all; no less likely than ``LEAST_RATIO`` beside it."""
    values = np.asarray(logits, np.float64)
    ranked = [int(each) for each in np.lexsort((np.arange(len(values)), -values)) if each != token]
    return [each for each in ranked if np.exp(values[each] - values[token]) >= LEAST_RATIO][:count]
