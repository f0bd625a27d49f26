"""Plain greedy decoding of a bundle against transformers `generate`: speed in turns, and equality of tokens.

python benchmarks/against_transformers.py engines/gemma3-270m CHECKPOINT --prompts FILE.jsonl --threads 2
python benchmarks/against_transformers.py engines/gemma3-270m CHECKPOINT --prompts FILE.jsonl --batch-size 8
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import DEMO_PROMPTS, median, read_prompts, report, timed

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.opened import load_bundle


def logit_gap(model: Any, tokens: list[int], ours: int, theirs: int) -> float:
    """How far apart the two candidates' logits are in eager transformers, without a cache."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return float(logits[theirs] - logits[ours])


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, action="append", help="JSONL; several files are taken in turns")
    parser.add_argument("--num-prompts", type=int, default=20, help="prompts of the equality check")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded together, by both")
    parser.add_argument("--speed-prompts", type=int, help="prompts of the speed measurement  [default: 3, or a batch]")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure speed on a few prompts in turns, then compare tokens on more."""
    args = parse_arguments()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # a fixed number of tokens from both
    tokenizer = load_bundle(args.bundle).tokenizer
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    files = args.prompts or [DEMO_PROMPTS]
    each = -(-args.num_prompts // len(files))
    lists = [read_prompts(path, each) for path in files]
    prompts = [prompt for group in zip(*lists, strict=False) for prompt in group][: args.num_prompts]

    rows = args.batch_size

    def batches(some: list[str]) -> list[list[str]]:
        return [some[start : start + rows] for start in range(0, len(some), rows)]

    def theirs(some: list[str]) -> list[list[int]]:
        ids = [tokenizer.encode(prompt).ids for prompt in some]
        width = max(len(row) for row in ids)
        # Decoder-only models are padded on the left; the mask tells transformers the true positions.
        padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        with torch.no_grad():
            output = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=args.tokens)
        return output[:, width:].tolist()

    def ours(some: list[str]) -> list[list[int]]:
        return [result.token_ids for result in engine.generate(some, params, drafter="none")]

    theirs(prompts[:rows])
    speed_prompts = prompts[: args.speed_prompts or max(3, rows)]
    tokens = args.tokens * len(speed_prompts)
    # First without our engine in the process, so that it cannot stand in the way.
    alone = [timed(lambda: [theirs(some) for some in batches(speed_prompts)])[0] for _ in range(args.repeats)]
    engine = SpecEngine.load(
        args.bundle,
        enable_prefix_caching=False,
        max_num_seqs=rows,
        num_threads=args.threads,
        max_model_len=args.max_model_len,
    )
    ours(prompts[:rows])
    times: list[tuple[float, float]] = []
    for _ in range(args.repeats):
        pairs = [(timed(lambda p=p: theirs(p))[0], timed(lambda p=p: ours(p))[0]) for p in batches(speed_prompts)]
        times.append((sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)))
    differences = []
    pairs = [pair for some in batches(prompts) for pair in zip(some, ours(some), theirs(some), strict=True)]
    for number, (prompt, mine, other) in enumerate(pairs):
        if mine != other:
            first = int(np.argmax(np.asarray(mine) != np.asarray(other)))
            gap = logit_gap(model, engine.encode(prompt) + mine[:first], mine[first], other[first])
            differences.append({"prompt": number, "position": first, "logit_gap": gap})
    table = [
        ("transformers generate, tokens/s", f"{median(tokens / a for a, _ in times):.2f}"),
        ("specexport plain, tokens/s", f"{median(tokens / b for _, b in times):.2f}"),
        ("ratio", f"{median(a / b for a, b in times):.2f}x (of {', '.join(f'{a / b:.2f}' for a, b in times)})"),
        ("transformers alone in the process, tokens/s", f"{median(tokens / a for a in alone):.2f}"),
        ("ratio to that", f"{median(alone) / median(b for _, b in times):.2f}x"),
        (f"equal outputs ({args.tokens} tokens)", f"{len(prompts) - len(differences)} of {len(prompts)}"),
        *((f"prompt {d['prompt']} differs at {d['position']}", f"logit gap {d['logit_gap']:.2e}") for d in differences),
    ]
    record = {"seconds": times, "alone": alone, "differences": differences}
    report(f"Plain greedy against transformers, {args.bundle.name}, batch {rows}", table, record, args.json)


if __name__ == "__main__":
    main()
