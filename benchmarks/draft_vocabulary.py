"""How much of its acceptance a draft keeps with fewer tokens in its LM head, before anything is built.

The bundle has a whole head. For each size its draft's logits are cut down in memory to the tokens that a build would
keep, which gives what the cut engine gives.

    python benchmarks/draft_vocabulary.py BUNDLE --prompts PROMPTS.jsonl --texts TEXTS --sizes 3072 2048
"""

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from specexport.bench.prompts import read_prompts
from specexport.compile.draft_cuts import HeadCut, rank_head_ids, read_counting_texts
from specexport_runtime import engine_load
from specexport_runtime.bundle.arrays import CutHead
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import TOKENIZER_NAME
from specexport_runtime.engine import SpecEngine
from specexport_runtime.executors.base import Executor, Int32Array, StepOutput, Want, argmax_ids
from specexport_runtime.executors.open import open_executor
from specexport_runtime.requests.results import GenerationResult
from specexport_runtime.sampling.params import SamplingParams


class CutExecutor:
    """An engine that shows the logits of some tokens only.

    Args:
        engine: the engine.
        ids: which tokens.
    """

    def __init__(self, engine: Executor, ids: Int32Array) -> None:
        self._engine, self._ids = engine, ids
        self.vocab_size = len(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def execute(self, want: Want = "logits") -> StepOutput:
        """See ``Executor.execute``."""
        logits = self._engine.execute("logits")[:, self._ids]
        return logits if want == "logits" else argmax_ids(logits)


def decode(args: argparse.Namespace, prompts: list[str], ids: Int32Array | None, size: int) -> list[GenerationResult]:
    """Draft for all prompts with a head of ``ids``; None is the whole head, of ``size``."""

    def opened(bundle: Any, role: str, **options: Any) -> Any:
        engine = open_executor(bundle, role, **options)
        return engine if role == "target" or ids is None else CutExecutor(engine, ids)

    head = None if ids is None else CutHead(ids, size)
    with (
        patch.object(engine_load, "open_executor", opened),
        patch.object(engine_load, "load_cut_head", lambda *_: head),
        closing(SpecEngine.load(args.bundle, enable_prefix_caching=False, num_threads=args.threads)) as engine,
    ):
        params = [
            SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=i)
            for i in range(len(prompts))
        ]
        return engine.generate(prompts, params, drafter="draft-model", num_speculative_tokens=args.lookahead)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, action="append", default=[])
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--texts", help="as --draft-vocab-texts")
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    manifest = load_manifest(args.bundle)
    draft, ends = manifest.models["draft"], manifest.vocabulary.eos_token_ids
    special = list(manifest.vocabulary.special_tokens.values())
    tokenizer = (args.bundle / TOKENIZER_NAME).read_bytes()
    texts = read_counting_texts(args.texts)
    prompts = [prompt.text for prompt in read_prompts(args.prompts, num_prompts=args.num_prompts)]
    whole = 0.0
    print("| tokens | of the text | acceptance | of the whole head's | same text |\n| --- | --- | --- | --- | --- |")
    least = HeadCut(min(args.sizes), texts, ends)
    ranked = rank_head_ids(least, tokenizer, draft.vocab_size, special_tokens=special)
    for size in (draft.vocab_size, *args.sizes):
        cut = None
        if size < draft.vocab_size:
            cut = np.sort(ranked[:size])
        results = decode(args, prompts, cut, draft.vocab_size)
        rate = sum(each.stats.accepted for each in results) / sum(each.stats.drafted for each in results)
        outputs = [each.token_ids for each in results]
        if cut is None:
            whole, expected = rate, outputs
        seen = 1.0 if cut is None else float(np.isin(np.concatenate([np.array(ids) for ids in outputs]), cut).mean())
        same = "yes" if outputs == expected else "no"
        print(f"| {size} | {seen:.1%} | {rate:.3f} | {rate / whole:.3f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
