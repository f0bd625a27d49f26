"""Drafting with a draft model of another vocabulary: it drafts shared tokens, and reads the target's text in its own.

Its cache has as many entries as the spelling of a text has tokens (``bundle.token_map``), so lengths are translated
wherever the text goes on, goes back or is taken over from another request.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.bundle.token_map import STRETCH, TokenMap
from specexport_runtime.drafters.draft_loop import Draft
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.own_cache import MAX_BACKLOG
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftPrefix, Proposal
from specexport_runtime.requests.request import Request


class SpelledText:
    """A request's tokens in the draft's; it grows with them."""

    def __init__(self, token_map: TokenMap, tokens: Sequence[int]) -> None:
        self._map = token_map
        self.ids: list[int] = token_map.get_lead(tokens)
        self.before = [len(self.ids)]  # how many of ``ids`` come before each token of the text, and after the last

    def grow(self, tokens: Sequence[int]) -> None:
        """Take the tokens that are new."""
        if len(tokens) < len(self.before):
            return
        ids, counts = self._map.spell(tokens[len(self.before) - 1 :])
        self.ids += ids
        for count in counts:
            self.before.append(self.before[-1] + count)


class OtherVocabularyDrafter(ModelDrafter):
    """A :class:`ModelDrafter` whose model has another vocabulary. The LM head has rows of shared tokens alone."""

    def __init__(
        self,
        runner: ModelRunner,
        token_map: TokenMap,
        cut_head: CutHead,  # the draft's own token ids of its LM head
        *,
        vocab_size: int,  # V of the target
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        super().__init__(runner, vocab_size=vocab_size, max_backlog=max_backlog)
        self.vocab_size, self._map = vocab_size, token_map
        runner.executor.set_head(token_map.target_head(cut_head, vocab_size))
        self._texts: WeakKeyDictionary[Request, SpelledText] = WeakKeyDictionary()
        # What a grammar forces is spelled in more tokens than may wait beside a state.
        self.traits = self.traits._replace(goes_on=not runner.has_states)

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[DraftPrefix] | None = None
    ) -> list[Proposal]:
        """See ``Drafter.propose``; nothing for texts whose spelling takes more room than their row has."""
        rooms = [
            min(limit, self._room(req, 0 if begun is None else begun[i].room)) if limit and req.num_generated else 0
            for i, (req, limit) in enumerate(zip(requests, lookaheads, strict=True))
        ]
        return super().propose(requests, rooms, begun)

    def _room(self, req: Request, forced: int) -> int:
        """Most tokens that the row has entries for, if ``forced`` tokens of a draft may be a grammar's."""
        most = int(STRETCH * (req.num_prompt_tokens + req.max_tokens))
        spare = forced * self._map.most if req.sampler.grammar is not None else 0
        if not self.runner.unpad_kv:  # rows advance together
            spare += self.max_backlog
        return max(0, min(most, self.runner.kv.capacity) - len(self._update_text(req).ids) - spare)

    def _update_text(self, req: Request) -> SpelledText:
        text = self._texts.get(req)
        if text is None:
            text = self._texts[req] = SpelledText(self._map, req.tokens)
        text.grow(req.tokens)
        return text

    def _unread(self, draft: Draft) -> list[int]:
        known, ids = self.runner.kv.kv_len(draft.request.row), self._update_text(draft.request).ids
        drafted, _ = self._map.spell(draft.tokens)
        return ids[known:] + drafted if known < len(ids) else drafted[known - len(ids) :]

    def commit(self, requests: Sequence[Request]) -> None:
        """Keep the cache entries of accepted tokens; the token the target added has not been fed yet."""
        for req in requests:
            kv_len = self.runner.kv.kv_len(req.row)
            if kv_len:
                self.runner.kv.commit(req.row, min(kv_len, self._update_text(req).before[req.num_agreed]))

    def adopt(self, request: Request, kept: Any, count: int) -> None:
        """A request goes on after ``count`` tokens of a kept text, which are spelled alike; see ``Drafter.adopt``."""
        super().adopt(request, kept, self._update_text(request).before[count])
