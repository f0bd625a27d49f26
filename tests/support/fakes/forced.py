"""Decoders with forced tokens."""

import numpy as np

from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.drafter_kinds import KINDS, LAYERS, chosen, gated, self_decoder
from tests.support.fakes.loop import VOCAB, make_decoder, make_draft, make_sequence, make_target, run

PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 0, 7]]
ROOM = 8


class Steps:
    """A grammar: at every second place and at each third of what is left one token is possible, else three are."""

    def __init__(self):
        self.said = []

    @staticmethod
    def choices(said):
        place, last = len(said) % 6, said[-1] if said else 0
        if place in (1, 3, 4):
            return {(last + 5) % VOCAB}
        return {place, place + 5, (last + 9) % VOCAB}

    def allowed(self, drafted):
        mask = np.zeros(VOCAB, np.bool_)
        mask[list(self.choices([*self.said, *drafted]))] = True
        return mask

    def cut(self, drafted):
        for count, token in enumerate(drafted):
            if token not in self.choices([*self.said, *drafted[:count]]):
                return count
        return len(drafted)

    def forced(self, most, drafted=()):
        found = []
        while len(found) < most and len(only := self.choices([*self.said, *drafted, *found])) == 1:
            found += only
        return found

    def consume(self, tokens):
        assert self.cut(tokens) == len(tokens)
        self.said += tokens


def sequences_with(make_params, prompts=PROMPTS, **options):
    return [
        make_sequence(i, prompt, make_params(i), grammar=Steps(), forced_lookahead=ROOM, seed=i, **options)
        for i, prompt in enumerate(prompts)
    ]


def model_decoder(lookahead, noise, rows=4, *, stages=("draft-model",), target=None):
    kind = "same" if noise == 0.0 else "good" if noise == 0.4 else "random"
    plan = tuple(DraftStage(name, lookahead) for name in stages)
    return make_decoder(target or make_target(rows), make_draft(kind, rows), lookahead, plan=plan)


def layers_decoder(lookahead, noise, rows=4):
    decoder = self_decoder(gated(noise, rows), lookahead)
    choose = decoder.drafter.drafters["self"].choose
    add = decoder.add
    decoder.add = lambda seq: (add(seq), choose(seq, chosen(2 ** (2 * LAYERS) // 3)))
    return decoder


DECODERS = {
    "draft-model": model_decoder,
    "lookup": lambda k, noise: model_decoder(k, noise, stages=("lookup",)),
    "chained": lambda k, noise: model_decoder(k, noise, stages=("lookup", "draft-model")),
    "self": layers_decoder,
    **{
        name: lambda k, noise, kind=KINDS[name]: kind.make(k, noise)[0]
        for name in ("head", "medusa", "hydra", "block head", "assistant")
    },
}


def plain_texts(prompts, count, target):
    sequences = sequences_with(lambda _: SamplingParams(max_tokens=count), prompts)
    run(make_decoder(target, None, 0), sequences)
    return [seq.output for seq in sequences]
