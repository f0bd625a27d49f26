"""A draft model with an LM head of some tokens: it drafts in whole-vocabulary ids; the distribution is the target's."""

from dataclasses import replace

import numpy as np
import pytest

from specexport_runtime.bundle.arrays import LM_HEAD_IDS_NAME, CutHead, load_cut_head
from specexport_runtime.bundle.entry import CutLmHead
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.errors import BundleError
from specexport_runtime.executors.host_rows import HostRows
from specexport_runtime.executors.logit_rows import argmax_ids
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.manifests import ENTRY
from tests.support.fakes.heads_on_fakes import check_plain
from tests.support.fakes.loop import VOCAB, finish, make_draft, make_sequence, make_target

IDS = np.array([0, 2, 3, 5, 8, 9, 11, 12, 14, 16], np.int32)
WRONG = np.array([1, 3, 4, 6, 9, 10, 12, 13, 15, 16], np.int32)
PLAN = (DraftStage("draft-model", 4),)
PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9]


def cut(executor, ids=IDS):
    """Let an executor of V tokens give the logits of ``ids`` only, as an engine with a cut head does."""
    execute = executor.execute

    def executed(want="logits"):
        logits = execute("logits")[:, ids]
        return logits if want == "logits" else argmax_ids(logits)

    executor.execute = executed
    executor.rows = HostRows(len(ids), executor.num_rows)
    return executor


def make_drafter(draft, ids=IDS, vocab_size=VOCAB):
    return ModelDrafter(ModelRunner(draft), vocab_size=vocab_size, max_backlog=9, cut_head=CutHead(ids, VOCAB))


def make_decoder(draft, ids=IDS, vocab_size=VOCAB):
    return Decoder(ModelRunner(make_target()), ChainDrafter({"draft-model": make_drafter(draft, ids, vocab_size)}))


def run(decoder, sequences):
    finish(decoder, sequences)
    return sum(seq.stats.accepted for seq in sequences), sum(seq.stats.drafted for seq in sequences)


def sequences(**options):
    exits = {"draft_exit": DraftExit(DraftExitParams(gamma=0.3))} if options.pop("exits", False) else {}
    params = SamplingParams(max_tokens=40, **options)
    return [make_sequence(i, prompt, params, draft_plan=PLAN, **exits) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("exits", [False, True], ids=["ids", "logits"])
def test_greedy_text_is_plain_and_every_kept_token_is_guessed(exits):
    """The draft is the target: it is right wherever the target says a token that the head has, and nowhere else."""
    target, decoding = make_target(), sequences(exits=exits)
    accepted, _ = run(make_decoder(cut(make_draft("same"))), decoding)
    check_plain(target, decoding)
    kept = sum(token in IDS for seq in decoding for token in seq.output)
    assert 0.35 * kept < accepted <= kept


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}, {"frequency_penalty": 0.6}], ids=str)
def test_a_wrong_map_is_never_right_and_never_wrong_text(options):
    right = run(make_decoder(cut(make_draft("same"))), sequences(**options))
    wrong = sequences(**options)
    accepted, drafted = run(make_decoder(cut(make_draft("same")), WRONG), wrong)
    assert accepted / drafted < 0.5 * right[0] / right[1]
    if not options:
        check_plain(make_target(), wrong)


def test_what_is_drawn_from_is_over_all_ids():
    """It is the draft's softmax over the ids that it has, and 0 elsewhere; penalties and bias go by token id."""
    params = SamplingParams(temperature=0.7, presence_penalty=0.8, logit_bias={9: 1.5, 10: 4.0})
    seq = make_sequence(0, [3, 9], params, draft_plan=PLAN, seed=3)
    seq.row = 0
    seq.commit([11])
    (proposal,) = make_drafter(cut(make_draft("good"))).propose([seq], [3])
    assert len(proposal.tokens) == 3
    whole = make_draft("good")
    for drafted in range(3):
        before = proposal.tokens[:drafted]
        logits = whole.logits_after([3, 9, 11, *before]).copy()
        logits[np.setdiff1d(np.arange(VOCAB), IDS)] = -np.inf
        expected = seq.sampler.distribution(logits, before)
        assert [proposal.distributions[drafted].probability(token) for token in range(VOCAB)] == [
            expected.probability(token) for token in range(VOCAB)
        ]


def test_ids_beyond_the_shared_vocabulary_are_not_drafted():
    for options in ({}, {"temperature": 1.5, "seed": 2}):
        decoder, seen = make_decoder(cut(make_draft("random")), vocab_size=9), []
        drafter = decoder.drafter.drafters["draft-model"]
        propose = drafter.propose
        drafter.propose = lambda *args, propose=propose, seen=seen: seen.extend(found := propose(*args)) or found
        run(decoder, sequences(**options))
        drafted = {token for proposal in seen for token in proposal.tokens}
        assert drafted <= {0, 2, 3, 5, 8}
        assert len(drafted) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_bans_all_that_the_head_has_is_decoded_without_it(temperature):
    """The target has more tokens: such a request must not fail because of its draft."""
    bans = dict.fromkeys(IDS.tolist(), float("-inf"))
    (seq, *_) = sequences(temperature=temperature, logit_bias=bans)
    assert run(make_decoder(cut(make_draft("same"))), [seq]) == (0, 0)
    assert len(seq.output) == 40
    assert not set(seq.output) & set(IDS.tolist())


def test_nothing_is_drafted_where_logits_are_no_numbers():
    draft = cut(make_draft("good"))
    execute = draft.execute
    draft.execute = lambda want="logits": np.full_like(execute("logits"), np.nan)
    assert run(make_decoder(draft), sequences(temperature=0.8)) == (0, 0)


ENTRY_OF_DRAFT = replace(ENTRY, vocab_size=VOCAB, cut_lm_head=CutLmHead(LM_HEAD_IDS_NAME, len(IDS)))


def test_the_map_is_read(tmp_path):
    np.save(tmp_path / LM_HEAD_IDS_NAME, IDS)
    head = load_cut_head(tmp_path, ENTRY_OF_DRAFT)
    assert head.vocab_size == VOCAB
    assert head.ids.tolist() == IDS.tolist()
    assert head.truncate_vocabulary(9).ids.tolist() == [0, 2, 3, 5, 8]
    assert load_cut_head(tmp_path, ENTRY) is None


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (IDS[:-1], "9 token ids"), (IDS[::-1], "token id 14 follows 16"),
        (np.where(IDS == 2, 0, IDS).astype(np.int32), "token id 0 follows 0"),
        (np.where(IDS == 16, 17, IDS).astype(np.int32), "token id 17 lies outside"),
        (np.where(IDS == 0, -1, IDS).astype(np.int32), "token id -1 lies outside"), (IDS.astype(np.int64), "int32"),
        (IDS[:, None], "int32"), (np.array([{}], object), "cannot be read"),
    ],
    ids=["short", "order", "twice", "beyond", "negative", "int64", "matrix", "pickle"],
)  # fmt: skip
def test_a_damaged_map_is_refused(damaged, said, tmp_path):
    np.save(tmp_path / LM_HEAD_IDS_NAME, damaged)
    with pytest.raises(BundleError, match=said) as refused:
        load_cut_head(tmp_path, ENTRY_OF_DRAFT)
    assert "build it again" in refused.value.hint


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00", None])
def test_a_file_that_is_no_array_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / LM_HEAD_IDS_NAME).write_bytes(content)
    with pytest.raises(BundleError, match="cannot be read"):
        load_cut_head(tmp_path, ENTRY_OF_DRAFT)
