"""A draft model with another vocabulary: what it reads, drafts and keeps, and the distribution of what comes out."""

import numpy as np
import pytest

from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.bundle.token_map import NOT_SHARED, TokenMap
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters import other_tokens
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.other_tokens import OtherVocabularyDrafter, SpelledText
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.host_rows import HostRows
from specexport_runtime.executors.logit_rows import argmax_ids
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.heads_on_fakes import check_plain
from tests.support.fakes.loop import CAPACITY, VOCAB, finish, greedy_reference, make_sequence, make_target
from tests.support.references.exact import P_VALUE
from tests.support.references.exact_texts import least_p_value, make_requests

PLAN = (DraftStage("draft-model", 4),)
PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 9, 0, 2, 5, 11, 6, 1, 8, 4, 10, 12]]


@pytest.fixture(autouse=True)
def _roomy(monkeypatch):
    """These vocabularies differ more than people's do."""
    monkeypatch.setattr(other_tokens, "STRETCH", 3.0)


def make_map(vocab: int, shared: list[int], *, lead: bool = True, first: int = NOT_SHARED) -> TokenMap:
    """Shared tokens have ids from the end, in turned order; others are two or three pieces; the last id begins texts.

    A piece is of one token alone, so that a text can be read back from its spelling.
    """
    rest = [token for token in range(vocab) if token not in shared]
    sizes = [2 + token % 2 for token in rest]
    own = {token: sum(sizes) + place for place, token in enumerate(reversed(shared))}
    size = sum(sizes) + len(shared) + 1
    target_ids = np.full(size, NOT_SHARED, np.int32)
    target_ids[list(own.values())] = list(own)
    spelled, at = [], 0
    for token in range(vocab):
        if token in own:
            spelled.append([own[token]])
        else:
            count = sizes[rest.index(token)]
            spelled.append(list(range(at, at + count)))
            at += count
    starts = np.cumsum([0, *map(len, spelled)], dtype=np.int32)
    return TokenMap(
        target_ids, starts, np.array([piece for each in spelled for piece in each], np.int32),
        np.array([size - 1] if lead else [], np.int32), np.array(first, np.int64),
    )  # fmt: skip


class Reader(FakeExecutor):
    """The draft: it reads a spelling back, and then says what ``source`` would of the shared tokens.

    A spelling that is not the beginning of a text raises, unless ``garbled`` says what is said then.
    """

    def __init__(self, token_map: TokenMap, source: FakeExecutor, rows: int, capacity: int) -> None:
        super().__init__(len(token_map.target_ids), rows, capacity)
        self.map, self.source = token_map, source
        self.shared = np.flatnonzero(token_map.target_ids != NOT_SHARED)
        self.rows = HostRows(len(self.shared), rows)
        pieces = token_map.pieces.tolist()
        self.spelled = {
            tuple(pieces[start:end]): token
            for token, (start, end) in enumerate(zip(token_map.starts, token_map.starts[1:], strict=False))
        }

    def read_back(self, ids: list[int]) -> list[int]:
        lead = self.map.lead.tolist()
        assert ids[: len(lead)] == lead, "the text begins as the draft was trained"
        tokens, held = [], ()
        for piece in ids[len(lead) :]:
            held += (piece,)
            if held in self.spelled:
                tokens.append(self.spelled[held])
                held = ()
        self.held = held
        return tokens

    def logits_after(self, tokens, mask=None):
        text = self.read_back([int(token) for token in tokens])
        logits = np.full(self.vocab_size, -100.0, np.float32)  # nothing that is not shared is said
        if not self.held and text:
            logits[self.shared] = self.source.logits_after(text)[self.map.target_ids[self.shared]]
        return logits

    def execute(self, want="logits"):
        logits = super().execute("logits")[:, self.shared]
        return logits if want == "logits" else argmax_ids(logits)


