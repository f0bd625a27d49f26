"""From what a caller asks for to the state of a sequence: encoding, checks, how to draft."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.checks import (
    check_acceptance,
    check_adapter,
    check_owner_and_priority,
    check_text,
    check_token_ids,
    check_token_range,
)
from specexport_runtime.intake.drafting import Capabilities, DraftDefaults, RequestOptions, resolve_draft_plan
from specexport_runtime.intake.grammars import GrammarCompiler
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.request import Delivery, DraftPlan, Request
from specexport_runtime.requests.results import Prompt
from specexport_runtime.requests.text import TextStream
from specexport_runtime.requests.token_bytes import ids_of
from specexport_runtime.sampling.block import DEFAULT_RULE
from specexport_runtime.sampling.grammar import TokenRules
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.thinking_budget import BudgetRules

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class RequestBuilder:
    """What every request of an engine is checked against."""

    tokenizer: "Tokenizer"
    vocab_size: int  # rows of the target's LM head (V)
    max_model_len: int  # most tokens of one sequence, prompt included
    capabilities: Capabilities
    eos_token_ids: tuple[int, ...]
    defaults: DraftDefaults  # how to draft for requests that do not say
    grammars: GrammarCompiler  # of texts whose form is given
    adapters: tuple[str, ...] = ()  # LoRA adapters that requests may choose, in the order of their numbers, from 1

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; ``InvalidRequestError`` if it is empty, no text, too long, or has ids out of range."""
        if isinstance(prompt, str):  # an empty one is a BOS token, if texts begin with one
            check_text(prompt, "the prompt")
            ids = ids_of(self.tokenizer, prompt, add_special_tokens=add_special_tokens)
        else:
            ids = _to_plain_ints(prompt)
        check_token_ids(ids, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        return ids

    def encode_reference(self, reference: Prompt | None) -> list[int]:
        """Token ids of a reference text, without special tokens; none for None or an empty text."""
        if reference is None or not len(reference):
            return []
        if isinstance(reference, str):
            check_text(reference, "the reference")
            return ids_of(self.tokenizer, reference, add_special_tokens=False)
        ids = _to_plain_ints(reference)
        check_token_range(ids, vocab_size=self.vocab_size, what="the reference")
        return ids

    def build(
        self,
        index: int,  # the caller's number for the request
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        reference: Prompt | None = None,  # what lookup may copy from
        *,
        stream: bool = False,  # keep the text of each token
    ) -> Request:
        """The sequence of one request; ``InvalidRequestError`` if the request can never be served."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling parameters are {params!r:.80}.", "give SamplingParams(max_tokens=…).")
        is_repeatable = params.seed is not None and not params.is_greedy
        plan = resolve_draft_plan(options, self.capabilities, self.defaults, is_repeatable=is_repeatable)
        traits = [self.capabilities.drafters[stage.drafter] for stage in plan.stages]
        if reference is not None and not any(each.takes_reference for each in traits):
            raise InvalidRequestError(
                "this drafter does not copy from a reference.", "use drafter 'lookup', 'suffix' or 'chained'."
            )
        rules = self._resolve_layer_rules(
            options.get("layer_rules"), takes_layers=any(each.takes_layers for each in traits)
        )
        for text in params.stop_strings:
            check_text(text, "a stop text")
        owner, priority = options.get("owner", ""), options.get("priority", 0)
        check_owner_and_priority(owner, priority)
        acceptance = options.get("acceptance")
        acceptance = DEFAULT_RULE if acceptance is None else acceptance
        check_acceptance(acceptance)
        exit_params = self._resolve_exit_params(options.get("draft_exit"), plan)
        grammar: TokenRules | None = None
        if params.structured_outputs is not None and params.ignore_eos:
            raise InvalidRequestError(
                "structured_outputs ends a text, and ignore_eos does not.", "leave one of them out."
            )
        ids, form = self.encode(prompt), None
        hidden = self._find_hidden_tokens(params)
        if params.structured_outputs is not None:
            silent = (self.special_tokens if hidden is None else hidden) if params.skip_special_tokens else ()
            follows_text = any(token not in silent for token in ids)
            grammar = form = self.grammars.compile(params.structured_outputs, follows_text=follows_text)
        if params.thinking_budget is not None:
            most = max(self.capabilities.lookahead, plan.tree_size, *[stage.lookahead for stage in plan.stages], 0)
            grammar = BudgetRules(params.thinking_budget, self.vocab_size, form, most)
        return Request(
            index,
            ids,
            params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            text=TextStream(self.tokenizer, params, hidden, ids),
            seed=secrets.randbits(63) if params.seed is None or self.capabilities.is_shared(plan) else params.seed,
            grammar=grammar,
            plan=plan._replace(
                reference=self.encode_reference(reference),
                draft_exit=None if exit_params is None else DraftExit(exit_params),
                layer_rules=rules,
                forced_lookahead=0 if form is None else self.capabilities.lookahead,
                acceptance=acceptance,
            ),
            delivery=Delivery(
                stream,
                options.get("trace", False),
                scope=_get_prefix_scope(options),
                owner=owner,
                priority=priority,
                adapter=self.find_adapter(options.get("lora")),
            ),
        )

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """Ids of all special tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, each in added.items() if each.special)

    def _find_hidden_tokens(self, params: SamplingParams) -> frozenset[int] | None:
        """Tokens without a text, where they are not just the special ones: what ends a text has no part in its form."""
        ends = frozenset(() if params.structured_outputs is None else self.eos_token_ids) - self.special_tokens
        if not (params.skip_special_tokens and (params.shown_special_tokens or ends)):
            return None
        return (self.special_tokens | ends) - frozenset(params.shown_special_tokens)

    def find_adapter(self, name: str | None) -> int | None:
        """Number of an adapter, from 1; None for no name; ``InvalidRequestError`` for an unknown one."""
        check_adapter(name, self.adapters)
        return None if name is None else self.adapters.index(name) + 1

    def _resolve_layer_rules(self, rules: LayerRules | None, *, takes_layers: bool) -> LayerRules:
        """The layers that drafts leave out; ``takes_layers``: a drafter of the request leaves some out."""
        if takes_layers:
            (rules or self.defaults.layer_rules).check_layers(self.capabilities.num_layers)
        elif rules is not None:
            raise InvalidRequestError("layer rules are for drafting with the target itself.", "use drafter 'self'.")
        return rules or self.defaults.layer_rules

    def _resolve_exit_params(self, asked: DraftExitParams | bool | None, plan: DraftPlan) -> DraftExitParams | None:
        """When drafts of models end for this request; None: never before K."""
        drafts = any(self.capabilities.drafters[stage.drafter].can_exit for stage in plan.stages)
        if asked is None:
            return self.defaults.draft_exit if drafts else None
        if asked is False:
            return None
        if not drafts:
            raise InvalidRequestError(
                "a draft exit ends drafts of models, and none drafts here.", "use drafter 'draft-model' or 'self'."
            )
        return DraftExitParams() if asked is True else asked


def _get_prefix_scope(options: RequestOptions) -> str | None:
    """Name of the scope within which requests share kept texts; None to share none."""
    salt = options.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise InvalidRequestError(f"cache_salt is {salt!r}.", "give a text, or leave it out.")
    return (salt or "") if options.get("remember", True) else None


def _to_plain_ints(ids: Sequence[int]) -> list[int]:
    return [int(token) if isinstance(token, np.integer) else token for token in ids]
