"""Helpers for tests of the decoding loop on fake executors."""

from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.drafters.self_draft import LayersCost
from specexport_runtime.engine_parts import weigh_drafters
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.lookahead.draft_cost import EngineCost, WeighedDrafter
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.requests.request import Request, RoundEvent
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.requests import request_of

VOCAB = 17
CAPACITY = 80
MAX_MODEL_LEN = 64


def make_target(rows: int = 4, **options: object) -> FakeExecutor:
    return FakeExecutor(VOCAB, rows, CAPACITY, **options)


def make_draft(kind: str, rows: int = 4) -> FakeExecutor:
    options = {"same": {}, "good": {"noise": 0.4}, "random": {"seed": 99}, "adversarial": {"negate": True}}[kind]
    return FakeExecutor(VOCAB, rows, CAPACITY, **options)


def make_sequence(index: int, prompt: list[int], params: SamplingParams, **options: object) -> Request:
    return request_of(index, prompt, params, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN, **options)


class PlannedDecoder(Decoder):
    """Gives sequences without a draft plan the one it was made with."""

    plan: tuple[DraftStage, ...] = ()

    def add(self, sequence: Request) -> None:
        sequence.draft_plan = sequence.draft_plan or self.plan
        super().add(sequence)

    @property
    def draft_model(self) -> ModelDrafter | None:
        return self.drafter.drafters.get("draft-model")


def make_decoder(
    target: FakeExecutor, draft: FakeExecutor | None, lookahead: int, *, max_chunk: int = 512, unpad_kv: bool = True,
    unpad_input: bool = True, plan: tuple[DraftStage, ...] | None = None, budget: int | None = None, **options: object,
) -> PlannedDecoder:  # fmt: skip
    def runner(executor: FakeExecutor) -> ModelRunner:
        return ModelRunner(executor, max_chunk=max_chunk, unpad_kv=unpad_kv, unpad_input=unpad_input)

    drafters: dict[str, Drafter] = {"lookup": LookupDrafter()}
    runners = [runner(target)]
    if draft is not None:
        runners.append(runner(draft))
        drafters["draft-model"] = ModelDrafter(
            runners[1], vocab_size=draft.vocab_size, max_backlog=max(lookahead, 8) + 1
        )
    if budget is not None:
        options["memory"] = MemoryBudget(runners, limit=budget, slack=CAPACITY - MAX_MODEL_LEN)
    decoder = PlannedDecoder(runners[0], ChainDrafter(drafters), **options)
    default = (DraftStage("draft-model", lookahead),) if draft is not None else ()
    decoder.plan = default if plan is None else plan
    return decoder


def run(decoder: Decoder, sequences: list[Request]) -> list[RoundEvent]:
    """Decode sequences to their end, checking every round; what failed one is raised."""
    for seq in sequences:
        decoder.add(seq)
    events = []
    while decoder.has_work:
        events += decoder.step()
        decoder.check()
        draft = decoder.drafter.drafters.get("draft-model")
        if draft is not None:
            draft.runner.kv.check()
    for seq in sequences:
        if seq.error is not None:
            raise seq.error
    return events


finish = run


def greedy_reference(target: FakeExecutor, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


def fail_at(executor: FakeExecutor, call: int) -> None:
    execute, calls = executor.execute, []

    def failing(*args: object) -> object:
        calls.append(None)
        if len(calls) == call:
            raise RuntimeError("the device went away")
        return execute(*args)

    executor.execute = failing


def weighed(curves: CostCurves, **drafters: Drafter) -> dict[str, WeighedDrafter]:
    """What lengths are told of the drafters that every engine may have; ``drafters`` are those there really are."""
    known = {name: WeighedDrafter(kind.traits) for name, kind in KINDS.items()}
    known["draft-model"] = known["draft-model"]._replace(
        cost=EngineCost(curves.drafters["draft-model"]) if "draft-model" in curves.drafters else None
    )
    known["self"] = known["self"]._replace(cost=LayersCost(curves, lambda seq: None))
    return known | weigh_drafters(drafters, curves)


def goodput_length(
    curves: CostCurves, lookahead: int, learned: LearnedCosts | None = None, **drafters: Drafter
) -> Controller:
    return Controller(curves, lookahead, drafters=weighed(curves, **drafters), learned=learned)
