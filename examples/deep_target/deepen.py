"""Grows the demo target deeper and trains it to lose little when layers are left out.

The new layers are copies whose output projections are zero, so the grown model computes what the old one did. Training
then has three terms: the text, for the whole model; the whole model's distribution, for a thinned one (blocks left out
at random, or those that the rules of *Draft on the Fly* leave out); and a penalty on new attention blocks that turn
the stream more than the rules' threshold allows. The result is a model made to be skippable.

Example:
    python examples/deep_target/deepen.py --out deep --minutes 30
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from skippable import Kept, choose_blocks, grow, run_blocks
from torch.nn import functional
from transformers import LlamaForCausalLM

PAIR = Path(__file__).resolve().parents[1] / "demo_pair"
sys.path.insert(0, str(PAIR))
from corpus import batches, encode, load_corpus, save_tokenizer  # noqa: E402
from speed import ATTENTION, keep_freed_memory  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from train import optimizers, rate  # noqa: E402

THRESHOLD, KEEP_LAST = 0.985, 2


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--target", type=Path, default=PAIR / "target", help="checkpoint to grow")
    add("--out", type=Path, required=True, help="folder for the grown checkpoint")
    add("--pattern", default="oiiioi", help="o: an old layer, i: a copy put in after it; repeated over the old layers")
    add("--minutes", type=float, default=30.0, help="stop after this long, all runs together")
    add("--tokens", type=float, default=float("inf"), help="or after this many tokens")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--seed", type=int, default=0)
    add("--length", type=int, default=256, help="tokens a row")
    add("--rows", type=int, default=8, help="rows an optimizer step")
    add("--lr", type=float, default=5e-4, help="peak rate of the matrices (Muon)")
    add("--adam-lr", type=float, default=2e-4, help="peak rate of the rest (AdamW)")
    add("--optimizer", choices=["muon", "adamw"], default="muon")
    add("--turn-weight", type=float, default=5.0, help="weight of the penalty on new attention that turns the stream")
    add("--resume", action="store_true", help="go on from the last save in --out")
    add("--max-files", type=int, default=None, help="train on fewer files, for a trial")
    add("--heldout-rows", type=int, default=24, help="rows of held-out text to measure on")
    add("--save-seconds", type=float, default=240.0, help="time between saves, each with a line in log.jsonl")
    return parser.parse_args()


def thinned(similarity: torch.Tensor, generator: torch.Generator) -> Kept:
    """Draws the blocks that a thinned model keeps: by the rules half of the time, at random the other half.

    ``similarity`` is the whole model's attention similarity on the batch, shape (layers,). Layer 0 is always whole: the
    rules never leave it out, and nothing works without it.
    """
    layers = len(similarity)
    kind = int(torch.randint(6, (1,), generator=generator))
    if kind < 3:
        return choose_blocks(similarity, THRESHOLD, (2, 3, 2)[kind], KEEP_LAST)
    share = 0.3 * torch.rand(2, generator=generator)
    keep = torch.rand(2, layers, generator=generator) >= share[:, None]
    keep[:, 0] = True
    return Kept(*(tuple(row) for row in keep.tolist()))


def step_losses(
    model: LlamaForCausalLM, batch: torch.Tensor, new: list[int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the three terms on a batch of token ids, shape (rows, length + 1).

    They are the cross-entropy of the text under the whole model; the divergence of the thinned model's distribution
    from the whole one's; the sum over the attention blocks of ``new`` layers of how far their mean similarity is below
    the threshold plus a margin.
    """
    inputs, labels = batch[:, :-1], batch[:, 1:].reshape(-1)
    layers = model.config.num_hidden_layers
    with torch.autocast("cpu", torch.bfloat16):
        whole = run_blocks(model, inputs, Kept.every(layers), similarity=True)
    similarity = whole.similarity.mean((1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        thin = run_blocks(model, inputs, thinned(similarity.detach(), generator))
    whole_log = functional.log_softmax(whole.logits.float().flatten(0, 1), -1)
    thin_log = functional.log_softmax(thin.logits.float().flatten(0, 1), -1)
    divergence = functional.kl_div(thin_log, whole_log.detach(), log_target=True, reduction="batchmean")
    margin = (1.0 + THRESHOLD) / 2
    turned = [functional.relu(margin - similarity[i]) for i in new]
    penalty = torch.stack(turned).sum() if turned else similarity.new_zeros(())
    return functional.nll_loss(whole_log, labels), divergence, penalty


@torch.no_grad()
def measure(model: LlamaForCausalLM, rows: torch.Tensor) -> dict[str, object]:
    """Measures the whole and the thinned models on held-out text, token ids of shape (rows, length + 1).

    Gives losses in nats per token, the share of positions where both choose the same token, the similarity of each
    attention block, and the blocks kept; the thinned models are those of the rules with every second and every third
    layer left out.
    """
    layers = model.config.num_hidden_layers
    labels = rows[:, 1:].flatten()
    whole = run_blocks(model, rows[:, :-1], Kept.every(layers), similarity=True)
    similarity = whole.similarity.mean((1, 2))
    found: dict[str, object] = {"loss": float(functional.cross_entropy(whole.logits.float().flatten(0, 1), labels))}
    for period in (2, 3):
        kept = choose_blocks(similarity, THRESHOLD, period, KEEP_LAST)
        thin = run_blocks(model, rows[:, :-1], kept)
        same = (thin.logits.argmax(-1) == whole.logits.argmax(-1)).float().mean()
        found[f"every {period}"] = {
            "loss": round(float(functional.cross_entropy(thin.logits.float().flatten(0, 1), labels)), 4),
            "agreement": round(float(same), 4),
            "attention": "".join("01"[flag] for flag in kept.attention),
            "mlp": "".join("01"[flag] for flag in kept.mlp),
        }
    return found | {"similarity": [round(float(value), 4) for value in similarity]}


def save(out: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, progress: dict[str, object]) -> None:
    """Writes the checkpoint in bfloat16, and beside it what a later run needs to go on."""
    copied = copy.deepcopy(model).to(torch.bfloat16)
    copied.config.dtype = torch.bfloat16
    copied.config._attn_implementation = "sdpa"
    copied.save_pretrained(out)
    save_tokenizer(tokenizer, out)
    part = out / "state.part"
    torch.save(progress | {"model": model.state_dict()}, part)
    os.replace(part, out / "state.pt")


def train_steps(
    model: LlamaForCausalLM, rows: Iterator[torch.Tensor], args: argparse.Namespace, state: dict[str, object] | None
) -> Iterator[dict[str, object]]:
    """Trains; yields the state to save after each stretch of ``--save-seconds`` and at the end."""
    stepped = optimizers(model, args)
    new = [i for i in range(model.config.num_hidden_layers) if args.pattern[i % len(args.pattern)] == "i"]
    generator = torch.Generator().manual_seed(args.seed)
    tokens, spent, step = 0, 0.0, 0
    if state is not None:
        tokens, spent, step = state["tokens"], state["seconds"], state["step"]
        generator.set_state(state["generator"])
        for optimizer, saved in zip(stepped, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    began = paused = time.monotonic()
    began -= spent
    sums, last = torch.zeros(3), step
    while True:
        now = time.monotonic()
        done = min(1.0, max(tokens / args.tokens, (now - began) / (60 * args.minutes)))
        if now - paused > args.save_seconds or done >= 1.0:
            shown = {"step": step, "tokens": tokens, "seconds": round(now - began, 1), "done": round(done, 3)}
            shown["train"] = [round(float(s) / max(step - last, 1), 4) for s in sums]
            inside = {"generator": generator.get_state(), "optimizers": [o.state_dict() for o in stepped]}
            yield shown | inside
            if done >= 1.0:
                return
            began += time.monotonic() - now  # measuring and saving are not training
            paused, sums, last = time.monotonic(), torch.zeros(3), step
        for optimizer in stepped:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(done)
        batch = next(rows)
        terms = step_losses(model, batch, new, generator)
        (terms[0] + terms[1] + args.turn_weight * terms[2]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()
        sums += torch.stack(terms).detach()
        step, tokens = step + 1, tokens + batch[:, 1:].numel()


def main() -> None:
    """Grows, trains, measures and saves the model."""
    args = parse_args()
    keep_freed_memory()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    corpus = load_corpus()
    docs = encode(tokenizer, corpus.train[: args.max_files])
    stream = torch.cat(encode(tokenizer, corpus.heldout)).unfold(0, args.length + 1, args.length)
    held = stream[:: max(1, math.ceil(len(stream) / args.heldout_rows))]
    old = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32, attn_implementation=ATTENTION)
    model = grow(old, args.pattern)
    model.set_attn_implementation(ATTENTION)
    state = torch.load(args.out / "state.pt", weights_only=True) if args.resume else None
    if state is not None:
        model.load_state_dict(state.pop("model"))
    seed = args.seed + (0 if state is None else int(state["step"]))
    del old
    with (args.out / "log.jsonl").open("a" if args.resume else "w", encoding="utf-8") as log:

        def note(row: dict[str, object]) -> None:
            print(json.dumps(row), file=log, flush=True)
            print(json.dumps(row), flush=True)

        note({"layers": model.config.num_hidden_layers, "parameters": model.num_parameters(), **measure(model, held)})
        for saved in train_steps(model, batches(docs, args.length, args.rows, seed), args, state):
            row = {n: v for n, v in saved.items() if n not in ("generator", "optimizers")} | measure(model, held)
            note(row)
            save(args.out, model, tokenizer, saved)


if __name__ == "__main__":
    main()
