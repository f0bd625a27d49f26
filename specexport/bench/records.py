"""What a benchmark leaves behind: one record a run, one record a prompt, and where they came from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specexport.bench.methods import Cell
from specexport.report import save_text
from specexport_runtime.errors import InvalidRequestError

SCHEMA = "specexport.bench/1"


@dataclass(frozen=True)
class RunRecord:
    """All prompts of a domain, once. Times in seconds."""

    cell: Cell  # what was run
    repeat: int  # from 0
    num_prompts: int
    new_tokens: int  # generated tokens of all prompts together
    wall_s: float  # time in ``generate()``
    tokens_per_second: float  # ``new_tokens / wall_s``; the prompts' prefill is in that time
    # tokens of the verify rounds over the time of these rounds; None without one. Prompt chunks that ride along with a
    # round are in its time.
    decode_tokens_per_second: float | None
    phases: Mapping[str, float]  # ``engine.times``
    padding: Mapping[str, float]  # ``engine.padding``, with ``ratio``


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of one run. Times in seconds."""

    cell: Cell  # what was run
    repeat: int  # from 0
    id: str  # of the prompt
    prompt_tokens: int
    max_tokens: int  # most tokens that were asked for
    new_tokens: int  # generated
    rounds: int  # target passes that gave it tokens, prefill's last one too
    draft_rounds: int  # rounds with draft tokens
    drafted: int  # draft tokens tested, those of branches included
    accepted: int  # draft tokens accepted, likewise
    accepted_lengths: Sequence[int]  # tokens of each round, the target's own included
    wall_s: float  # from the start of its prefill to its end
    queued_s: float  # from the start of the run to the start of its prefill
    time_to_first_token_s: float | None  # from the start of its prefill
    decode_s: float | None  # from its first token to its end
    finish_reason: str  # ``"stop"`` or ``"length"``
    equal_to_plain: bool | None  # same tokens as plain greedy decoding; None where nothing can be compared (sampling)
    first_difference: int | None  # output position of the first other token; None if there is none
    branches: int = 0  # of ``drafted``, tokens beside the chain of their draft
    accepted_branches: int = 0  # of ``accepted``


@dataclass(frozen=True)
class BenchResult:
    """A whole benchmark."""

    command: Sequence[str]  # the command line
    machine: Mapping[str, Any]  # see :func:`specexport.bench.subject.describe_machine`
    bundle: Mapping[str, Any]  # names and hashes
    options: Mapping[str, Any]  # see :class:`specexport.bench.options.BenchOptions`
    runs: Sequence[RunRecord]  # in the order they ran
    prompts: Sequence[PromptRecord]  # one record a prompt and run

    @property
    def compared(self) -> list[PromptRecord]:
        """Texts that were compared with plain greedy decoding."""
        return [record for record in self.prompts if record.equal_to_plain is not None]

    @property
    def different(self) -> list[PromptRecord]:
        """Of these, the ones that are not equal."""
        return [record for record in self.compared if not record.equal_to_plain]

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            "schema": SCHEMA,
            "command": list(self.command),
            "machine": dict(self.machine),
            "bundle": dict(self.bundle),
            "options": dict(self.options),
            "texts": {"compared": len(self.compared), "different": len(self.different)},
            "runs": [_flatten(record) for record in self.runs],
            "prompts": [_flatten(record) for record in self.prompts],
        }


def _flatten(record: RunRecord | PromptRecord) -> dict[str, Any]:
    fields = asdict(record)
    del fields["cell"]
    return {**record.cell._asdict(), **fields}


def _split(fields: Mapping[str, Any]) -> tuple[Cell, dict[str, Any]]:
    rest = dict(fields)
    return Cell(**{name: rest.pop(name) for name in Cell._fields if name in rest}), rest


def write_json(path: Path, result: BenchResult, more: Mapping[str, Any] | None = None) -> None:
    """Write the records, and what follows from them, as ``save_text`` does."""
    parts = [f"{_dump(name)}: {_dump_lines(value)}" for name, value in {**result.to_json(), **(more or {})}.items()]
    save_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _dump(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _dump_lines(value: object) -> str:
    """A list of objects with one of them a line; anything else on one line."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(_dump, value)) + "\n]"
    return _dump(value)


def read_json(path: Path) -> BenchResult:
    """Read what :func:`write_json` wrote; InvalidRequestError for anything else."""
    fix = "give a file that `specexport bench --json` wrote."
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read ({error.strerror}).", fix) from error
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        raise InvalidRequestError(f"{path} is not JSON.", fix) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise InvalidRequestError(f"{path} has the schema {schema!r}, not {SCHEMA!r}.", fix)
    try:
        runs = [RunRecord(cell, **rest) for cell, rest in map(_split, data["runs"])]
        prompts = [PromptRecord(cell, **rest) for cell, rest in map(_split, data["prompts"])]
        return BenchResult(data["command"], data["machine"], data["bundle"], data["options"], runs, prompts)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidRequestError(f"{path} lacks a part of {SCHEMA} ({error}).", fix) from None