def make_drafter(
    token_map, source=None, *, rows=4, capacity=CAPACITY, drafter=OtherVocabularyDrafter, vocab=VOCAB, **options
):
    reader = Reader(token_map, source or FakeExecutor(vocab, rows, capacity), rows, capacity)
    head = CutHead(reader.shared.astype(np.int32), len(token_map.target_ids))
    return drafter(ModelRunner(reader, **options), token_map, head, vocab_size=vocab, max_backlog=9)


SHARED = [0, 2, 3, 5, 8, 9, 11, 12, 14, 16]
MAP = make_map(VOCAB, SHARED)


def make_decoder(drafter, rows=4, **options):
    return Decoder(ModelRunner(make_target(rows)), ChainDrafter({"draft-model": drafter}), **options)


def sequences(prompts=PROMPTS, plan=PLAN, **options):
    exits = {"draft_exit": DraftExit(DraftExitParams(gamma=0.3))} if options.pop("exits", False) else {}
    params = SamplingParams(max_tokens=30, **options)
    return [make_sequence(i, prompt, params, draft_plan=plan, seed=i, **exits) for i, prompt in enumerate(prompts)]


def ideal_accepted(token_map: TokenMap, target: FakeExecutor, prompt: list[int], count: int, lookahead: int) -> int:
    """Accepted drafts of greedy rounds, by the definition: the target's likeliest of the shared tokens."""
    shared = set(token_map.target_ids[token_map.target_ids != NOT_SHARED].tolist())
    text = [*prompt, *greedy_reference(target, prompt, count)]
    found, at = 0, len(prompt) + 1
    while at < len(text):
        accepted = 0
        while accepted < min(lookahead, len(text) - at - 1):
            logits = target.logits_after(text[: at + accepted])
            if max(shared, key=lambda token: logits[token]) != text[at + accepted]:
                break
            accepted += 1
        found += accepted
        at += accepted + 1
    return found


@pytest.mark.parametrize(("exits", "rows"), [(False, 1), (False, 4), (True, 4)])
def test_greedy_text_is_plain_and_acceptance_is_that_of_the_definition(exits, rows):
    """The draft reads the whole text right after each round, or it would guess otherwise, or fail."""
    target, decoding = make_target(), sequences(exits=exits)
    finish(make_decoder(make_drafter(MAP, rows=rows), rows), decoding)
    check_plain(make_target(), decoding)
    for seq, prompt in zip(decoding, PROMPTS, strict=True):
        assert exits or seq.stats.accepted == ideal_accepted(MAP, target, prompt, 30, 4)
    assert sum(seq.stats.accepted for seq in decoding) > 20


@pytest.mark.parametrize("case", ["eight ragged rows come and go", "padded rows", "other drafters between"])
def test_texts_are_plain_ones(case):
    decoder, decoding = make_decoder(make_drafter(MAP)), sequences()
    if case == "eight ragged rows come and go":
        generator, decoder = np.random.default_rng(3), make_decoder(make_drafter(MAP, rows=8), 8)
        decoding = sequences([generator.integers(0, VOCAB, 1 + 2 * i).tolist() for i in range(14)])
        for i, seq in enumerate(decoding):
            seq.draft_plan, seq.max_tokens = (DraftStage("draft-model", i % 6),), 8 + 3 * (i % 5)
    elif case == "padded rows":
        drafters = {"draft-model": make_drafter(MAP, unpad_kv=False)}
        decoder = Decoder(ModelRunner(make_target(), unpad_kv=False), ChainDrafter(drafters))
    else:  # they leave much to catch up on
        decoder.drafter.drafters["lookup"] = LookupDrafter()
        decoding = sequences(plan=(DraftStage("lookup", 7), *PLAN))
    finish(decoder, decoding)
    check_plain(make_target(), decoding)
    assert sum(seq.stats.accepted for seq in decoding) > 20


SMALL, SMALL_SHARED = 6, [1, 2, 4]


