"""Prints what the compiler makes of the shipped kernels: ``python -m specexport.kernels.report``."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import MULTIPROCESSORS
from specexport.report import markdown_row

if TYPE_CHECKING:
    from specexport.kernels.compile import CompiledKernel

ARCHITECTURES = tuple(MULTIPROCESSORS)
HEAD_SIZES = (64, 80, 96, 128, 256)
STEPS = {"decode": 1, "verify": 5, "prefill": 256}
"""New tokens a row of the three kinds of step."""

HEADER = ("kernel", "step", "head size", *(f"sm {sm}" for sm in ARCHITECTURES))


def shipped_specs() -> Iterator[tuple[str, KernelSpec]]:
    """Kind of step and spec of every kernel in the table: 32 query heads on 8 KV heads, bfloat16."""
    spec = KernelSpec(
        kernel="kv_append", dtype="bfloat16", num_heads=32, kv_num_heads=8, head_size=128, scale=128**-0.5
    )
    yield "any", spec
    for size in HEAD_SIZES:
        for step, new_tokens in STEPS.items():
            splits = 1 if step == "prefill" else 4
            attention = replace(
                spec, kernel="ragged_attention", head_size=size, v_head_size=size, scale=size**-0.5,
                new_tokens=new_tokens, num_splits=splits,
            )  # fmt: skip
            yield step, attention
    yield "any", replace(spec, kernel="combine_splits", num_splits=4)


def format_cell(kernel: "CompiledKernel") -> str:
    """A compiled kernel: tile, warps, stages; registers of a thread, KiB of shared memory, bytes spilled."""
    tiles = kernel.tiles
    tile = f"{tiles.block_m}×{tiles.block_n}" if kernel.spec.kernel == "ragged_attention" else str(tiles.block_m)
    cut = f"{tile}/{tiles.num_warps}/{tiles.num_stages}"
    return f"{cut}, {kernel.registers} reg, {kernel.shared_bytes / 1024:.0f} KiB, {kernel.spill_bytes}"


def main() -> None:
    """Compile everything and print the table. Needs Triton, no GPU; takes about two minutes."""
    from specexport.kernels.compile import compile_kernel

    print(markdown_row(HEADER))  # noqa: T201 - this is what the command is for
    print(markdown_row(("---",) * len(HEADER)))  # noqa: T201
    for step, spec in shipped_specs():
        cells = (format_cell(compile_kernel(spec, sm)) for sm in ARCHITECTURES)
        print(markdown_row((spec.kernel, step, str(spec.head_size), *cells)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
