"""Compilation ahead of time, for every architecture, without a GPU."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from specexport.kernels.compile import (
    CompiledKernel,
    check_parameters,
    compile_kernel,
    drop_trailing_parameters,
    entry_name,
    entry_parameters,
)
from specexport.kernels.report import ARCHITECTURES, format_cell, shipped_specs
from specexport.kernels.signatures import SIGNATURES
from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import SHARED_BYTES, TileConfig
from specexport_runtime.errors import CheckFailedError, MissingDependencyError, UserInputError

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kernels-compiled")]  # slow together

ROOT = Path(__file__).parents[2]
SPEC = KernelSpec(
    kernel="ragged_attention", dtype="bfloat16", num_heads=32, kv_num_heads=8, head_size=128, scale=0.088, new_tokens=5
)
OLD_TRITON = tuple(int(part) for part in version("triton").split(".")[:2]) < (3, 9)
"""Those that torch's CUDA build pins spill up to 48 bytes in nine of the kernels."""
SHIPPED = [
    # Any shape of step at the head size most models have; the others for the verify step, the one they are for.
    pytest.param(spec, ARCHITECTURES[number % len(ARCHITECTURES)], id=f"{spec.kernel}-{step}-{spec.head_size}")
    for number, (step, spec) in enumerate(shipped_specs())
    if spec.head_size == 128 or step == "verify"
]
VARIANTS = {
    "tree": replace(SPEC, tree=True),
    "window": replace(SPEC, window=1024),
    "everything_split": replace(SPEC, tree=True, sinks=True, window=128, softcap=30.0, num_splits=4),
    "values_smaller": replace(SPEC, head_size=192, v_head_size=128, num_heads=16, kv_num_heads=16),
    "multi_query": replace(SPEC, kv_num_heads=1),
}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing compiled before counts, and nothing is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def check_compiled(kernel: CompiledKernel, *, most_spilled: int = 0) -> None:
    spec, sm = kernel.spec, kernel.sm
    assert tuple(parameter.type for parameter in kernel.parameters) == spec.signature.ptx_types()
    assert kernel.name == spec.kernel
    assert re.search(rf"\.target sm_{sm}a?$", kernel.ptx, re.MULTILINE)
    assert f".reqntid {32 * kernel.num_warps}\n" in kernel.ptx
    assert kernel.cubin[:4] == b"\x7fELF"
    assert 0 < kernel.registers <= 255
    assert kernel.shared_bytes <= SHARED_BYTES[sm]
    assert kernel.spill_bytes <= (64 if OLD_TRITON else most_spilled)
    assert ".file" not in kernel.ptx
    assert str(ROOT) not in kernel.ptx
    if spec.kernel == "ragged_attention":  # entries are copied sixteen bytes at a time, in the background
        widths = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", kernel.ptx))
        assert widths == {"0x10"}


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("spec", "sm"), SHIPPED)
def test_shipped_kernels_compile(spec: KernelSpec, sm: int) -> None:
    kernel = compile_kernel(spec, sm)
    check_compiled(kernel)
    assert f", {kernel.registers} reg, " in format_cell(kernel)


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("kernel", "sm"), [("kv_append", 80), ("combine_splits", 89), ("ragged_attention", 120)])
def test_float16_compiles(kernel: str, sm: int) -> None:
    check_compiled(compile_kernel(replace(SPEC, kernel=kernel, dtype="float16"), sm))


@pytest.mark.one_of_kind
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_compiles(name: str) -> None:
    # Four registers' worth at most: the assembler prefers that to one program less on a multiprocessor.
    check_compiled(compile_kernel(VARIANTS[name], 90), most_spilled=2 * 4 * 4)


@pytest.mark.one_of_kind
@pytest.mark.parametrize("head_size", [64, 256])
def test_small_tiles_need_no_opt_in_to_shared_memory(head_size: int) -> None:
    spec = replace(SPEC, head_size=head_size, v_head_size=head_size, new_tokens=256)
    kernel = compile_kernel(spec, 90, tiles=spec.tiles(90, small=True))
    check_compiled(kernel)
    assert kernel.shared_bytes <= 48 * 1024


def test_parameters_are_in_the_signatures_order() -> None:
    from specexport.kernels.launch import KERNELS

    assert set(KERNELS) == set(SIGNATURES)
    for name, signature in SIGNATURES.items():
        tensors = [[item.name for item in items] for items in (signature.inputs, signature.outputs)]
        ints = [item.name for item in signature.ints]
        assert KERNELS[name].arg_names == [*tensors[0], *ints, *tensors[1], *signature.constants]


def test_attributes_are_compiled_in() -> None:
    texts = {compile_kernel(spec, 80).ptx for spec in (SPEC, replace(SPEC, scale=0.1), replace(SPEC, softcap=9.0))}
    assert len(texts) == 3


ENTRY = """.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1,
	.param .u64 .ptr .global .align 1 kernel_param_2
)
{{
	ld.param.b64 	%rd1, [{used}];
	ret;
}}
"""


def test_unused_parameters_are_taken_off() -> None:
    text = ENTRY.format(used="kernel_param_0")
    assert [p.type for p in entry_parameters(text)] == ["u64", "u32", "u64"]
    shorter = drop_trailing_parameters(text, 2)
    assert [p.name for p in entry_parameters(shorter)] == ["kernel_param_0"]
    assert shorter.endswith(text[text.index("\n)\n{") :])
    assert entry_name(shorter) == "kernel"


def test_parameters_that_are_not_the_launchers_are_refused() -> None:
    with pytest.raises(CheckFailedError, match="kernel_param_2"):
        drop_trailing_parameters(ENTRY.format(used="kernel_param_2"), 1)
    drop_trailing_parameters(ENTRY.format(used="kernel_param_20"), 1)  # another name
    text = ENTRY.format(used="x")
    with pytest.raises(CheckFailedError, match="3 parameters, 4"):
        drop_trailing_parameters(text, 4)
    with pytest.raises(CheckFailedError, match="2 entries"):
        entry_name(text * 2)
    with pytest.raises(CheckFailedError, match="Unknown form"):
        entry_parameters(".entry k(.param .align 8 .b8 k_param_0[16])")
    with pytest.raises(CheckFailedError, match="the launcher passes"):
        check_parameters(SPEC, text)


def test_scratch_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    needy = SimpleNamespace(metadata=SimpleNamespace(global_scratch_size=128, profile_scratch_size=0))
    monkeypatch.setattr(triton, "compile", lambda *_, **__: needy)
    with pytest.raises(CheckFailedError, match="needs scratch memory"):
        compile_kernel(SPEC, 90)


def test_more_shared_memory_than_there_is_is_refused() -> None:
    with pytest.raises(CheckFailedError, match=r"sm 89 needs \d+ bytes of shared memory, there are 101376"):
        compile_kernel(SPEC, 89, tiles=TileConfig(32, 128, 4, 4))


def test_triton_that_is_missing_or_told_to_interpret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserInputError, match="Fix: Unset TRITON_INTERPRET"):
        compile_kernel(SPEC, 90)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match=r"pip install -e '\.\[tensorrt\]'"):
        compile_kernel(SPEC, 90)


def test_ptx_that_does_not_assemble_is_refused() -> None:
    from specexport.kernels.compile import assemble_ptx

    with pytest.raises(CheckFailedError, match="ptxas refuses"):
        assemble_ptx(".version 8.7\n.target sm_90a\nnonsense", 90)
