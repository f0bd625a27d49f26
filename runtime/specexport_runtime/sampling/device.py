"""Distributions of rows of logits that stay on a device (``executors.device_rows``): what a host asks for is fetched.

Rows at a temperature, with no cut, stay where they are. A cut (min-p, top-k, top-p) leaves few tokens as a rule: these
are fetched, and the host's own code cuts them, so that what is left is what it would leave of the whole row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.device_rows import DeviceRow
from specexport_runtime.executors.row_kernels import FEW, RowAsk, SurplusAsk, whole_row
from specexport_runtime.sampling.distribution import Distribution, Law
from specexport_runtime.sampling.params import CUTS, SamplingParams
from specexport_runtime.sampling.truncation import cut_softmax, truncated_softmax

_SHARE = 64  # candidates that are more than this part of the ids cost as much as the row
_MOST_FLAT, _COMING = 4, 128  # so many flat rows more than others, and the next come whole


def row_ask(params: SamplingParams, width: int) -> RowAsk:
    """What to ask of rows whose tokens below ``width`` are drawn by ``params``, which are not greedy, but for a place.

    That is a uniform, a token, and a slot for rows that no cut makes short.
    """
    least, has_cut = -math.inf, False
    for name, cut in CUTS.items():
        number = getattr(params, name)
        if number != cut.off:
            if cut.reach is None:
                return whole_row(width)
            least, has_cut = max(least, cut.reach(number, params.temperature)), True
    top_k = params.top_k if params.top_k < width else 0
    # With another cut before it, top-p is taken of what that leaves: all of it is needed.
    top_p = params.top_p if params.top_p < 1.0 and not top_k and not has_cut else 0.0
    has_cut = has_cut or top_k > 0 or params.top_p < 1.0
    return RowAsk(params.temperature, width, least=least, top_k=top_k, top_p=top_p, cuts=int(has_cut))


def row_law(row: DeviceRow, params: SamplingParams) -> Law:
    """The distribution of a row that was asked by ``Sampler.ask`` with ``params``; errors as ``truncated_softmax``."""
    if row.found.is_whole:
        if not row.ask.cuts:
            return DeviceLaw(row, params)
        candidates = row.candidates()
        if candidates is not None:
            ids, values = candidates
            return cut_softmax(values, params, row.found.peak, ids, row.found.total if row.ask.top_p else None)
    return _on_host(row, params)


def _on_host(row: DeviceRow, params: SamplingParams) -> Distribution:
    return truncated_softmax(row.fetch(), params)


class DeviceLaw:
    """The softmax of a row at a temperature; ``params`` are those that the row was asked with."""

    def __init__(self, row: DeviceRow, params: SamplingParams) -> None:
        self.row, self._params = row, params
        self._drawn = int(row.found.drawn)
        self.masses: dict[Surplus, DeviceMasses] = {}  # that were asked for ahead

    @property
    def top(self) -> float:
        """Probability of the likeliest token."""
        return 1.0 / self.row.found.total

    def probability(self, token: int) -> float:
        """Probability of one token; that of another than was drawn or asked for fetches the row."""
        if token == self._drawn:
            return self.row.found.drawn_probability
        if token == self.row.ask.token:
            return self.row.found.token_probability
        return self.on_host().probability(token)

    def draw(self, u: float) -> int:
        """The token at ``u``; at another than was asked for it fetches the row."""
        return self._drawn if u == self.row.ask.uniform else self.on_host().draw(u)

    def surplus(self, draft: "DeviceLaw | None", token: int, weight: float) -> "DeviceMasses":
        """See ``accept.surplus``; of a ``draft`` that lies on the device too."""
        asked = Surplus(self, draft, token, weight)
        if asked not in self.masses:
            find_masses([asked])
        return self.masses[asked]

    def on_host(self) -> Distribution:
        """The same distribution; fetches the row."""
        return _on_host(self.row, self._params)


class Surplus(NamedTuple):
    """The masses max(0, w q - p) of laws on the device, see ``accept.surplus``."""

    target: DeviceLaw
    draft: DeviceLaw | None
    token: int
    weight: float

    def ask(self) -> SurplusAsk:
        """What to ask the device."""
        draft = None if self.draft is None else self.draft.row
        return self.target.row.surplus_ask(draft, self.token, self.weight)


def find_masses(asked: Sequence[Surplus]) -> None:
    """Find what ``DeviceLaw.surplus`` will be asked for, of targets of one step, with one wait."""
    if asked:
        found = asked[0].target.row.surpluses([surplus.ask() for surplus in asked])
        for surplus, (total, drawn) in zip(asked, found, strict=True):
            surplus.target.masses[surplus] = DeviceMasses(total, drawn, surplus.target.row.ask.uniform)


class FlatRows:
    """Whether rows of a request with cuts come whole: where cuts leave much of a row, candidates cost more than it."""

    def __init__(self) -> None:
        self._flat, self._coming = 0, 0

    def note(self, row: DeviceRow) -> None:
        """A row was looked at."""
        is_flat = row.found.candidates > max(FEW, row.ask.width // _SHARE)
        self._flat = self._flat + 1 if is_flat else max(0, self._flat - 1)
        if self._flat == _MOST_FLAT:
            self._flat, self._coming = _MOST_FLAT // 2, _COMING

    def comes(self) -> bool:
        """Whether the next row comes whole."""
        self._coming -= self._coming > 0
        return self._coming > 0


def on_host(law: Law) -> Distribution:
    """A law as numbers on the host; one of a device fetches its row."""
    return law if isinstance(law, Distribution) else cast("DeviceLaw", law).on_host()


class DeviceMasses:
    """Masses on the device, of which the sum and one draw are known."""

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
