"""Prompts to measure with: JSON lines, or the small set that comes with the package."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from specexport_runtime.cli.errors import suggest
from specexport_runtime.cli.prompts import json_lines
from specexport_runtime.errors import InvalidRequestError

BUILTIN = Path(__file__).with_name("builtin_prompts.jsonl")

_FORM = 'write one object a line: {"prompt": "…"}, with `id`, `domain` and `reference` if you like.'


class BenchPrompt(NamedTuple):
    """One prompt."""

    id: str  # its name in reports; no two prompts share one
    domain: str  # what kind of text it is; domains are measured apart
    text: str  # the prompt itself
    reference: str | None = None  # a text that lookup drafting may copy from


def read_prompts(
    paths: Sequence[Path], *, num_prompts: int | None = None, domains: Sequence[str] | None = None
) -> list[BenchPrompt]:
    """Prompts of JSONL files, in order, at most ``num_prompts`` of a domain; without files, the built-in set."""
    if num_prompts is not None and num_prompts < 1:
        raise InvalidRequestError(f"the number of prompts is {num_prompts}.", "give 1 or more.")
    found = [prompt for path in paths or [BUILTIN] for prompt in _read_file(path)]
    _check_ids(found)
    known = list(dict.fromkeys(prompt.domain for prompt in found))
    for domain in domains or ():
        if domain not in known:
            near = suggest(domain, known)
            fix = f"did you mean {near!r}?" if near else f"the domains are {', '.join(known)}."
            raise InvalidRequestError(f"no prompt has the domain {domain!r}.", fix)
    kept = []
    taken = dict.fromkeys(known, 0)
    for prompt in found:
        taken[prompt.domain] += 1
        within = num_prompts is None or taken[prompt.domain] <= num_prompts
        if within and (domains is None or prompt.domain in domains):
            kept.append(prompt)
    return kept


def group_by_domain(prompts: Sequence[BenchPrompt]) -> dict[str, list[BenchPrompt]]:
    """The prompts of each domain, domains in order of their first prompt."""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.domain, []).append(prompt)
    return groups


def mix_domains(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """All prompts as one domain ``"mixed"``, one of each domain in turn."""
    columns = zip_longest(*group_by_domain(prompts).values())
    return [prompt._replace(domain="mixed") for column in columns for prompt in column if prompt is not None]


def fit_prompt(ids: Sequence[int], length: int) -> list[int]:
    """A prompt of exactly ``length`` tokens that ends as ``ids``, at least one token, does."""
    first, rest = ids[0], list(ids[1:]) or [ids[0]]
    times = -(-length // len(rest))
    return [first, *(rest * times)[len(rest) * times - length + 1 :]] if length > 1 else [ids[-1]]


def _read_file(path: Path) -> Iterator[BenchPrompt]:
    for number, record in json_lines(path):
        where = f"{path}, line {number}"
        text = _text(record, "prompt", where)
        if text is None:
            raise InvalidRequestError(f"{where}: there is no field `prompt`.", _FORM)
        if isinstance(record.get("id"), int):
            record["id"] = str(record["id"])
        yield BenchPrompt(
            _text(record, "id", where) or f"{path.stem}/{number}",
            _text(record, "domain", where) or path.stem,
            text,
            _text(record, "reference", where),
        )


def _text(record: dict[str, Any], field: str, where: str) -> str | None:
    value = record.get(field)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{where}: `{field}` is {value!r}, which is no text.", _FORM)
    return value


def _check_ids(prompts: Sequence[BenchPrompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InvalidRequestError(f"two prompts have the id {prompt.id!r}.", "give each prompt its own id.")
        seen.add(prompt.id)
