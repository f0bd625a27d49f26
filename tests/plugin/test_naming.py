"""Names of plugins and back."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import MAX_SPLITS
from specexport.plugin.naming import plugin_name, plugin_spec
from specexport_runtime.errors import CheckFailedError

SPEC = KernelSpec(kernel="ragged_attention", dtype="bfloat16", num_heads=32, kv_num_heads=8, head_size=128)
FLOATS = st.floats(min_value=0, max_value=1e4, width=32)


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    group, heads = draw(st.integers(1, 16)), draw(st.integers(1, 64))
    return KernelSpec(
        kernel=draw(st.sampled_from(["kv_append", "ragged_attention", "combine_splits"])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])), num_heads=heads * group, kv_num_heads=heads,
        head_size=draw(st.integers(1, 256)), v_head_size=draw(st.integers(0, 256)), scale=draw(FLOATS),
        window=draw(st.one_of(st.just(-1), st.integers(1, 10**6))), softcap=draw(FLOATS), tree=draw(st.booleans()),
        sinks=draw(st.booleans()), num_splits=draw(st.integers(1, MAX_SPLITS)),
    )  # fmt: skip


@given(specs())
def test_a_name_holds_all_that_is_compiled_in(spec: KernelSpec) -> None:
    name = plugin_name(spec)
    assert plugin_spec(name) == spec
    assert len(name) < 100
    assert name.replace("_", "").isalnum()  # TensorRT allows no point


@given(specs(), specs())
def test_two_kernels_have_two_names(one: KernelSpec, other: KernelSpec) -> None:
    assert (one == other) == (plugin_name(one) == plugin_name(other))


def test_factors_are_those_of_the_graph() -> None:
    """A graph holds float32."""
    scale = plugin_spec(plugin_name(KernelSpec(**{**SPEC.__dict__, "scale": 96**-0.5}))).scale
    assert scale == struct.unpack("f", struct.pack("f", 96**-0.5))[0] != 96**-0.5


@pytest.mark.parametrize(
    "name",
    [
        "ragged_attention", "ragged_attention_float32_q4_h2_d16", "paged_attention_float16_q4_h2_d16",
        "ragged_attention_float16_q4_h2_d16_", "ragged_attention_float16_q4_h2_d1.5",
        "ragged_attention_float16_z4_h2_d16", "ragged_attention_float16_q4_h2_d16_sinks_n2",
    ],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(CheckFailedError, match="plugin"):
        plugin_spec(name)
