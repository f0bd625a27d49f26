"""Texts that follow JSON schemas: are they valid, how much faster are drafts, and what do the masks cost?

Drafted and plain runs have the same masks, one after the other for each schema, and their texts are compared.
"""

import argparse
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from common import median, report

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling import grammar as grammars
from specexport_runtime.sampling.structured import StructuredOutputs

PROMPT = "Write a JSON document with realistic values that follows this JSON schema:\n{schema}\n"


def parse_args() -> argparse.Namespace:
    """Command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("schemas", type=Path, help="folder of .json files, one schema each")
    parser.add_argument("--count", type=int, default=50, help="schemas that can be honoured")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class MaskClock:
    """Counts the seconds that the masks of verify steps take."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        self._make = grammars._make_masks
        grammars._make_masks = self._timed

    def _timed(self, wanted: Any) -> None:
        start = time.perf_counter()
        self._make(wanted)
        self.seconds += time.perf_counter() - start
        self.steps += 1


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that another library finds valid."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    """Measure and report."""
    args = parse_args()
    clock, refused, records = MaskClock(), 0, []
    with closing(
        SpecEngine.load(
            args.bundle, max_num_seqs=args.batch_size, num_threads=args.threads, enable_prefix_caching=False
        )
    ) as engine:
        for file in sorted(args.schemas.glob("*.json")):
            if len(records) == args.count:
                break
            schema = json.loads(file.read_text(encoding="utf-8"))
            try:
                form = StructuredOutputs(json=schema)
                engine.check_form(form)
                message = {"role": "user", "content": PROMPT.format(schema=json.dumps(schema))}
                prompt = (
                    engine.encode_chat([message]) if engine.has_chat_template else engine.encode(message["content"])
                )
            except InvalidRequestError:
                refused += 1
                continue
            record: dict[str, Any] = {"schema": file.name}
            for way in ("none", args.drafter):
                params = SamplingParams(max_tokens=args.tokens, structured_outputs=form)
                before = clock.seconds
                results = engine.generate([prompt] * args.batch_size, [params] * args.batch_size, drafter=way)
                first = results[0]
                seconds = first.stats.decode_s or 0.0
                record[way] = {
                    "seconds": seconds,
                    "tokens": first.stats.num_generated_tokens,
                    "rounds": first.stats.rounds,
                    "text": first.text,
                    "ended": first.finish_reason == "stop",
                    "valid": first.finish_reason == "stop" and is_valid(first.text, schema),
                    "mask_share": (clock.seconds - before) / max(engine.times.total, 1e-9),
                }
            records.append(record)
    plain, drafted = [r["none"] for r in records], [r[args.drafter] for r in records]
    ended = [r for r in [*plain, *drafted] if r["ended"]]
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(plain, drafted, strict=True) if b["seconds"]]
    total = sum(a["seconds"] for a in plain) / sum(b["seconds"] for b in drafted)
    rows = [
        ("schemas honoured, refused", f"{len(records)}, {refused}"),
        ("texts that ended, and valid ones of these", f"{len(ended)}, {sum(r['valid'] for r in ended)}"),
        (
            "texts equal to plain decoding's",
            f"{sum(a['text'] == b['text'] for a, b in zip(plain, drafted, strict=True))}",
        ),
        (f"{args.drafter} over plain with the same masks: all seconds, median", f"{total:.2f}, {median(ratios):.2f}"),
        ("masks, share of a round's time", f"{median(r['mask_share'] for r in drafted):.4f}"),
    ]
    report(f"structured: {args.bundle.name}", rows, {"records": records}, args.json)


if __name__ == "__main__":
    main()
