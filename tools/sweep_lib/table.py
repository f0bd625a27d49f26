"""The page ``docs/architectures.md``, written from the results of a sweep."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from tools.sweep_lib.attempt import DEFECTS, LOOKAHEAD, NOT_A_DECODER, NOT_MADE, REFUSED, TOLERANCE, WORKS, Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
_UNKNOWN = "not tried"

_HEAD = """\
# Architectures

<!-- Written by `python tools/architecture_sweep.py --table`; a test holds the names to the installed transformers. -->

transformers {version} has {count} architectures for causal language models. A tiny random model of each was made from
its configuration class and built for `ort-cpu`. *Works* means: logits of ragged steps of 1 to {widest} tokens, behind
rollbacks, differ from those of eager transformers by at most {tolerance:.0e} of the largest logit, and greedy texts
with drafts are those without. Sizes, weights and text are not those of a published model: [`verify`](verify.md) tests
yours.

| | architectures |
| --- | --- |
{counts}

A refusal is exit code 2 with the reason. Another version of transformers is one command, and one more for this page:

```bash no-test: takes half an hour
python tools/architecture_sweep.py --jobs 2
python tools/architecture_sweep.py --table
```
"""
_SECTIONS = {
    WORKS: (
        "Works",
        "These build, and agree with eager transformers. Those that leave parts of a long text out were built for\n"
        "texts that they see whole ([build.md](build.md#layers-that-see-a-part-of-a-long-text)).",
    ),
    REFUSED: ("Refused", "These cannot be traced exactly, or not yet."),
    NOT_A_DECODER: ("No decoders", "Their tokens see later ones."),
    NOT_MADE: ("Not made", "No tiny model could be made or run from the configuration class, so nothing is known."),
    _UNKNOWN: ("Not tried", "The sweep has not come to these."),
    **{word: (word.capitalize(), "A defect.") for word in DEFECTS},
}


def write_table(names: Mapping[str, str], results: Mapping[str, Outcome]) -> int:
    """Write the page; returns the exit status: 1 if an architecture has no result or a defect.

    ``names`` are classes by model type, of the installed transformers.
    """
    import transformers

    by_outcome: dict[str, list[Outcome]] = {word: [] for word in _SECTIONS}
    for name, model in names.items():
        outcome = results.get(name, Outcome(name, model, _UNKNOWN))
        by_outcome[outcome.outcome].append(outcome)
    counts = [f"| {_SECTIONS[word][0].lower()} | {len(found)} |" for word, found in by_outcome.items() if found]
    page = _HEAD.format(
        version=transformers.__version__,
        count=len(names),
        widest=LOOKAHEAD + 1,
        tolerance=TOLERANCE,
        counts="\n".join(counts),
    )
    for word, (title, meaning) in _SECTIONS.items():
        if found := sorted(by_outcome[word]):
            page += f"\n## {title}\n\n{meaning}\n\n" + _listed(word, found)
    PAGE.write_text(page, encoding="utf-8")
    return int(any(by_outcome[word] for word in (_UNKNOWN, *DEFECTS)))


def _listed(word: str, found: list[Outcome]) -> str:
    if word in (WORKS, _UNKNOWN):
        return fill(", ".join(f"`{outcome.name}`" for outcome in found), 120, break_on_hyphens=False) + "\n"
    rows = [f"| `{outcome.name}` | {_reason(outcome)} |" for outcome in found]
    return "\n".join(["| architecture | reason |", "| --- | --- |", *rows]) + "\n"


def _reason(outcome: Outcome) -> str:
    last = (outcome.reason.strip().splitlines() or [""])[-1]
    text = last.split(" cannot be exported: ", 1)[-1].rstrip(".")
    return text[:160].replace("|", r"\|").replace("<", "&lt;")
