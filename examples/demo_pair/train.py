"""Trains the demo pair: a small Llama target and a draft distilled from it.

Both models see the same batches of standard-library source. The target learns the
text; the draft learns the text at first and, as the target becomes worth imitating,
more and more the target's own distribution, since what counts for speculative
decoding is not how right the draft is but how often the target agrees with it.

Example:
    python examples/demo_pair/train.py --out /tmp/pair --minutes 60
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from corpus import MAX_POSITIONS, Corpus, batches, encode, load_corpus, save_tokenizer, train_tokenizer
from speed import ATTENTION, keep_freed_memory
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_DIM = 64
# Short rows are cheaper, so most of training uses them; the end uses full rows, for
# the models to work up to their last position. Share of the budget: row length.
STAGES = {0.65: 256, 0.85: 512, 1.0: MAX_POSITIONS}


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for target/ and draft/")
    add("--minutes", type=float, default=60.0, help="stop after this long")
    add("--tokens", type=float, default=float("inf"), help="or after this many tokens")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=0)
    add("--vocab", type=int, default=4096)
    add("--target", type=int, nargs=5, default=[384, 8, 6, 2, 640], metavar="N",
        help="hidden size, layers, heads, key-value heads, MLP size")  # fmt: skip
    add("--draft", type=int, nargs=5, default=[128, 2, 2, 1, 512], metavar="N")
    add("--batch-tokens", type=int, default=8192, help="tokens per optimizer step")
    add("--lr", type=float, default=4e-3, help="peak rate of the matrices (Muon)")
    add("--adam-lr", type=float, default=3e-3, help="peak rate of the rest (AdamW)")
    add("--optimizer", choices=["muon", "adamw"], default="muon")
    add("--resume", type=Path, help="folder of a saved pair to go on from")
    add("--done", type=float, default=0.0, help="share of the schedule it had after it")
    add("--max-files", type=int, default=None, help="train on fewer files, for a trial")
    add("--log-seconds", type=float, default=300.0, help="time between held-out losses")
    add("--save-seconds", type=float, default=600.0, help="time between saves")
    return parser.parse_args()


def build_model(shape: list[int], vocab: int) -> LlamaForCausalLM:
    """Creates a model with fresh weights, in float32.

    ``shape`` is the hidden size, layers, heads, key-value heads, MLP size.
    """
    hidden, layers, heads, kv_heads, mlp = shape
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=True,
        attn_implementation=ATTENTION,
    )
    return LlamaForCausalLM(config)


def save_pair(out: Path, pair: dict[str, LlamaForCausalLM], tokenizer: object) -> None:
    """Writes both models in bfloat16, each with the tokenizer beside it."""
    for name, model in pair.items():
        folder = out / name
        # The copy keeps the float32 weights in training untouched.
        copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
        copy.load_state_dict(model.state_dict())
        copy.config.dtype = torch.bfloat16
        copy.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)
        save_tokenizer(tokenizer, folder)
        model.config.dtype = torch.float32


def optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Gives the hidden matrices to Muon, embeddings and norms to AdamW."""
    use_muon = args.optimizer == "muon"
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    taken = {id(p) for p in matrices} if use_muon else set()
    rest = [p for p in model.parameters() if id(p) not in taken]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.01)]
    if use_muon:
        made.append(torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def rate(done: float) -> float:
    """Returns the share of the peak rate at a share of the budget spent.

    The schedule follows the budget rather than a step count, so the decay is
    complete however fast the machine turns out to be.
    """
    return min(1.0, done / 0.02, (1.0 - done) / 0.6 + 0.01)


def losses(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, batch: torch.Tensor, blend: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes both models' losses on a batch of token ids, shape (rows, length + 1).

    They are the target's cross-entropy, the draft's cross-entropy, and the draft's training loss, in nats per token.
    ``blend`` is the weight of the target's distribution, against the text's own next token, in what the draft learns.
    """
    inputs, labels = batch[:, :-1], batch[:, 1:].reshape(-1)
    with torch.autocast("cpu", torch.bfloat16):
        target_logits = target(inputs, use_cache=False).logits
        draft_logits = draft(inputs, use_cache=False).logits
    target_log = functional.log_softmax(target_logits.float().flatten(0, 1), -1)
    draft_log = functional.log_softmax(draft_logits.float().flatten(0, 1), -1)
    target_loss, draft_loss = functional.nll_loss(target_log, labels), functional.nll_loss(draft_log, labels)
    if blend == 0.0:
        return target_loss, draft_loss, draft_loss
    imitation = -(target_log.detach().exp() * draft_log).sum(-1).mean()
    return target_loss, draft_loss, blend * imitation + (1.0 - blend) * draft_loss


def gradients_of(
    pair: dict[str, LlamaForCausalLM], params: list[torch.nn.Parameter], batch: torch.Tensor, blend: float
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns both models' losses on a batch, and the gradients of all parameters."""
    *shown, learned = losses(pair["target"], pair["draft"], batch, blend)
    return torch.stack(shown).detach(), torch.autograd.grad(shown[0] + learned, params)


@torch.no_grad()
def heldout_losses(pair: dict[str, LlamaForCausalLM], windows: torch.Tensor) -> list[float]:
    """Returns both models' mean held-out loss in nats per token."""
    found = [losses(pair["target"], pair["draft"], w, 0.0)[:2] for w in windows.split(4)]
    return [float(torch.stack(values).mean()) for values in zip(*found, strict=True)]


def main() -> None:
    """Trains and saves the pair."""
    args = parse_args()
    keep_freed_memory()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus()
    texts = corpus.train[: args.max_files]
    tokenizer = train_tokenizer(texts, args.vocab)
    docs = encode(tokenizer, texts)
    held = torch.cat(encode(tokenizer, corpus.heldout)).unfold(0, 1025, 1024)[:12]
    pair = {n: build_model(getattr(args, n), args.vocab) for n in ("target", "draft")}
    if args.resume:
        for name, model in pair.items():
            model.load_state_dict(LlamaForCausalLM.from_pretrained(args.resume / name).state_dict())
    stepped = [o for m in pair.values() for o in optimizers(m, args)]
    print(
        f"{len(texts)} files, {Corpus.size(texts):,} bytes, {sum(map(len, docs)):,} tokens; "
        + ", ".join(f"{n} {m.num_parameters():,} parameters" for n, m in pair.items()),
        flush=True,
    )

    # One batch slice per thread and one core per slice: threads that meet once a step
    # lose far less to other work on the machine than threads that meet in every product.
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(args.threads)
    micro = args.batch_tokens // args.threads
    stages = {end: batches(docs, n, max(1, micro // n), args.seed + n) for end, n in STAGES.items()}
    params = [p for m in pair.values() for p in m.parameters()]
    tokens, step, last_step, sums = 0, 0, 0, torch.zeros(2)
    began = logged = saved = time.monotonic()
    log = (args.out / "log.jsonl").open("w", encoding="utf-8")
    done = args.done
    while done < 1.0:
        for optimizer in stepped:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(done)
        rows = next(rows for end, rows in stages.items() if done < end)
        slices = [next(rows) for _ in range(args.threads)]
        blend = min(done * 1.5, 0.9)
        for shown, gradients in pool.map(lambda s, w=blend: gradients_of(pair, params, s, w), slices):
            sums += shown / args.threads
            for param, gradient in zip(params, gradients, strict=True):
                share = gradient / args.threads
                param.grad = share if param.grad is None else param.grad + share
        for model in pair.values():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()
        step, tokens = step + 1, tokens + sum(s[:, 1:].numel() for s in slices)
        now = time.monotonic()
        spent = max(tokens / args.tokens, (now - began) / (60 * args.minutes))
        done = args.done + (1.0 - args.done) * spent
        if now - logged > args.log_seconds or done >= 1.0:
            row = {"step": step, "tokens": tokens, "seconds": round(now - began, 1)}
            row["train"] = [round(float(s) / (step - last_step), 4) for s in sums]
            row["heldout"] = [round(v, 4) for v in heldout_losses(pair, held)]
            print(json.dumps(row), file=log, flush=True)
            print(json.dumps(row), flush=True)
            sums, logged, last_step = torch.zeros(2), now, step
        if now - saved > args.save_seconds:
            save_pair(args.out, pair, tokenizer)
            saved = now
    save_pair(args.out, pair, tokenizer)


if __name__ == "__main__":
    main()
