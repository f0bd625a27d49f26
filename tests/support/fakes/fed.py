"""What an engine of fakes has read."""

from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.loop import make_sequence, run


def ask(decoder, prompt, tokens=6, *, scope="", seed=0, plan=(), temperature=0.0, pinned=False):
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    seq = make_sequence(0, prompt, params, seed=seed, scope=scope, draft_plan=plan, is_pinned=pinned)
    run(decoder, [seq])
    return seq


def fed(decoder):
    counts, execute = [], decoder.target.step

    def step(first_row, work, *args):
        counts.extend(len(row.tokens) for row in work)
        return execute(first_row, work, *args)

    decoder.target.step = step
    return counts
