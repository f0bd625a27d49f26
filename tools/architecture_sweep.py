"""Every causal language model that the installed transformers has: a tiny random one is built and compared.

    python tools/architecture_sweep.py --jobs 2            # all that the results lack, half an hour on two cores
    python tools/architecture_sweep.py --only llama gpt2   # again, whatever the results say
    python tools/architecture_sweep.py --table             # write docs/architectures.md from the results
    python tools/architecture_sweep.py --list

The model is made from its configuration class with small sizes, saved, and built as ``specexport build`` does. Logits
of ragged steps of 1 to K+1 tokens, after rollbacks, must be those of eager transformers; greedy texts with drafts must
be those without. Each architecture runs in a separate process with a time limit. Results of another version of
transformers are dropped. Exit status: 0, 1 if there is a defect (a traceback, a difference, or no end), 2 wrong usage.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from tools.sweep_lib.attempt import DEFECTS, TIMEOUT, TRACEBACK, Outcome, attempt  # noqa: E402

RESULTS = ROOT / "build" / "architectures.json"
MINUTES = 5.0


def all_names() -> dict[str, str]:
    """Model type and class of every causal language model of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read_results(path: Path) -> dict[str, Outcome]:
    """What is known of this version of transformers."""
    import transformers

    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["transformers"] != transformers.__version__:
        return {}
    return {row["name"]: Outcome(**row) for row in data["architectures"]}


def write_results(path: Path, results: dict[str, Outcome]) -> None:
    """Write them whole, sorted by name."""
    import transformers

    rows: list[dict[str, Any]] = [results[name]._asdict() for name in sorted(results)]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"transformers": transformers.__version__, "architectures": rows}, indent=1)
    beside = path.with_suffix(".new")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


def _child(name: str, pipe: Any) -> None:
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(attempt(name, Path(folder)))


def run_all(names: Sequence[str], *, jobs: int = 1, minutes: float = MINUTES) -> Iterator[Outcome]:
    """Each architecture in a separate process, in the order in which they are done; each may take ``minutes``."""
    fork = multiprocessing.get_context("fork")  # torch and transformers are imported once, here
    waiting, running = list(names), dict[Any, tuple[str, Any, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(name, sender))
            process.start()
            sender.close()
            running[receiver] = name, process, time.monotonic() + 60 * minutes
        earliest = min(end for _, _, end in running.values())
        ready = wait(running, timeout=max(0.0, earliest - time.monotonic()))
        late = [pipe for pipe, (_, _, end) in running.items() if end <= time.monotonic() and pipe not in ready]
        for pipe in [*ready, *late]:
            name, process, _ = running.pop(pipe)
            found = Outcome(name, all_names()[name], TIMEOUT, f"not done after {minutes:g} minutes")
            if pipe in ready:
                try:
                    found = pipe.recv()
                except EOFError:
                    found = Outcome(name, all_names()[name], TRACEBACK, "its process ended without an answer")
            else:
                process.kill()
            process.join()
            yield found


def _prepare() -> None:
    """Import what every process needs, in one thread, so that forks are safe and quick."""
    import logging
    import warnings

    import torch
    from transformers.utils import logging as transformers_logging

    import specexport.checkpoint.load
    import specexport.trace.export  # noqa: F401
    from tests.support.models.tiny_traces import keep_operator_table

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    keep_operator_table()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, even if their results are known")
    parser.add_argument("--again", nargs="+", metavar="OUTCOME", default=[], help="also those that came to this")
    parser.add_argument("--list", action="store_true", help="print all names and what is known of them")
    parser.add_argument("--table", action="store_true", help="write docs/architectures.md from the results")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file of the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of each")
    options = parser.parse_args(arguments)
    names, results = all_names(), read_results(options.results)
    unknown = sorted(set(options.only or ()) - set(names))
    if unknown:
        parser.error(f"transformers has no {', '.join(unknown)}")
    if options.table:
        from tools.sweep_lib.table import write_table

        return write_table(names, results)
    if options.list:
        for name in names:
            print(f"{name:32} {results[name].outcome if name in results else '-'}")
        return 0
    wanted = options.only or [n for n in names if n not in results or results[n].outcome in options.again]
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    _prepare()
    for count, found in enumerate(run_all(wanted, jobs=options.jobs, minutes=options.minutes), 1):
        results[found.name] = found
        write_results(options.results, results)
        last = found.reason.strip().splitlines()[-1:] or [""]
        print(f"{count}/{len(wanted)} {found.name}: {found.outcome} ({found.seconds:g} s) {last[0][:200]}", flush=True)
    outcomes = [result.outcome for result in results.values()]
    print(", ".join(f"{word}: {outcomes.count(word)}" for word in sorted(set(outcomes))))
    return int(any(word in DEFECTS for word in outcomes))


if __name__ == "__main__":
    sys.exit(main())
