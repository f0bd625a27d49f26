"""Results of benchmarks, made by hand."""

from specexport.bench.methods import Cell
from specexport.bench.records import BenchResult, PromptRecord, RunRecord

PLAIN = Cell("plain", "none", True, True, 2, 0, 0.0, "code", "continuous")
LOOKUP = PLAIN._replace(method="lookup", drafter="lookup", num_speculative_tokens=3)
VANILLA = LOOKUP._replace(method="vanilla", unpad_kv=False, unpad_input=False)


def run(cell, repeat, rate, *, decode=None, padding=2):
    phases = {"schedule": 0.1, "pack": 0.2, "total": 3.0, "draft_steps": 0, "rounds": 0}
    counters = {"accepted": 10, "padding": padding, "input_tokens": 30, "input_padding": 10, "ratio": padding / 10}
    return RunRecord(cell, repeat, 1, 100, 100 / rate, rate, decode, phases, counters)


def prompt(cell, repeat, name, milliseconds, *, drafted=0, accepted=0, draft_rounds=0, equal=True):
    return PromptRecord(
        cell, repeat, name, 5, 10, 10, 4, draft_rounds, drafted, accepted, [1], milliseconds / 100, 0.0, 0.1, 0.2,
        "length", equal, None if equal else 6,
    )  # fmt: skip


def result(runs, prompts=()):
    machine = {"cpu": "cpu", "cores": 2, "load_1min": 0.5, "memory_bytes": 8e9, "python": "3", "versions": {"a": "1"}}
    options = {"max_tokens": [4, 9], "repeats": 3}
    return BenchResult(["specexport", "bench", "a b"], machine, {"name": "fake", "threads": 2}, options, runs, prompts)
