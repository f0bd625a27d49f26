"""The page ``docs/architectures.md``, written from the results of a sweep."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from tools.sweep_lib.attempt import (
    DEFECTS,
    LOOKAHEAD,
    NOT_A_DECODER,
    NOT_MADE,
    REFUSED,
    TOLERANCE,
    UNROLLED,
    WORKS,
    Outcome,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
_UNKNOWN = "not tried"

_HEAD = """\
# Architectures

<!-- Written by `python tools/architecture_sweep.py --table`; a test holds the names to the installed transformers. -->

transformers {version} has {count} architectures for causal language models. A tiny random model of each was built for
`ort-cpu`. *Works*: logits of ragged steps of 1 to {widest} tokens, after rollbacks, differ from eager transformers by
at most {tolerance:.0e} of the largest logit, and drafts do not change greedy texts.
[`verify`](lossless.md#what-verify-proves) tests a published model.

| | architectures |
| --- | --- |
{counts}

For another version:

```bash no-test: takes half an hour
python tools/architecture_sweep.py --jobs 2
python tools/architecture_sweep.py --table
```
"""
_SECTIONS = {
    WORKS: (
        "Works",
        "Layers that see a part of a long text were built for\n"
        "[shorter ones](build.md#layers-that-see-a-part-of-a-long-text).",
    ),
    REFUSED: ("Refused", "These cannot be traced exactly."),
    NOT_A_DECODER: ("No decoders", "Their tokens see later ones."),
    NOT_MADE: ("Not made", "No model could be made."),
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
    page += "\n" + _layers(by_outcome[WORKS])
    PAGE.write_text(page, encoding="utf-8")
    return int(any(by_outcome[word] for word in (_UNKNOWN, *DEFECTS)))


def _layers(works: list[Outcome]) -> str:
    tried = [outcome for outcome in works if outcome.layers]
    unrolled = sum(outcome.layers == UNROLLED for outcome in tried)
    text = f"""\
## Layers of one kind

A build traces [a few layers of each kind](architecture.md#the-way-of-a-build). Of {len(tried)} deep models {unrolled} \
have the same engine, weights and nodes, as from a trace of all their layers. Of the others all are traced.
"""
    reasons: dict[str, list[Outcome]] = {}
    for outcome in sorted(tried):
        if outcome.layers != UNROLLED:
            reasons.setdefault(outcome.layers, []).append(outcome)
    listed = "\n".join(f"{_names(those)}:\n{fill(reason, 120)}\n" for reason, those in reasons.items())
    return "\n".join(fill(part, 120) if not part.startswith("#") else part for part in text.split("\n")) + "\n" + listed


def _listed(word: str, found: list[Outcome]) -> str:
    if word in (WORKS, NOT_MADE, _UNKNOWN):
        return _names(found) + "\n"
    reasons: dict[str, list[Outcome]] = {}
    for outcome in found:
        reasons.setdefault(_reason(outcome), []).append(outcome)
    return "\n".join(f"{_names(those)}:\n{fill(reason, 120)}\n" for reason, those in reasons.items())


def _names(found: list[Outcome]) -> str:
    return fill(", ".join(f"`{outcome.name}`" for outcome in found), 120, break_on_hyphens=False)


def _reason(outcome: Outcome) -> str:
    last = (outcome.reason.strip().splitlines() or [""])[-1]
    text = last.split(" cannot be exported: ", 1)[-1].split(";")[0].rstrip(".")
    return text[:160].replace("<", "&lt;")
