"""Reading PTX: the parameters of its entry, and taking off the ones Triton adds. Standard library only."""

import re
from typing import NamedTuple

from specexport_runtime.errors import CheckFailedError

_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>[^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+\.(?P<type>\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?(?P<name>[\w$]+)")


class PtxParameter(NamedTuple):
    """One parameter of an entry: its type (``u64``, ``u32``) and its name in the PTX."""

    type: str
    name: str


def _entry(ptx: str) -> "re.Match[str]":
    entries = list(_ENTRY.finditer(ptx))
    if len(entries) != 1:
        raise CheckFailedError(f"The PTX has {len(entries)} entries, one is expected.")
    return entries[0]


def entry_name(ptx: str) -> str:
    """Name of the one entry; CheckFailedError if there is not exactly one."""
    return _entry(ptx)["name"]


def entry_parameters(ptx: str) -> tuple[PtxParameter, ...]:
    """Parameters of the one entry, in order; CheckFailedError if one is written in an unknown way."""
    found = []
    for text in filter(str.strip, _entry(ptx)["parameters"].split(",")):
        match = _PARAMETER.fullmatch(" ".join(text.split()))
        if match is None:
            raise CheckFailedError(f"Unknown form of a PTX parameter: {text.strip()!r}.")
        found.append(PtxParameter(match["type"], match["name"]))
    return tuple(found)


def drop_trailing_parameters(ptx: str, count: int) -> str:
    """The PTX without the last ``count`` parameters of its entry, which its code must not use.

    A launcher that does not know of them would leave the driver reading beyond its argument list. CheckFailedError if
    the code uses one of them, or there are fewer.
    """
    parameters = entry_parameters(ptx)
    if len(parameters) < count:
        raise CheckFailedError(f"The PTX has {len(parameters)} parameters, {count} cannot be dropped.")
    entry = _entry(ptx)
    body = ptx[entry.end() :]
    for parameter in parameters[len(parameters) - count :]:
        if re.search(rf"(?<![\w$]){re.escape(parameter.name)}(?![\w$])", body):
            raise CheckFailedError(f"The kernel uses the PTX parameter {parameter.name}, which is to be dropped.")
    kept = entry["parameters"].split(",")[: len(parameters) - count]
    return f"{ptx[: entry.start('parameters')]}{','.join(kept)}\n{ptx[entry.end('parameters') :]}"
