"""Drafting with MTP modules in turn: module i guesses draft token i (DeepSeek-AI 2024, section 2.2).

::

    position:     0     1     2     3    4
    token:        a     b     c     d    e         e is the newest, which the target has not seen
    feature:      fa    fb    fc    fd             what the target thought after each
    module 1:     fa,b  fb,c  fc,d  fd,e           entry i: the feature of token i, and token i+1
    module 2:     ga,c  gb,d  gc,e  gd,x           what module 1 made of entry i, and token i+2; x is its guess
    module 3:     ha,d  hb,e  hc,x  hd,y

Each module has its own KV cache, and entry i is the same place in all of them. So one step of M modules runs all of
them, one after the other, over entries that are fed with the tokens known by then. Of M modules, the last M-1 entries
lack tokens: they are read again with those that come, of the draft first. Nothing that was made of draft tokens stays.
A draft ends after the last module.

An entry that has a token and no feature yet is no entry of a module: its token is what those before it read.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from specexport_runtime.abi import AHEAD_ID
from specexport_runtime.drafters.base import HEAD
from specexport_runtime.drafters.draft_loop import Draft
from specexport_runtime.drafters.head import DEFAULT_HEAD_LOOKAHEAD, HeadDrafter, PendingFeatures
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.lookahead.draft_cost import DraftCost, EngineCost
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.request import NO_ROW, Request

if TYPE_CHECKING:
    from specexport_runtime.costs.curves import CostCurves, StepCost


def make_modules_work(tokens: Sequence[int], features: Float32Array) -> RowWork:
    """A step over ``features`` [n, E] and the tokens after them, for the logits of the module after the last."""
    count, width = features.shape
    ahead = [AHEAD_ID - token for token in tokens[count:]]
    whole = np.concatenate([features, np.zeros((len(ahead), width), np.float32)]) if ahead else features
    return RowWork([*tokens[:count], *ahead], 1, whole)


class ModulesDrafter(HeadDrafter):
    """Draft from MTP modules, at most a token a module; features stay until their entry's tokens are known."""

    def __init__(self, runner: ModelRunner, **named: Any) -> None:
        super().__init__(runner, **named)
        self.reach = count = runner.executor.num_modules
        if not count:
            raise SpecexportError("the drafter of modules in turn needs an engine of MTP modules.")
        self.traits = self.traits._replace(default_lookahead=min(DEFAULT_HEAD_LOOKAHEAD, count), max_lookahead=count)
        # Entries that the round's first step wrote with all their tokens.
        self._whole: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def _pending(self, draft: Draft) -> RowWork:
        """The entries that lack a token, or did so; with the tokens of the draft so far."""
        req = draft.request
        held = self._held.get(req)
        if held is None or not held.count:
            raise SpecexportError("the target gave no features of this request.")
        if draft.tokens:
            self._settle(req, held)
        else:
            if held.count > self._limit_new_tokens(self.max_backlog, self.reach - 1):
                self._read_held(req, held)
            self._whole[req] = max(0, held.count - self.reach + 1)
        return make_modules_work(
            self._replace_unknown_ids([*req.tokens[held.start + 1 :], *draft.tokens]), self._peek(req, held)
        )

    def _is_kept(self, draft: Draft) -> bool:
        """Entries of the first step, till :meth:`_settle` takes back those that lack tokens."""
        return not draft.tokens

    def _settle(self, req: Request, held: PendingFeatures) -> None:
        """Keep the entries that were written with all their tokens, let their features go, and forget the others."""
        count = self._whole.pop(req, None)
        if count is not None and req.row != NO_ROW:
            self._commit(req, held, count)

    def _commit(self, req: Request, held: PendingFeatures, count: int) -> None:
        """The first ``count`` entries of the features that are held are written, and no more of them."""
        start = held.start + count
        self.runner.kv.commit(req.row, start)
        rest = held.take()[count:]
        held.start = start
        if len(rest):
            held.add(start, rest)

    def _peek(self, req: Request, held: PendingFeatures) -> Float32Array:
        """All features that are held; SpecexportError if they are not those of the cache's next entries."""
        if held.start != self.runner.kv.kv_len(req.row):
            raise SpecexportError(
                f"features begin at {held.start}, and the modules go on at {self.runner.kv.kv_len(req.row)}."
            )
        features = held.take()
        held.add(held.start, features)
        return features

    def _read_held(self, request: Request, held: PendingFeatures) -> None:
        """Read the features that wait and whose entries lack no token, in chunks."""
        self._settle(request, held)
        runner, ahead = self.runner, self.reach - 1
        before = runner.executor.engine_seconds
        while (count := min(held.count, len(request.tokens) - 1 - ahead - held.start, runner.max_chunk - ahead)) > 0:
            tokens = self._replace_unknown_ids(request.tokens[held.start + 1 : held.start + 1 + count + ahead])
            runner.step(request.row, [make_modules_work(tokens, self._peek(request, held)[:count])], "token_ids")
            self._commit(request, held, count)
        runner.prefill_seconds += runner.executor.engine_seconds - before

    def restart(self, request: Request) -> None:
        """See ``Drafter.restart``."""
        super().restart(request)
        self._whole.pop(request, None)

    def commit(self, requests: Sequence[Request]) -> None:
        """Forget features of rejected tokens, and keep entries that no draft token is in."""
        for req in requests:
            if held := self._held.get(req):
                self._settle(req, held)
        super().commit(requests)

    def cost(self, curves: "CostCurves") -> DraftCost | None:
        """See ``Drafter.cost``."""
        curve = curves.drafters.get(HEAD)
        return None if curve is None else _ModulesCost(curve, self.reach + 1)


class _ModulesCost(EngineCost):
    """The cost of modules: each step of a row reads its last entries again."""

    def __init__(self, curve: "StepCost", width: int) -> None:
        super().__init__(curve)
        self._width = width

    def seconds(self, requests: Sequence[Request], num_rows: int, kv_entries: float) -> float:  # noqa: ARG002
        """See ``DraftCost.seconds``."""
        return self._curve.seconds(self._width * num_rows, num_rows, kv_entries)
