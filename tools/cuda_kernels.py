r"""Read out of onnxruntime-gpu which CUDA kernels it holds, without a GPU: the table that builds of ort-cuda check.

    pip download onnxruntime-gpu==1.31.1 --no-deps --python-version 3.12 --only-binary=:all: \
        --platform manylinux_2_28_x86_64 -d wheel
    python tools/cuda_kernels.py wheel/onnxruntime_gpu-*.whl specexport/backends/cuda_kernels.txt

A kernel is registered by calls that follow each other: a type for each of its type parameters, then its name, domain,
versions and provider. What they get is put into registers just in front of each call (x86-64): addresses of strings,
numbers. All go through one table of the host's functions, eight bytes each, where those that matter lie together:
they are counted from the one that gets the provider's name. The types of tensors lie together too, and are counted from
the one that ``PagedAttention`` has for its parameter ``S``, which is int32.
"""

import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIBRARY, PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so", "CUDAExecutionProvider"
GPU_CODE = b"\x50\xed\x55\xba"  # begins after all code and strings for the host, whose offsets are their addresses
CALL = re.compile(rb"\xff[\x90-\x97](....)", re.DOTALL)  # call *offset(%register)
STRING, START, END = rb"\x48\x8d\x15(....)", rb"\xba(....)", rb"\xb9(....)"  # lea offset(%rip),%rdx; mov to %edx, %ecx
LOOK_BACK, LONGEST = 24, 400  # bytes in front of a call, and of all registration of a kernel
NAME, DOMAIN, SINCE, BETWEEN, ONE_TYPE, SEVERAL = -32, -24, -16, -8, 8, 16  # from the provider's
TENSORS = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"),
    *("bfloat16", "float16"),
)
"""In the host's order."""


class Kernel(NamedTuple):
    """One registration; ``end`` is 0 where there is no last version."""

    domain: str
    name: str
    start: int
    end: int
    types: dict[str, int | None]  # the host's place of each type parameter's one type; None: several types


def kernels(code: bytes) -> Iterator[Kernel]:
    """All registrations, in the order in which they lie in the library."""

    def last(pattern: bytes, call: int) -> re.Match[bytes] | None:
        found = list(re.finditer(pattern, code[call - LOOK_BACK : call], re.DOTALL))
        return found[-1] if found else None

    def number(pattern: bytes, call: int) -> int:
        found = last(pattern, call)
        return 0 if found is None else int.from_bytes(found[1], "little")

    def string(call: int) -> str:
        found = last(STRING, call)
        if found is None:
            return ""
        at = call - LOOK_BACK + found.end() + int.from_bytes(found[1], "little", signed=True)
        return code[at : code.find(b"\0", at)].decode("ascii", "replace") if 0 < at < len(code) else ""

    calls = [(match.start(), int.from_bytes(match[1], "little")) for match in CALL.finditer(code)]
    given = Counter(slot for at, slot in calls if string(at) == PROVIDER)
    ((provider, _),) = given.most_common(1)
    for index, (at, slot) in enumerate(calls):
        if slot != provider or string(at) != PROVIDER:
            continue
        before = [(there, kind - provider) for there, kind in calls[max(0, index - 60) : index] if at - there < LONGEST]
        start = max(i for i, (_, kind) in enumerate(before) if kind == NAME)
        found: dict[int, int] = {kind: there for there, kind in before[start:]}
        types: dict[str, int | None] = {}
        for i in range(start - 1, -1, -1):
            there, kind = before[i]
            if kind in (NAME, provider):
                break
            if kind in (ONE_TYPE, SEVERAL):
                types.setdefault(string(there), before[i - 1][1] + provider if kind == ONE_TYPE and i else None)
        of = BETWEEN if BETWEEN in found else SINCE
        end = number(END, found[of]) if of == BETWEEN else 0
        yield Kernel(string(found[DOMAIN]), string(found[NAME]), number(START, found[of]), end, types)


def table(found: list[Kernel]) -> Iterator[str]:
    """A line for each operator and range of versions: ``domain:name from-to``, and types where all could be read."""
    (int32,) = {k.types["S"] for k in found if k.name == "PagedAttention"}
    names = {8 * at + (int32 or 0) - 8 * TENSORS.index("int32"): name for at, name in enumerate(TENSORS)}
    rows: dict[str, dict[str, set[str]]] = {}
    for k in found:
        if k.domain in ("", "com.microsoft"):
            row = rows.setdefault(f"{k.domain}:{k.name} {k.start}-{k.end or ''}", {})
            for parameter, slot in k.types.items():
                row.setdefault(parameter, set()).add("" if slot is None else names.get(slot, ""))
    for head, row in sorted(rows.items()):
        read = {parameter: types for parameter, types in sorted(row.items()) if "" not in types}
        yield " ".join([head, *(f"{parameter}={','.join(sorted(types))}" for parameter, types in read.items())])


def main(wheel: str, to: str) -> None:
    """Write the table of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(LIBRARY)
    lines = [f"# CUDA kernels of {Path(wheel).name}, by tools/cuda_kernels.py"]
    Path(to).write_text(
        "\n".join([*lines, *table(list(kernels(data[: data.index(GPU_CODE)])))]) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
