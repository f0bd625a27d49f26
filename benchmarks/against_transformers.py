"""Plain greedy decoding of a bundle against transformers `generate`: speed in turns, and equality of tokens.

python benchmarks/against_transformers.py engines/gemma3-270m CHECKPOINT --prompts FILE.jsonl --threads 2
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import DEMO_PROMPTS, median, read_prompts, report, timed

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle import load_bundle


def logit_gap(model: Any, tokens: list[int], ours: int, theirs: int) -> float:
    """How far apart the two candidates' logits are in eager transformers, without a cache."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return float(logits[theirs] - logits[ours])


def main() -> None:
    """Measure speed on a few prompts in turns, then compare tokens on more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, action="append", help="JSONL; several files are taken in turns")
    parser.add_argument("--num-prompts", type=int, default=20, help="prompts of the equality check")
    parser.add_argument("--speed-prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

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

    def theirs(prompt: str) -> list[int]:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.no_grad():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=args.tokens
            )
        return output[0, ids.shape[1] :].tolist()

    def ours(prompt: str) -> list[int]:
        return engine.generate(prompt, params, speculation=False)[0].token_ids

    theirs(prompts[0])
    speed_prompts = prompts[: args.speed_prompts]
    tokens = args.tokens * len(speed_prompts)
    # First without our engine in the process, so that it cannot stand in the way.
    alone = [timed(lambda: [theirs(prompt) for prompt in speed_prompts])[0] for _ in range(args.repeats)]
    engine = SpecEngine.load(args.bundle, max_num_seqs=1, num_threads=args.threads)
    ours(prompts[0])
    times: list[tuple[float, float]] = []
    for _ in range(args.repeats):
        pairs = [(timed(lambda p=p: theirs(p))[0], timed(lambda p=p: ours(p))[0]) for p in speed_prompts]
        times.append((sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)))
    differences = []
    for number, prompt in enumerate(prompts):
        mine, other = ours(prompt), theirs(prompt)
        if mine != other:
            first = int(np.argmax(np.asarray(mine) != np.asarray(other)))
            gap = logit_gap(model, engine.encode(prompt) + mine[:first], mine[first], other[first])
            differences.append({"prompt": number, "position": first, "logit_gap": gap})
    rows = [
        ("transformers generate, tokens/s", f"{median(tokens / a for a, _ in times):.2f}"),
        ("specexport plain, tokens/s", f"{median(tokens / b for _, b in times):.2f}"),
        ("ratio", f"{median(a / b for a, b in times):.2f}x (of {', '.join(f'{a / b:.2f}' for a, b in times)})"),
        ("transformers alone in the process, tokens/s", f"{median(tokens / a for a in alone):.2f}"),
        ("ratio to that", f"{median(alone) / median(b for _, b in times):.2f}x"),
        (f"equal outputs ({args.tokens} tokens)", f"{len(prompts) - len(differences)} of {len(prompts)}"),
        *((f"prompt {d['prompt']} differs at {d['position']}", f"logit gap {d['logit_gap']:.2e}") for d in differences),
    ]
    record = {"seconds": times, "alone": alone, "differences": differences}
    report(f"Plain greedy against transformers, {args.bundle.name}, batch 1", rows, record, args.json)


if __name__ == "__main__":
    main()
