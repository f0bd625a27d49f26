"""Distributions of rows of logits that stay on a device (``executors.device_rows``): what a host asks for is fetched.

Rows at a temperature, with no cut, stay where they are. A cut (min-p, top-k, top-p) leaves few tokens as a rule: these
come along, and are cut here, by the rules of ``truncation``.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.device_rows import DeviceRow
from specexport_runtime.executors.row_cuts import cut_residual
from specexport_runtime.executors.row_kernels import RowRule, ask_whole_row
from specexport_runtime.sampling.distribution import Distribution, HostDistribution
from specexport_runtime.sampling.params import CUTS, SamplingParams
from specexport_runtime.sampling.truncation import cut_softmax, truncated_softmax

_MAX_FLAT, _FETCHED = 4, 128  # so many flat rows more than others, and the next come whole


def make_row_rule(params: SamplingParams, width: int) -> RowRule:
    """What to ask of rows whose tokens below ``width`` are drawn by ``params``, which are not greedy."""
    least, has_cut = -math.inf, False
    for name, cut in CUTS.items():
        number = getattr(params, name)
        if number != cut.off:
            if cut.reach is None:
                return ask_whole_row(width).rule
            least, has_cut = max(least, cut.reach(number, params.temperature)), True
    top_k = params.top_k if params.top_k < width else 0
    # With another cut before it, top-p is taken of what that leaves: all of it is needed.
    top_p = params.top_p if params.top_p < 1.0 and not top_k and not has_cut else 0.0
    has_cut = has_cut or top_k > 0 or params.top_p < 1.0
    return RowRule(params.temperature, width, least, top_k, top_p, int(has_cut), params.top_p)


def make_row_distribution(row: DeviceRow, params: SamplingParams) -> Distribution:
    """The distribution of a row that was asked by ``Sampler.ask`` with ``params``; errors as ``truncated_softmax``."""
    if row.found.is_whole:
        if row.is_cut or not row.ask.rule.cuts:
            return RowDistribution(row, params)
        candidates = row.candidates()
        if candidates is not None:
            ids, values = candidates
            return cut_softmax(values, params, row.found.peak, ids, row.found.total if row.ask.rule.top_p else None)
    return truncated_softmax(row.fetch(), params)


class RowDistribution:
    """The distribution of a row that was asked for a draw and for a token's probability, with ``params``.

    It is the softmax at a temperature, of logits that stay where they lie, or what a cut left of it.
    """

    __slots__ = ("_cuts", "_params", "drawn", "drawn_probability", "masses", "row", "token_probability", "top")

    def __init__(self, row: DeviceRow, params: SamplingParams) -> None:
        self.row, self._params = row, params
        self._cuts = row.cuts if row.is_cut else None
        if self._cuts is not None:
            _, self.top, drawn, self.drawn_probability, self.token_probability = self._cuts.numbers[row.cut_at]
        else:
            _, total, drawn, self.drawn_probability, self.token_probability, _, _, _ = row.found
            self.top = 1.0 / total  # probability of the likeliest token
        self.drawn = int(drawn)
        self.masses: dict[Residual, FoundMasses] = {}  # that were asked for ahead

    def probability(self, token: int) -> float:
        """Probability of one token; of another than was drawn or asked for by :meth:`to_host`."""
        if token == self.drawn:
            return self.drawn_probability
        if token == self.row.ask.token:
            return self.token_probability
        return self.to_host().probability(token)

    def draw(self, u: float) -> int:
        """The token at ``u``; at another than was asked for by :meth:`to_host`."""
        return self.drawn if u == self.row.ask.uniform else self.to_host().draw(u)

    def to_host(self) -> HostDistribution:
        """The same distribution as numbers; fetches a row that was not cut."""
        if self._cuts is not None:
            return HostDistribution(*self._cuts.kept(self.row.cut_at))
        return truncated_softmax(self.row.fetch(), self._params)

    def residual(self, draft: Distribution, weight: float) -> "FoundMasses | None":
        """See ``accept.residual``; None of a ``draft`` of another kind, or in another memory."""
        if isinstance(draft, RowDistribution) and self._cuts is not None and draft._cuts is not None:
            uniform, own = self.row.ask.uniform, self._cuts.memory(self.row.cut_at)
            return FoundMasses(*cut_residual(own, draft._cuts.memory(draft.row.cut_at), weight, uniform), uniform)
        if (asked := self.ask(draft, weight)) is None:
            return None
        if asked not in self.masses:
            find_masses([asked])
        return self.masses[asked]

    def ask(self, draft: Distribution | None, weight: float) -> "Residual | None":
        """What :meth:`residual` looks for, of rows that were not cut."""
        if self._cuts is not None or not isinstance(draft, RowDistribution) or draft._cuts is not None:
            return None
        return Residual(self, draft, weight) if draft.row.is_in_same_memory(self.row) else None


class Residual(NamedTuple):
    """The masses max(0, w p - q) of two rows, see ``accept.residual``."""

    target: RowDistribution
    draft: RowDistribution
    weight: float


def find_masses(asked: Sequence[Residual]) -> None:
    """Find what ``RowDistribution.residual`` will be asked for, of uncut targets of one step, with one wait."""
    if asked:
        asks = [target.row.residual_ask(draft.row, weight) for target, draft, weight in asked]
        for residual, (total, drawn) in zip(asked, asked[0].target.row.residuals(asks), strict=True):
            residual.target.masses[residual] = FoundMasses(total, drawn, residual.target.row.ask.uniform)


class FlatRowTracker:
    """Whether rows of a request with cuts come whole: where cuts leave much of a row, candidates cost more than it."""

    def __init__(self) -> None:
        self._flat, self._to_fetch = 0, 0

    def record(self, row: DeviceRow) -> None:
        """A row was looked at."""
        if not row.is_flat:
            self._flat -= self._flat > 0
            return
        self._flat += 1
        if self._flat == _MAX_FLAT:
            self._flat, self._to_fetch = _MAX_FLAT // 2, _FETCHED

    def should_fetch_next(self) -> bool:
        """Whether the next row comes whole."""
        self._to_fetch -= self._to_fetch > 0
        return self._to_fetch > 0


def to_host(given: Distribution) -> HostDistribution:
    """A distribution as numbers on the host; one of a device fetches its row."""
    return given.to_host() if isinstance(given, RowDistribution) else cast("HostDistribution", given)


class FoundMasses:
    """Masses of which the sum and one draw are known."""

    def __init__(self, total: float, drawn: int, uniform: float) -> None:
        self._total, self._drawn, self._uniform = total, drawn, uniform

    def sum(self) -> float:
        """All of the mass."""
        return self._total

    def draw(self, u: float) -> int:
        """The token at ``u``; SpecexportError for another than the row was asked with."""
        if u != self._uniform:
            raise SpecexportError("a residual was asked for with another uniform.")
        return self._drawn
