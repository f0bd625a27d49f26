"""Decodes over proof engines whose kernels are interpreted, in a process of its own, without the export stack."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FORBIDDEN = ("onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "cuda")
PROMPTS = ([5, 9, 14], [53, 227, 55, 57, 32, 31, 199], [7], [103, 7, 1, 31, 2])


def open_role(folder: Path, name: str, role: str, **options: Any) -> Any:
    from tools.proof.devices import HostGpu
    from tools.proof.models import open_engine, profiles_of

    options = {"num_rows": 4, "graphs": True, **options}
    return open_engine(folder / f"{name}.npz", profiles_of("tiny", role), gpu=HostGpu(), **options)


def report(target: Any, draft: Any, found: Any) -> dict[str, Any]:
    replays = [executor.graphs.replays for executor in (target, draft) if executor is not None]
    for executor in (target, draft):
        if executor is not None:
            executor.close()
    return {"outputs": found.outputs, "rounds": found.rounds, "acceptance": found.acceptance, "replays": replays}


def plain(folder: Path) -> dict[str, Any]:
    from tools.proof.steps import decode

    target = open_role(folder, "tiny-target", "target", graphs=False, num_rows=1)
    return report(target, None, decode(target, PROMPTS[:1], 6))


def drafted(folder: Path) -> dict[str, Any]:
    """Four ragged prompts; the draft is mostly wrong."""
    from tools.proof.steps import decode

    target, draft = (open_role(folder, f"tiny-{role}", role) for role in ("target", "draft"))
    return report(target, draft, decode(target, PROMPTS, 5, draft=draft, lookahead=3))


def itself(folder: Path) -> dict[str, Any]:
    """The draft is the target, so that all is accepted and the draft is fed two tokens after each round."""
    from tools.proof.steps import decode

    target, draft = (open_role(folder, "tiny-target", role, num_rows=1) for role in ("target", "draft"))
    return report(target, draft, decode(target, PROMPTS[1:2], 11, draft=draft, lookahead=4))


def sampled(folder: Path) -> dict[str, Any]:
    """Two prompts with seeds and a draft, drawn by the kernels and by the host, at a temperature and with cuts."""
    from tools.proof.steps import decode

    target, draft = (open_role(folder, f"tiny-{role}", role, num_rows=2) for role in ("target", "draft"))
    found = []
    for sampling in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01}):
        for keeps_rows in (True, False):
            target.keeps_rows = draft.keeps_rows = keeps_rows
            made = decode(target, PROMPTS[:2], 4, draft=draft, lookahead=3, sampling=sampling)
            found.append([made.outputs, made.rounds])
    counts = target.rows.counts
    return {"found": found, "counts": [counts.steps, counts.fetches]}


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]
    sys.modules.update(dict.fromkeys(FORBIDDEN))  # importing one fails
    from tests.support.references.kernel_worker import mend_interpreter

    mend_interpreter()
    json.dump({name: globals()[name](Path(sys.argv[1])) for name in sys.argv[2:]}, sys.stdout)
