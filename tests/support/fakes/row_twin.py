"""The kernels of ``specexport.kernels.sampling`` in numpy; ``at(address, dtype)`` gives the memory from there on."""

import numpy as np

from specexport_runtime.executors.row_kernels import ASK, BINS, BLOCK, FOUND, K_INLINE, K_MAX, PER_BIN, RESIDUAL_ASK


def _pick(weights, target):
    above = (weights.cumsum() > target) & (weights > 0)
    last = max(weights.nonzero()[0], default=0)
    return min(above.nonzero()[0][0], last) if above.any() else last


def _rows(at, grid, logits, asks, pitch):
    """Number, ask and logits of each row that asks."""
    for row, ask in enumerate(at(asks, "float64")[: grid[0] * ASK].reshape(-1, ASK)):
        if ask[0] > 0:
            yield row, ask, at(logits + 4 * row * pitch, "float32")[: int(ask[1])]


@np.errstate(all="ignore")
def weigh(at, grid, logits, asks, tops, sums, pitch, blocks):
    for row, ask, values in _rows(at, grid, logits, asks, pitch):
        padded = np.full(blocks * BLOCK, -np.inf, np.float32)
        padded[: len(values)] = values
        padded = padded.reshape(blocks, BLOCK)
        broken = (np.isnan(padded) | np.isposinf(padded)).any(1)
        top = np.where(np.isnan(padded), -np.inf, padded).max(1)
        shift = np.where(np.isneginf(top), 0.0, top).astype(np.float64)[:, None]
        total = np.exp((padded.astype(np.float64) - shift) / ask[0]).sum(1)
        at(tops, "float32")[row * blocks :][:blocks] = top
        at(sums, "float64")[row * blocks :][:blocks] = np.where(broken, np.nan, total)


@np.errstate(all="ignore")
def draw(at, grid, logits, asks, tops, sums, found, bins, token_ids, pitch, blocks, feeds):
    for row, ask, values in _rows(at, grid, logits, asks, pitch):
        temperature, width, uniform, token, least, count = ask[0], len(values), ask[2], int(ask[3]), ask[4], int(ask[5])
        top = at(tops, "float32")[row * blocks :][:blocks]
        peak = np.float64(top.max())
        masses = at(sums, "float64")[row * blocks :][:blocks] * np.exp((top.astype(np.float64) - peak) / temperature)
        total = masses.sum()
        block = _pick(masses, uniform * total)
        weights = np.exp((values[block * BLOCK :][:BLOCK].astype(np.float64) - peak) / temperature)
        place = _pick(weights, uniform * total - masses[:block].sum())
        asked = np.exp((np.float64(values[token]) - peak) / temperature) if 0 <= token < width else 0.0
        least = np.float64(np.float32(peak + least))
        if 0 < count <= blocks:
            least = max(least, np.float64(np.sort(top)[::-1][count - 1]))
        at(found, "float64")[row * FOUND :][:7] = (
            peak, total, block * BLOCK + place, weights[place] / total, asked / total, 0, least,
        )  # fmt: skip
        at(bins, "float64")[row * BINS :][:BINS] = 0
        if feeds:
            at(token_ids, "int64")[row] = block * BLOCK + place


@np.errstate(all="ignore")
def spread(at, grid, logits, asks, found, bins, pitch):
    for row, ask, values in _rows(at, grid, logits, asks, pitch):
        if ask[6] > 0 and np.isfinite(at(found, "float64")[row * FOUND + 1]):
            below = (at(found, "float64")[row * FOUND] - values.astype(np.float64)) / ask[0]
            places = np.minimum(below / PER_BIN, BINS - 1).astype(int)
            at(bins, "float64")[row * BINS :][:BINS] += np.bincount(places, np.exp(-below), BINS)


@np.errstate(all="ignore")
def gather(at, grid, logits, asks, found, bins, few_ids, few_values, many_ids, many_values, pitch):
    for row, ask, values in _rows(at, grid, logits, asks, pitch):
        numbers = at(found, "float64")[row * FOUND :][:FOUND]
        if ask[7] > 0:
            least = numbers[6]
            if ask[6] > 0:
                running = at(bins, "float64")[row * BINS :][:BINS].cumsum()
                place = next(iter((running >= ask[6] * numbers[1] * 1.000001).nonzero()[0]), BINS)
                if place < BINS - 1:
                    least = max(least, numbers[0] - ask[0] * PER_BIN * (place + 1) * 1.000001)
            kept = (values.astype(np.float64) >= least).nonzero()[0]
            numbers[5] = len(kept)
            order = np.random.default_rng(len(kept)).permutation(len(kept))  # blocks come in any order
            for ids, logit, size in ((few_ids, few_values, K_INLINE), (many_ids, many_values, K_MAX)):
                chosen = kept[order][:size]
                at(ids, "int32")[row * size :][: len(chosen)] = chosen
                at(logit, "float32")[row * size :][: len(chosen)] = values[chosen]


@np.errstate(all="ignore")
def _residual(at, asks, rows, pair):
    ask = at(asks, "float64")[pair * RESIDUAL_ASK :][:RESIDUAL_ASK]
    target, draft = at(rows, "int64")[pair * RESIDUAL_ASK :][:2].tolist()
    width, other, token = int(ask[1]), int(ask[5]), int(ask[9])
    masses = ask[8] * (np.exp((at(target, "float32")[:width].astype(np.float64) - ask[2]) / ask[0]) / ask[3])
    if token < 0:
        values = at(draft, "float32")[: min(width, other)].astype(np.float64)
        masses[: len(values)] -= np.exp((values - ask[6]) / ask[4]) / ask[7]
    else:
        masses[token : token + 1] = 0
    return np.maximum(masses, 0), ask[10]


def weigh_surplus(at, grid, asks, rows, sums, blocks):
    for pair in range(grid[0]):
        masses, _ = _residual(at, asks, rows, pair)
        sums_of = np.add.reduceat(masses, np.arange(0, len(masses), BLOCK))
        at(sums, "float64")[pair * blocks :][:blocks] = [*sums_of, *[0] * (blocks - len(sums_of))]


def draw_surplus(at, grid, asks, rows, sums, found, blocks):
    for pair in range(grid[0]):
        masses, uniform = _residual(at, asks, rows, pair)
        parts = at(sums, "float64")[pair * blocks :][:blocks]
        total = parts.sum()
        block = _pick(parts, uniform * total)
        place = _pick(masses[block * BLOCK :][:BLOCK], uniform * total - parts[:block].sum())
        at(found, "float64")[2 * pair :][:2] = total, block * BLOCK + place


KERNELS = {kernel.__name__: kernel for kernel in (weigh, draw, spread, gather, weigh_surplus, draw_surplus)}
