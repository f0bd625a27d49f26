"""Two requests with one seed: whatever the first left to copy or taught, the second has the target's distribution.

Enumerated as in ``test_tree``: both requests draw with the same integrated numbers.
"""

from collections import Counter

import pytest

from specexport_runtime.drafters.registry import KINDS as PARTS
from specexport_runtime.intake.drafting import Capabilities, DraftDefaults, resolve_draft_plan
from specexport_runtime.sampling import accept, block, tree
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.tree import TREE_RULES
from tests.support.fakes.drafter_kinds import KINDS
from tests.support.fakes.engine import make_engine
from tests.support.fakes.heads_on_fakes import PROMPTS
from tests.support.fakes.loop import make_sequence, run
from tests.support.references.drawn import Models, WholeDraws, distribution, draw, error, integrate, path_of

LENGTH = 3


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("form", ["chain", "tree"])
@pytest.mark.parametrize("drawn", [0, 1])
def test_what_a_seed_gave_before_is_copied_and_the_distribution_is_the_targets(form, name, drawn, monkeypatch):
    """The first text is plain; the draft has ``drawn`` tokens of a model, and then copies of that text."""
    integrate(monkeypatch, accept, block, tree)
    for seed in range(3):
        made = Models(seed)

        def both(way, made=made):
            draws, plain, tokens, distributions = WholeDraws(way), (), (), []
            for place in range(LENGTH):
                plain += (draw(made.target(plain), draws(place).resample),)
            for place in range(2):
                distributions.append(made.draft(tokens) if place < drawn else None)
                tokens += (draw(distributions[-1], draws(place).draft) if distributions[-1] else plain[place],)
            if form == "chain":
                verdict = RULES[name](tokens, distributions, lambda j: made.target(tokens[:j]), draws)
            else:
                verdict = TREE_RULES[name](
                    tokens, [-1, 0], distributions, lambda p: made.target(tokens[: p + 1]), draws
                )
            text = (*[tokens[i] for i in path_of(verdict)], verdict.next_token)
            assert drawn or text == plain[: len(text)]
            return text

        assert error(Counter(distribution(both)), made.target, LENGTH) < 1e-12


@pytest.mark.parametrize("tree_size", [0, 12])
@pytest.mark.parametrize("name", KINDS)
def test_a_seed_that_is_asked_again_gives_its_text_and_copies_give_plain_decodings(name, tree_size):
    decoder, target, _ = KINDS[name].make(4, 0.4)
    target.takes_trees = True
    texts, drafted = [], 0
    for plan in (decoder.plan, decoder.plan, ()):
        decoder.plan = plan
        given = [
            make_sequence(
                i, PROMPTS[i % 4], SamplingParams(max_tokens=16, temperature=0.9, top_k=5), seed=i, scope="x",
                acceptance=("block", "token")[i % 2], tree_size=tree_size if plan else 0,
            )
            for i in range(8)
        ]  # fmt: skip
        run(decoder, given)
        texts.append([seq.output for seq in given])
        drafted += sum(seq.stats.accepted for seq in given)
    assert drafted
    assert texts[0] == texts[1]
    if KINDS[name].good is None:
        assert texts[1] == texts[2]


TRAITS = {name: kind.traits for name, kind in PARTS.items()}


@pytest.mark.parametrize(
    ("drafter", "lookahead", "stages"),
    [
        (None, None, ["draft-model"]), (None, "auto", ["draft-model"]), ("auto", None, ["draft-model"]),
        ("auto", "auto", ["draft-model"]), ("auto", 3, ["draft-model"]), ("draft-model", "auto", ["draft-model"]),
        ("chained", "auto", ["lookup", "draft-model"]), ("suffix", None, ["suffix"]), ("suffix", "auto", ["suffix"]),
    ],
)  # fmt: skip
def test_a_seed_gets_what_depends_on_no_other_request_whatever_the_default_is(drafter, lookahead, stages):
    capabilities = Capabilities(TRAITS, {}, 8, frozenset(TRAITS), takes_trees=True)
    defaults = DraftDefaults(drafter, lookahead)
    plan = resolve_draft_plan({}, capabilities, defaults, is_repeatable=True)
    assert [stage.drafter for stage in plan.stages] == stages
    assert not plan.adaptive
    assert not capabilities.is_shared(plan)
    assert plan.stages[-1].lookahead == (3 if lookahead == 3 else TRAITS[stages[-1]].default_lookahead)
    for asked in ({"drafter": "auto"}, {"num_speculative_tokens": "auto"}):
        assert resolve_draft_plan(asked, capabilities, defaults, is_repeatable=True).adaptive


def test_a_request_that_others_teach_has_numbers_of_its_own():
    engine = make_engine()

    def numbers(**options):
        params = SamplingParams(seed=5, temperature=1.0)
        return engine._builder.build(0, "w1 w2", params, options).draws.peek(0)

    alone = numbers()
    for options in ({"drafter": "suffix"}, {"drafter": "lookup"}, {"drafter": "none"}):
        assert numbers(**options) == alone
    for options in ({"drafter": "auto"}, {"drafter": "auto", "num_speculative_tokens": 2}):
        assert len({alone, numbers(**options), numbers(**options)}) == 3
