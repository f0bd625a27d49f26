"""A benchmark's subject without a bundle: fake engines, and one whose lookup drafting is broken."""

from specexport.bench.options import BenchOptions
from specexport.bench.prompts import BenchPrompt
from specexport.bench.subject import Subject
from specexport_runtime.executors.fake import FakeExecutor
from tests.support.fakes.engine import make_tokenizer
from tests.support.fakes.engine_of import engine_of

VOCAB = 17
CAPACITY = 96
MAX_MODEL_LEN = 64

PROMPTS = [
    BenchPrompt("a/0", "a", "w1 w2"), BenchPrompt("a/1", "a", "w3 w3 w4 w5"), BenchPrompt("a/2", "a", "w16"),
    BenchPrompt("b/0", "b", "w7 w8", reference="w7 w8 w9 w10 w11"), BenchPrompt("b/1", "b", "w2 w2 w2"),
]  # fmt: skip


class LoadedEngine:
    def __init__(self, key, log, *, draft, broken, noise, curves):
        def make(**options):
            return FakeExecutor(VOCAB, key.max_num_seqs, CAPACITY, context=2, **options)

        self.engine = engine_of(
            make(), make_tokenizer(VOCAB), draft=make(noise=noise) if draft else None, max_model_len=MAX_MODEL_LEN,
            unpad_kv=key.unpad_kv, unpad_input=key.unpad_input, cost_curves=curves,
        )  # fmt: skip
        self.key, self.log, self.broken = key, log, broken
        log.append(("load", key))

    def generate(self, prompts, params, **options):
        self.log.append(("generate", self.key, options["drafter"], list(prompts), list(params), options))
        results = self.engine.generate(prompts, params, **options)
        if self.broken and options["drafter"] == "lookup":
            results[-1].token_ids[4] = (results[-1].token_ids[4] + 1) % VOCAB
        return results

    def close(self):
        self.log.append(("close", self.key))
        self.engine.close()

    def __getattr__(self, name):
        return getattr(self.engine, name)


def make_subject(log=None, *, draft=True, broken=False, lookahead=8, noise=0.4, curves=None):
    log = [] if log is None else log
    return Subject(
        "fake", draft, lookahead, {"name": "fake"},
        lambda key: LoadedEngine(key, log, draft=draft, broken=broken, noise=noise, curves=curves),
    )  # fmt: skip


def make_options(methods, **options):
    defaults = {"max_tokens": (12, 12), "repeats": 1, "ignore_eos": True}
    return BenchOptions(methods=tuple(methods), **(defaults | options))
