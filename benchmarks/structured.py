"""Texts that follow JSON schemas: are they valid, how much faster are drafts, and what do the grammars cost?

Drafted and plain runs have the same masks, one after the other for each batch of schemas, and their texts are compared.
SCHEMAS is a folder of JSON files, one schema each: ``data/Github_easy`` of JSONSchemaBench
(https://github.com/guidance-ai/jsonschemabench), say, of which every 17th is taken till 50 can be honoured.

Seconds are those of rounds; a step that reads nothing but a prompt is none. Rounds and tokens a round do not depend on
how busy the machine is, with a drafter whose lookahead is fixed.
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from common import median, report

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.stats import sum_by_drafter
from specexport_runtime.sampling.grammar import Grammar
from specexport_runtime.sampling.structured import StructuredOutputs

PROMPT = "Write a JSON document with realistic values that follows this JSON schema:\n{schema}\n"


def parse_args() -> argparse.Namespace:
    """Command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("schemas", type=Path, help="folder of .json files, one schema each")
    parser.add_argument("--every", type=int, default=17, help="take every so many of the files, by name")
    parser.add_argument("--count", type=int, default=50, help="schemas that can be honoured")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--lookahead", type=int, help="K; not for auto")
    parser.add_argument("--batch", type=int, default=1, help="schemas at a time")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class GrammarClock:
    """Counts the seconds that grammars take: beside the target's step, and where everything waits for them."""

    def __init__(self) -> None:
        self.beside = self.waited = 0.0
        for name in ("allowed", "cut", "forced", "consume"):
            setattr(Grammar, name, self._timed(getattr(Grammar, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                seconds = time.perf_counter() - start
                if threading.current_thread().name.startswith("specexport-masks"):
                    self.beside += seconds
                else:
                    self.waited += seconds

        return timed


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that another library finds valid."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


class Schemas:
    """The schemas that an engine can honour, with their prompts.

    Attributes:
        refused: those that it cannot.
    """

    def __init__(self, engine: SpecEngine, files: Sequence[Path]) -> None:
        self._engine, self._files = engine, files
        self.refused = 0

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any], StructuredOutputs, list[int]]]:
        for file in self._files:
            schema = json.loads(file.read_text(encoding="utf-8"))
            content = PROMPT.format(schema=json.dumps(schema))
            try:
                form = StructuredOutputs(json=schema)
                self._engine.check_form(form)
                if self._engine.has_chat_template:
                    prompt = self._engine.encode_chat([{"role": "user", "content": content}])
                else:
                    prompt = self._engine.encode(content)
            except InvalidRequestError:
                self.refused += 1
                continue
            yield file.name, schema, form, list(prompt)


def run(engine: SpecEngine, clock: GrammarClock, batch: Sequence[Any], tokens: int, drafting: dict[str, Any]) -> Any:
    """One batch, one way: the texts, and what they took."""
    params = [SamplingParams(max_tokens=tokens, structured_outputs=form) for _, _, form, _ in batch]
    before = clock.beside, clock.waited
    results = engine.generate([prompt for _, _, _, prompt in batch], params, **drafting)
    times, stats = engine.times, [result.stats for result in results]
    return {
        "seconds": times.total,
        "rounds": times.rounds,
        "beside": clock.beside - before[0],
        "waited": clock.waited - before[1],
        "tokens": sum(each.num_generated_tokens for each in stats),
        "row_rounds": sum(each.rounds for each in stats),
        "drafters": {name: each.to_json() for name, each in sum_by_drafter(each.drafters for each in stats).items()},
        "texts": [
            {
                "schema": name,
                "text": result.text,
                "ended": result.finish_reason == "stop",
                "valid": result.finish_reason == "stop" and is_valid(result.text, schema),
            }
            for (name, schema, _, _), result in zip(batch, results, strict=True)
        ],
    }


def total(runs: Sequence[Any], key: str) -> Any:
    """The sum of a figure over the batches."""
    return sum(each[key] for each in runs)


def describe_drafters(runs: Sequence[Any]) -> str:
    """Of each drafter: share of all tokens, and of its own that were accepted."""
    counts: dict[str, list[int]] = {}
    for each in runs:
        for name, found in each["drafters"].items():
            sums = counts.setdefault(name, [0, 0])
            sums[0] += found["drafted"]
            sums[1] += found["accepted"]
    tokens = total(runs, "tokens")
    return "; ".join(
        f"{name} {accepted / tokens:.0%} of the tokens, {accepted} of {drafted} accepted ({accepted / drafted:.0%})"
        for name, (drafted, accepted) in counts.items()
    )


def main() -> None:
    """Measure and report."""
    args = parse_args()
    clock, runs = GrammarClock(), []
    drafting = {
        "drafter": args.drafter,
        **({} if args.lookahead is None else {"num_speculative_tokens": args.lookahead}),
    }
    with closing(
        SpecEngine.load(args.bundle, max_num_seqs=args.batch, num_threads=args.threads, enable_prefix_caching=False)
    ) as engine:
        schemas = Schemas(engine, sorted(args.schemas.glob("*.json"))[:: args.every])
        taken = list(islice(schemas, args.count))
        for start in range(0, len(taken), args.batch):
            batch = taken[start : start + args.batch]
            runs.append([run(engine, clock, batch, args.tokens, way) for way in ({"drafter": "none"}, drafting)])
    plain, drafted = [each[0] for each in runs], [each[1] for each in runs]
    texts = [text for each in (*plain, *drafted) for text in each["texts"]]
    ended = [text for text in texts if text["ended"]]
    pairs = [
        (one["text"], other["text"])
        for a, b in zip(plain, drafted, strict=True)
        for one, other in zip(a["texts"], b["texts"], strict=True)
    ]
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(plain, drafted, strict=True)]
    seconds = total(drafted, "seconds")
    rows = [
        ("schemas honoured, refused", f"{len(pairs)}, {schemas.refused}"),
        ("texts that ended, and valid ones of these", f"{len(ended)}, {sum(text['valid'] for text in ended)}"),
        ("texts equal to plain decoding's", f"{sum(one == other for one, other in pairs)}"),
        (
            f"{args.drafter} over plain with the same masks: all seconds, median",
            f"{total(plain, 'seconds') / seconds:.2f}, {median(ratios):.2f}",
        ),
        ("tokens a round and row", f"{total(drafted, 'tokens') / total(drafted, 'row_rounds'):.2f}"),
        ("drafters", describe_drafters(drafted)),
        ("masks made beside the target's step, share of a round", f"{total(drafted, 'beside') / seconds:.4f}"),
        ("grammars that a round waits for, share of it", f"{total(drafted, 'waited') / seconds:.4f}"),
    ]
    report(f"structured: {args.bundle.name}, batch {args.batch}", rows, {"runs": runs}, args.json)


if __name__ == "__main__":
    main()
