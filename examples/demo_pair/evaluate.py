"""Measures the demo pair: held-out loss, agreement and accepted length.

Example:
    python examples/demo_pair/evaluate.py examples/demo_pair
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from corpus import MAX_POSITIONS, encode, load_corpus
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel


@torch.no_grad()
def greedy_and_loss(model: PreTrainedModel, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns a model's most likely next tokens, shape (rows, length), and its mean loss in nats per token.

    ``rows`` are held-out token ids of shape (rows, length + 1).
    """
    likeliest, total = [], 0.0
    for row in rows:
        logits = model(row[None, :-1], use_cache=False).logits[0].float()
        total += float(functional.cross_entropy(logits, row[1:]))
        likeliest.append(logits.argmax(-1))
    return torch.stack(likeliest), total / len(rows)


@torch.no_grad()
def accepted_lengths(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int], new_tokens: int, k: int
) -> list[int]:
    """Runs greedy speculative decoding and counts the proposals that each step accepts, 0 to k.

    The target continues the prompt once; at each step the draft proposes k tokens from the text so far. Greedy
    verification accepts exactly the proposals that equal that continuation, so the counts are those of a real decoder.
    The last step is left out where the end of the text cuts it short.
    """
    common = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = target.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, **common)[0]
    counts, at = [], len(prompt)
    while at + k < len(text):
        proposed = draft.generate(text[None, :at], max_new_tokens=k, **common)[0, at:]
        wrong = (proposed != text[at : at + k]).nonzero()
        counts.append(int(wrong[0]) if len(wrong) else k)
        at += counts[-1] + 1
    return counts


def main() -> None:
    """Prints the measurements as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("pair", type=Path, help="folder with target/ and draft/")
    parser.add_argument("--k", type=int, default=4, help="proposals per step")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(args.pair / name, dtype=torch.float32) for name in ("target", "draft")
    )
    tokenizer = Tokenizer.from_file(str(args.pair / "target" / "tokenizer.json"))
    heldout = load_corpus().heldout
    docs = encode(tokenizer, heldout)
    stream = torch.cat(docs)
    rows = stream.unfold(0, MAX_POSITIONS + 1, MAX_POSITIONS)
    # A token is worth its share of the text's bytes, which makes losses comparable
    # with those of models that use another tokenizer.
    bytes_per_token = sum(len(t.encode()) for t in heldout) / sum(len(d) for d in docs)
    report: dict[str, object] = {"heldout_files": len(docs), "heldout_tokens": rows[:, 1:].numel()}
    greedy = {}
    for name, model in (("target", target), ("draft", draft)):
        greedy[name], loss = greedy_and_loss(model, rows)
        bits = loss / math.log(2) / bytes_per_token
        report[name] = {"nats_per_token": round(loss, 4), "bits_per_byte": round(bits, 4)}
    same = (greedy["target"] == greedy["draft"]).float().mean()
    report["agreement_on_text"] = round(float(same), 4)

    starts = torch.linspace(0, len(stream) - 129, args.prompts).long().tolist()
    counts = [c for s in starts for c in accepted_lengths(target, draft, stream[s : s + 128].tolist(), 128, args.k)]
    report["k"] = args.k
    report["accepted_per_step"] = round(sum(counts) / len(counts), 3)
    report["acceptance_rate"] = round(sum(counts) / len(counts) / args.k, 4)
    report["accepted_by_position"] = [round(sum(c > i for c in counts) / len(counts), 4) for i in range(args.k)]
    report["tokens_per_step"] = round(1 + sum(counts) / len(counts), 3)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
