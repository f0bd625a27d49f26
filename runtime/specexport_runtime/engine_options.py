"""How to load an engine: one frozen record for every way in (Python, commands, server, Ray Serve).

An option is one field of it: name, type, default, and what :class:`Option` says. The keywords of ``SpecEngine.load``,
the flags of the commands, the settings of Ray Serve and the list in the docstring are made of the fields.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from specexport_runtime.bundle.entry import MAX_NUM_SEQS
from specexport_runtime.bundle.opened import check_num_seqs
from specexport_runtime.drafters.base import DrafterFactory
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.checks import check_match_length, parse_bytes

P = ParamSpec("P")
T = TypeVar("T")
Engine_co = TypeVar("Engine_co", covariant=True)

Check = Callable[[Any, str], object]
"""Raises InvalidRequestError for a value that an option, of that name, may not have."""


class Use(Enum):
    """Which commands have the flag of an option; a command may also take single ones."""

    ANY = "commands that write texts"
    BATCH = "those that write several at a time"
    SERVER = "the server"


class Option(NamedTuple):
    """What a field of :class:`EngineOptions` says besides its name, type and default."""

    text: str  # what it does: in the help of a flag, and in the docstring
    more: str = ""  # what only the docstring says
    none: str = ""  # what None takes
    use: Use | None = None  # which commands have its flag; None for those that name it
    flag: str = ""  # as click has it; empty for the name
    metavar: str | None = None  # of the flag's value
    check: Check | None = None  # of values other than None; what depends on the bundle or the machine is seen at load
    drafter: str = ""  # the one drafter that it is for
    in_text: bool = True  # a text can say it: a setting of Ray Serve

    @property
    def sentences(self) -> str:
        """The whole description, for users of Python."""
        return " ".join(filter(None, (self.text, self.more, f"None: {self.none}." if self.none else "")))


def _option(default: T, text: str, more: str = "", **others: Any) -> T:
    made: T = field(default=default, metadata={"option": Option(text, more, **others)})
    return made


def _make_range_check(low: int, high: int | None = None) -> Check:
    fix = f"give {low} or more." if high is None else f"choose a number from {low} to {high}."

    def check(value: int, name: str) -> None:
        if value < low or (high is not None and value > high):
            raise InvalidRequestError(f"{name} is {value}.", fix)

    return check


def _check_milliseconds(value: float, name: str) -> None:
    if not 0 < value < float("inf"):
        raise InvalidRequestError(f"{name} is {value:g}.", "give milliseconds, more than 0.")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Keyword arguments of ``SpecEngine.load``. A value out of its range is an ``InvalidRequestError``."""

    max_num_seqs: int | None = _option(
        None, "Sequences decoded at a time.", none="the bundle's, else 8", use=Use.BATCH, check=check_num_seqs
    )
    max_model_len: int | None = _option(
        None, "Most tokens of a sequence.", "The prompt's too.", none="the bundle's limit", use=Use.ANY
    )
    num_threads: int | None = _option(
        None, "Compute threads.", none="the cores available", use=Use.ANY, flag="--threads"
    )
    spin: bool = _option(True, "Let idle threads spin; turn off on busy machines.", use=Use.ANY)
    unpad_kv: bool = _option(
        True,
        "Off: all sequences advance by the batch's maximum, with padding in the KV cache.",
        "On, each writes its KV at its own position; off is the padded method of EMS-SD, for comparison.",
        use=Use.BATCH,
    )
    unpad_input: bool = _option(
        True,
        "Off: all sequences of a step are padded to the longest draft.",
        "On, new tokens are concatenated.",
        use=Use.BATCH,
    )
    max_num_batched_tokens: int | None = _option(
        None,
        "Tokens of one step.",
        "Those of drafts and of prompts together; less where the target's engine takes less.",
        none="the bundle's, else 512",
        use=Use.ANY,
        check=_make_range_check(1),
    )
    ttft_budget_ms: float | None = _option(
        None,
        "Milliseconds to the first token: prompts that cannot keep them yield to those that can.",
        "None reads the oldest first.",
        use=Use.SERVER,
        metavar="MS",
        check=_check_milliseconds,
    )
    itl_budget_ms: float | None = _option(
        None,
        "Milliseconds between two rounds of a sequence: prompts are read in chunks that fit into them.",
        "None reads as much as ``max_num_batched_tokens`` lets.",
        use=Use.SERVER,
        metavar="MS",
        check=_check_milliseconds,
    )
    match_length: int | None = _option(
        None, "Fewest tokens that lookup must match.", none="2", use=Use.ANY, check=lambda n, _: check_match_length(n)
    )
    speculative_config: Mapping[str, Any] | None = _option(
        None,
        "The default drafter and its K, by vLLM's keys.",
        "They are ``method``, ``model``, ``num_speculative_tokens`` and ``prompt_lookup_min``.",
    )
    cuda_graphs: bool | None = _option(
        None,
        "GPU engines: replay recorded steps.",
        "False runs them one kernel at a time. On ort-cuda, an engine with layers to switch off cannot.",
        none="on where the engine can",
        use=Use.ANY,
    )
    adaptive: bool = _option(
        True,
        "Choose the length of drafts by what rounds take.",
        "That is ``auto``, the default of requests that do not say: it begins with what was learned on this machine, "
        "else with what the sizes of the models promise. False offers no ``auto``: requests that do not say draft with "
        "the draft model, if there is one, and a fixed K.",
        use=Use.ANY,
    )
    enable_prefix_caching: bool = _option(
        True,
        "Do not read the part of a prompt again that an earlier text began with.",
        "Cache rows keep the texts of requests that ended. On a CPU no bit changes.",
        use=Use.ANY,
    )
    prefix_rows: int = _option(
        0,
        "Earlier texts kept in memory of their own, beside those of the sequences that are decoded.",
        "Each costs the memory of a sequence: a cache row.",
        use=Use.BATCH,
        check=_make_range_check(0, MAX_NUM_SEQS),
    )
    prefix_cache_dir: str | Path | None = _option(  # noqa: RUF009 it is a field
        None,
        "Keep earlier texts in this folder too: they outlive their cache rows, and the engine (CPU).",
        "Requests find those of their own ``cache_salt`` and bundle, as in memory. The folder has texts: guard it.",
        use=Use.ANY,
        metavar="DIR",
    )
    prefix_cache_bytes: int | str = _option(
        "4GiB",
        "Most bytes of --prefix-cache-dir; what was used least recently is removed.",
        use=Use.ANY,
        metavar="SIZE",
        check=parse_bytes,
    )
    kv_cache_memory_bytes: int | str | None = _option(
        None,
        "Most memory of the KV caches, 2GiB for example; more sequences than have their full length in it may run "
        "(CPU).",
        "A request begins when all that it may come to need fits beside the others. On Linux.",
        none="what is written to",
        use=Use.BATCH,
        metavar="SIZE",
        check=parse_bytes,
    )
    corpus: str | Path | None = _option(  # noqa: RUF009 it is a field
        None, "Folder of text files that drafter suffix may copy from.", use=Use.ANY, metavar="DIR", drafter="suffix"
    )
    suffix_file: str | Path | None = _option(  # noqa: RUF009 it is a field
        None,
        "Keep what drafter suffix learns in this file, or in the user's cache.",
        "For the latter ``cache``; None forgets it with the engine.",
        use=Use.ANY,
        metavar="FILE|cache",
        drafter="suffix",
    )
    suffix_memory_mb: int | None = _option(
        None,
        "Memory for what drafter suffix learns: 16 bytes a token.",
        "In megabytes.",
        none="16",
        use=Use.ANY,
        flag="--suffix-memory",
        metavar="MB",
        drafter="suffix",
    )
    lora: str | None = _option(
        None, "LoRA adapter of the bundle to write with.", "Requests may name another.", none="none", metavar="NAME"
    )
    share_threads: bool = _option(
        False,
        "On the CPU, let target and a large draft take the same threads.",
        "That is faster, but from then on ONNX Runtime refuses every session of this process with threads of its own. "
        "The commands and the server do so.",
    )
    drafters: Mapping[str, DrafterFactory] | None = _option(
        None, "Drafters of your own, made at load.", "Requests name them like any other.", in_text=False
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.check is not None and value is not None:
                option.check(value, name)

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of ``kv_cache_memory_bytes``."""
        size = self.kv_cache_memory_bytes
        return None if size is None else parse_bytes(size, "kv_cache_memory_bytes")


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(EngineOptions)}


EngineOptions.__doc__ = f"{EngineOptions.__doc__}\n\nAttributes:\n" + "".join(
    fill(f"{name}: {option.sentences}", 112, initial_indent=" " * 4, subsequent_indent=" " * 8) + "\n"
    for name, option in OPTIONS.items()
)


class Loader(Protocol[P, Engine_co]):
    """Loads a bundle: with a record of options, with single ones by name, or with both."""

    def __call__(
        self, path: str | Path, options: EngineOptions | None = None, *args: P.args, **changes: P.kwargs
    ) -> Engine_co:
        """The loaded engine; ``changes`` go before ``options``."""
        ...


def with_keywords(record: Callable[P, object]) -> Callable[[Callable[..., T]], Loader[P, T]]:  # noqa: ARG001
    """Tell type checkers that the ``**changes`` of a loader are the fields of ``record``, and no other names."""
    return lambda load: load


DEPRECATED = {
    "prepacked": "weights are packed in the bundle, and every process maps them from there",
    "tune_profile": "the length of drafts is chosen by what rounds take; num_speculative_tokens pins it",
}
"""Options of earlier releases that change nothing any more, and why."""


def make_options(options: EngineOptions | None, changes: Mapping[str, Any]) -> EngineOptions:
    """``options`` (None: the defaults) with some of them changed; ``TypeError`` for a name that is no option."""
    for name in changes:
        if name in DEPRECATED:
            warnings.warn(
                f"{name} changes nothing any more ({DEPRECATED[name]}): leave it out.", FutureWarning, stacklevel=3
            )
        elif name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, n=1)
            raise TypeError(f"there is no engine option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return replace(
        options or EngineOptions(), **{name: each for name, each in changes.items() if name not in DEPRECATED}
    )
