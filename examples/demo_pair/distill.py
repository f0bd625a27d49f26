"""Second stage of the draft's training: imitate the target on text the target itself writes.

Joint training (train.py) teaches the draft on library sources. What speculative decoding asks of it is different: to
agree with the target on the target's own output. Here the target, run by specexport's runtime, continues snippets of
the training files, and the draft learns the target's full distribution on that text and on the sources, in turns.

Example:
    specexport build examples/demo_pair/target -o engines/teacher
    python examples/demo_pair/distill.py examples/demo_pair --teacher engines/teacher --out DIR --minutes 12
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from corpus import batches, encode, load_corpus, save_tokenizer
from speed import ATTENTION, keep_freed_memory
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from specexport_runtime import SamplingParams, SpecEngine

ROW = 256


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("pair", type=Path, help="folder with target/ and draft/")
    add("--teacher", type=Path, required=True, help="bundle of the target, to write text with")
    add("--out", type=Path, required=True, help="folder for the new draft")
    add("--snippets", type=int, default=3000, help="texts the target writes")
    add("--minutes", type=float, default=12.0, help="training time after that")
    add("--threads", type=int, default=2)
    add("--rows", type=int, default=8, help=f"rows of {ROW} tokens a step")
    add("--lr", type=float, default=2e-3, help="peak rate of the matrices (Muon); the rest gets half")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def write_texts(teacher: Path, docs: list[torch.Tensor], count: int, seed: int, threads: int) -> list[torch.Tensor]:
    """Lets the target continue ``count`` random snippets of the training files.

    Gives token ids of each snippet with its continuation, led by the separator. Two thirds are greedy, a third is
    sampled at temperature 0.8, so that the draft also sees what greedy decoding never writes.
    """
    rng = random.Random(seed)
    prompts, params = [], []
    for number in range(count):
        doc = rng.choices(docs, weights=[len(d) for d in docs])[0]
        length = rng.randint(16, 80)
        start = rng.randrange(max(1, len(doc) - length))
        prompts.append([0, *doc[start : start + length].tolist()])
        heat = 0.8 if number % 3 == 2 else 0.0
        params.append(SamplingParams(temperature=heat, max_tokens=128, seed=number))
    engine = SpecEngine.load(teacher, max_num_seqs=16, num_threads=threads)
    results = engine.generate(prompts, params, speculation=False)
    engine.close()
    return [torch.tensor(prompt + result.token_ids) for prompt, result in zip(prompts, results, strict=True)]


def imitation_loss(target: LlamaForCausalLM, draft: LlamaForCausalLM, inputs: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy of the draft against the target's distribution, in nats per token.

    ``inputs`` are token ids of shape (rows, length).
    """
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = target(inputs, use_cache=False).logits
        found = draft(inputs, use_cache=False).logits
    wanted = functional.softmax(wanted.flatten(0, 1).float(), -1)
    return functional.cross_entropy(found.flatten(0, 1).float(), wanted)


def main() -> None:
    """Writes the texts, trains the draft, saves it."""
    args = parse_args()
    keep_freed_memory()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.pair / "target" / "tokenizer.json"))
    target, draft = (
        AutoModelForCausalLM.from_pretrained(args.pair / name, dtype=torch.float32, attn_implementation=ATTENTION)
        for name in ("target", "draft")
    )
    docs = encode(tokenizer, load_corpus().train)
    began = time.monotonic()
    written = write_texts(args.teacher, docs, args.snippets, args.seed, args.threads)
    row = {"texts": len(written), "tokens": sum(map(len, written)), "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(row), flush=True)
    sources = [batches(texts, ROW, args.rows, args.seed) for texts in (written, written, docs)]
    matrices = [p for n, p in draft.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in draft.named_parameters() if p.ndim != 2 or "embed" in n]
    stepped = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.lr / 2, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in stepped]
    began = logged = time.monotonic()
    step, total, done = 0, 0.0, 0.0
    while done < 1.0:
        for optimizer, peak in zip(stepped, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1.0, done / 0.03, (1.0 - done) / 0.7 + 0.01)
        loss = imitation_loss(target, draft, next(sources[step % 3])[:, :-1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()
        step, total = step + 1, total + float(loss.detach())
        done = (time.monotonic() - began) / (60 * args.minutes)
        if time.monotonic() - logged > 30 or done >= 1.0:
            tokens = step * args.rows * ROW
            print(json.dumps({"step": step, "tokens": tokens, "loss_so_far": round(total / step, 4)}), flush=True)
            logged = time.monotonic()
    copy = LlamaForCausalLM(draft.config).to(torch.bfloat16)
    copy.load_state_dict(draft.state_dict())
    copy.config.dtype = torch.bfloat16
    copy.save_pretrained(args.out / "draft")
    (args.out / "draft" / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, args.out / "draft")


if __name__ == "__main__":
    main()
