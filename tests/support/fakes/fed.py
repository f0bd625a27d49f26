"""What an engine of fakes has read."""

from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.loop import make_sequence, run


def ask(decoder, prompt, tokens=6, *, scope="", seed=0, plan=(), temperature=0.0, pinned=False):
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    seq = make_sequence(0, prompt, params, seed=seed, scope=scope, draft_plan=plan, is_pinned=pinned)
    run(decoder, [seq])
    return seq


def fed(decoder):
    counts, execute = [], decoder.target.step_rows

    def step(first_row, work, *args):
        counts.extend(len(row.tokens) for row in work)
        return execute(first_row, work, *args)

    decoder.target.step_rows = step
    return counts


def check_conversation(make_decoder, prompt, temperature=0.0):
    """Only what is new is read, and every text and every draft is what it is where all is read anew: the sequences."""
    found = {}
    for reuse in (True, False):
        decoder, text, found[reuse] = make_decoder(reuse), prompt, []
        for turn in range(4):
            counts = fed(decoder)
            seq = ask(decoder, text, seed=turn, temperature=temperature)
            found[reuse].append(seq)
            if reuse and turn:
                assert seq.stats.cached_tokens == len(text) - 5  # what came since, and the last token of the answer
                assert 0 < sum(counts) <= 5 + 5 * seq.stats.rounds
            text = [*seq.tokens, 3, 1, 4, 1]
    texts, anew = (
        [(seq.output, seq.stats.accepted_lengths, seq.stats.drafted) for seq in each] for each in found.values()
    )
    assert texts == anew
    return found[True]
