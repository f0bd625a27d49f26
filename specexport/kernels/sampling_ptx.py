"""Writes the PTX of the sampling kernels into the runtime: ``python -m specexport.kernels.sampling_ptx``.

Machines that run bundles need no Triton then. The PTX is of the oldest architecture; drivers compile it for newer ones.
"""

from typing import Any

from specexport.kernels.compile import (
    COMPILE_OPTIONS,
    SCRATCH_PARAMETERS,
    drop_trailing_parameters,
    entry_parameters,
    import_triton,
)
from specexport_runtime.errors import CheckFailedError
from specexport_runtime.executors.row_kernels import ARGUMENTS, CONSTANTS, ptx_path

OLDEST_SM = 80
_PTX_TYPES = {"i32": "u32"}


def sampling_ptx(kernel: str) -> str:
    """The PTX of one kernel, one comment line with its launch before it; CheckFailedError if it needs scratch."""
    triton = import_triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from specexport.kernels import sampling

    function: Any = getattr(sampling, kernel)
    types, names = ARGUMENTS[kernel], function.arg_names
    constants = {name: CONSTANTS[name] for name in names[len(types) :]}
    source = ASTSource(
        fn=function,
        signature=dict(zip(names, (*types, *["constexpr"] * len(constants)), strict=True)),
        constexprs=constants,
    )
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # paths of this machine do not belong into the runtime
        compiled = triton.compile(source, target=GPUTarget("cuda", OLDEST_SM, 32), options=dict(COMPILE_OPTIONS))
    facts = compiled.metadata
    if any((facts.global_scratch_size, facts.profile_scratch_size)):
        raise CheckFailedError(f"{kernel} needs scratch memory, which no launcher provides.")
    ptx = drop_trailing_parameters(compiled.asm["ptx"], len(SCRATCH_PARAMETERS))
    found = tuple(parameter.type for parameter in entry_parameters(ptx))
    if found != tuple(_PTX_TYPES.get(each, "u64") for each in types):
        raise CheckFailedError(f"{kernel} takes {found} in PTX.")
    lines = [line.partition("//")[0].strip() for line in ptx.splitlines()]
    return "\n".join([f"// threads {32 * facts.num_warps}, shared {facts.shared}", *filter(None, lines), ""])


def main() -> None:
    """Write all of them."""
    for kernel in ARGUMENTS:
        path = ptx_path(kernel)
        path.parent.mkdir(exist_ok=True)
        path.write_text(sampling_ptx(kernel), encoding="utf-8")


if __name__ == "__main__":
    main()
