"""Ahead-of-time compilation of the kernels for an architecture. Needs Triton and no GPU."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import SHARED_BYTES, TileConfig, check_sm
from specexport_runtime.errors import CheckFailedError, MissingDependencyError, UserInputError, make_install_hint

_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>[^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+\.(?P<type>\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?(?P<name>[\w$]+)")

SCRATCH_PARAMETERS = ("u64", "u64")
"""Triton ends each entry with pointers to global and to profiling scratch memory, used or not."""

POINTER_ALIGNMENT = 16
"""Bytes every tensor must be aligned to. CUDA allocates at 256; vector loads need the promise."""


COMPILE_OPTIONS = {"ptx_version": 87, "enable_fp_fusion": True}
"""PTX 8.7 is the first that knows sm 120, and read by drivers of CUDA 12.8 and later. Triton would write the latest."""


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
    """The PTX without its entry's last ``count`` parameters, which no launcher passes; CheckFailedError if used."""
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


class CompiledKernel(NamedTuple):
    """A kernel ready to be embedded."""

    spec: KernelSpec
    sm: int
    tiles: TileConfig  # ``spec.grid(tiles, num_tokens, num_seqs)`` is the launch grid
    name: str  # of the entry
    ptx: str  # its entry takes exactly ``spec.signature.argument_names``: Triton's scratch pointers are taken off
    cubin: bytes  # ``ptx``, assembled
    parameters: tuple[PtxParameter, ...]  # of ``ptx``
    num_warps: int  # warps of a program; a block has ``32 * num_warps`` threads
    shared_bytes: int  # dynamic shared memory of a launch; above 48 KiB a launcher must opt in
    registers: int  # of a thread
    spill_bytes: int  # bytes stored to and loaded from local memory because registers ran out, added up


def import_triton() -> Any:
    """Triton, able to compile."""
    try:
        import triton
    except ImportError as error:
        raise MissingDependencyError(
            f"The attention kernels need Triton: {error}.", make_install_hint("tensorrt")
        ) from error
    if triton.knobs.runtime.interpret:
        raise UserInputError(
            "TRITON_INTERPRET is set: Triton interprets kernels and cannot compile them.", "Unset TRITON_INTERPRET."
        )
    return triton


def _triton_source(spec: KernelSpec, tiles: TileConfig) -> Any:
    """Triton's description of what to compile: every parameter has a type or a value."""
    from triton.compiler import ASTSource

    from specexport.kernels.launch import KERNELS

    kernel = KERNELS[spec.kernel]
    types = spec.signature.triton_types(spec.dtype)
    constants = spec.constants(tiles)
    absent = [name for name in kernel.arg_names if name not in types and name not in constants]
    values = {name: constants.get(name) for name in kernel.arg_names if name not in types}
    if unknown := set(absent) - {item.name for item in _list_optional_arguments(spec)}:
        raise CheckFailedError(f"{spec.kernel} has parameters its signature does not name: {sorted(unknown)}.")
    aligned = [["tt.divisibility", POINTER_ALIGNMENT]]
    return ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs=values,
        attrs={(i,): aligned for i, name in enumerate(kernel.arg_names) if types.get(name, "").startswith("*")},
    )


def _list_optional_arguments(spec: KernelSpec) -> list[Any]:
    from specexport.kernels.signatures import SIGNATURES

    full = SIGNATURES[spec.kernel]
    return [item for item in (*full.inputs, *full.outputs) if item.only_if]


def check_parameters(spec: KernelSpec, ptx: str) -> None:
    """Refuse PTX whose parameters are not the signature's and the scratch pointers; the message shows both lists."""
    found = tuple(parameter.type for parameter in entry_parameters(ptx))
    wanted = spec.signature.ptx_types() + SCRATCH_PARAMETERS
    if found != wanted:
        raise CheckFailedError(f"{spec.kernel} takes {found} in PTX, the launcher passes {wanted}.")


def check_memory(spec: KernelSpec, sm: int, metadata: Any) -> None:
    """Refuse a kernel that needs scratch memory, which no launcher provides, or more shared memory than there is."""
    scratch = (metadata.global_scratch_size, metadata.profile_scratch_size)
    if any(scratch):
        raise CheckFailedError(
            f"{spec.kernel} for sm {sm} needs scratch memory ({scratch} bytes), which engines do not provide."
        )
    if metadata.shared > SHARED_BYTES[sm]:
        raise CheckFailedError(
            f"{spec.kernel} for sm {sm} needs {metadata.shared} bytes of shared memory, there are {SHARED_BYTES[sm]}.",
            hint="Use smaller tiles or fewer stages.",
        )


def compile_kernel(spec: KernelSpec, sm: int, *, tiles: TileConfig | None = None) -> CompiledKernel:
    """Compile a kernel for an architecture (80, 89, 90, 100 or 120), on any machine.

    UserInputError for an unknown ``sm``; CheckFailedError if it needs scratch memory or too much shared memory.
    """
    check_sm(sm)
    triton = import_triton()
    from triton.backends.compiler import GPUTarget

    tiles = tiles or spec.tiles(sm)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # paths of this machine do not belong into an engine
        compiled = triton.compile(
            _triton_source(spec, tiles),
            target=GPUTarget("cuda", sm, 32),
            options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **COMPILE_OPTIONS},
        )
    check_memory(spec, sm, compiled.metadata)
    check_parameters(spec, compiled.asm["ptx"])
    ptx = drop_trailing_parameters(compiled.asm["ptx"], len(SCRATCH_PARAMETERS))
    cubin, registers, spill_bytes = assemble_ptx(ptx, sm)
    return CompiledKernel(
        spec=spec,
        sm=sm,
        tiles=tiles,
        name=entry_name(ptx),
        ptx=ptx,
        cubin=cubin,
        parameters=entry_parameters(ptx),
        num_warps=compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
    )


def assemble_ptx(ptx: str, sm: int) -> tuple[bytes, int, int]:
    """Assemble one entry's PTX: cubin, registers of a thread, bytes spilled; CheckFailedError if it is refused."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(sm).path, "-v", f"--gpu-name={sm_arch_from_capability(sm)}", source, "-o", target]
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - Triton's own tool
        if result.returncode:
            raise CheckFailedError(f"ptxas refuses the PTX for sm {sm}: {result.stderr.strip()}")
        cubin = target.read_bytes()
    registers = re.search(r"Used (\d+) registers", result.stderr)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", result.stderr)
    if registers is None or not spills:
        raise CheckFailedError(f"ptxas says nothing of registers and spills: {result.stderr.strip()}")
    return cubin, int(registers[1]), sum(map(int, spills))