class Shifted(OtherVocabularyDrafter):
    """Says another distribution than it draws from: that of the next shared token."""

    def propose(self, requests, lookaheads, begun=None):
        def shifted(p):
            return p._replace(probs=np.roll(p.probs, 1) * 0.5 + p.probs * 0.5)

        found = super().propose(requests, lookaheads, begun)
        return [each._replace(distributions=[shifted(p) for p in each.distributions or ()]) for each in found]


def sampled(count, params, drafter=OtherVocabularyDrafter, plan=PLAN, acceptance="token"):
    """Requests after one prompt after decoding, with the executors of target and draft."""
    target, source = FakeExecutor(SMALL, 8, 16, context=1, sharpness=1.0), FakeExecutor(SMALL, 8, 16, context=1, seed=4)
    draft = make_drafter(make_map(SMALL, SMALL_SHARED), source, rows=8, capacity=24, drafter=drafter, vocab=SMALL)
    decoding = make_requests(count, params, prompts=[[2, 3]], vocab=SMALL, draft_plan=plan, acceptance=acceptance)
    finish(Decoder(ModelRunner(target), ChainDrafter({"draft-model": draft})), decoding)
    accepted, drafted = (sum(getattr(seq.stats, name) for seq in decoding) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    return decoding, target, source


@pytest.mark.parametrize(("temperature", "acceptance"), [(0.8, "token"), (1.0, "block")])
def test_sampled_text_follows_the_targets_distribution(temperature, acceptance):
    params = SamplingParams(temperature=temperature, max_tokens=3, top_p=0.97)
    decoding, target, _ = sampled(800, params, acceptance=acceptance)
    assert least_p_value(target, decoding) > P_VALUE


def test_another_distribution_than_the_drawn_one_fails_the_same_check():
    decoding, target, _ = sampled(800, SamplingParams(temperature=1.0, max_tokens=3, top_p=0.97), Shifted)
    assert least_p_value(target, decoding) < P_VALUE


def test_the_rate_of_acceptance_is_that_of_the_definition():
    """The sum over the shared tokens of min(p, q), q the draft's softmax over these alone."""
    count, plan = 1500, (DraftStage("draft-model", 1),)
    decoding, target, source = sampled(count, SamplingParams(temperature=1.0, max_tokens=3), plan=plan)

    def softmax(logits):
        weights = np.exp(logits.astype(np.float64) - logits.max())
        return weights / weights.sum()

    wanted = 0.0
    for token, mass in enumerate(softmax(target.logits_after([3]))):  # after the first token, which has no draft
        p, q = softmax(target.logits_after([token])), np.zeros(SMALL)
        q[SMALL_SHARED] = softmax(source.logits_after([token])[SMALL_SHARED])
        wanted += mass * float(np.minimum(p, q).sum())
    accepted = sum(seq.stats.accepted for seq in decoding)
    assert abs(accepted / count - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / count)


def test_a_text_whose_spelling_is_too_long_is_not_drafted_for(monkeypatch):
    """Two or three pieces a token are more than a row is said to hold; the text is plain."""
    monkeypatch.setattr(other_tokens, "STRETCH", 1.0)
    decoding, drafter = sequences([[1, 2, 4, 5, 6, 7, 8] * 3]), make_drafter(make_map(VOCAB, [3, 9]))
    finish(make_decoder(drafter), decoding)
    check_plain(make_target(), decoding)
    assert decoding[0].stats.drafted == 0
    assert not drafter.runner.executor.calls


def test_a_text_that_begins_as_the_drafts_do_has_no_second_beginning():
    token_map = make_map(VOCAB, SHARED, first=7)
    spelled, (start, end) = SpelledText(token_map, [7, 3]), token_map.starts[7:9]
    spelled.grow([7, 3])
    assert spelled.ids == [*token_map.pieces[start:end], int(np.flatnonzero(token_map.target_ids == 3)[0])]
    other = SpelledText(token_map, [3])
    other.grow([3])
    assert other.ids[0] == token_map.lead[0]
    other.grow([3, 1, 0])
    assert other.before == [1, 2, 5, 6]
