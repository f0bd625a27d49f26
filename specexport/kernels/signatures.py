"""What each kernel takes, in order. Launchers, plugin definitions and the PTX check all derive from this table.

The order is TensorRT's for an embedded kernel: inputs, then int32 scalars of input shapes, then outputs.
"""

from typing import NamedTuple

MODEL_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
"""Triton's names of the element types a kernel may be compiled for; any other type is a ``KeyError``."""

_FIXED_DTYPES = {"float32": "fp32", "int32": "i32", "int64": "i64"}


class TensorArgument(NamedTuple):
    """A pointer argument."""

    name: str  # of the parameter in the kernel
    dtype: str  # ``"model"`` or a numpy dtype name
    # dimension words: T num_tokens, B num_seqs, L kv_capacity, Hq and H query and KV heads, D and Dv sizes of a key and
    # of a value head, S splits
    shape: tuple[str | int, ...]
    # fact of the spec that it depends on: "tree", "sinks", "one_split" or "many_splits"; empty: always there
    only_if: str = ""
    aliases: str = ""  # input whose memory this output is; empty for an ordinary output


class IntArgument(NamedTuple):
    """An int32 argument: size of axis ``axis`` of the input ``source``."""

    name: str
    source: str
    axis: int


class Signature(NamedTuple):
    """Arguments of one kernel: inputs, ints, outputs; ``constants`` are the compile-time parameters after them."""

    kernel: str
    inputs: tuple[TensorArgument, ...]
    ints: tuple[IntArgument, ...]
    outputs: tuple[TensorArgument, ...]
    constants: tuple[str, ...]

    def select(self, facts: frozenset[str]) -> "Signature":
        """This signature without the optional tensors whose condition is not among ``facts``."""
        inputs, outputs = (
            tuple(tensor for tensor in tensors if not tensor.only_if or tensor.only_if in facts)
            for tensors in (self.inputs, self.outputs)
        )
        return self._replace(inputs=inputs, outputs=outputs)

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the run-time arguments in the order they are passed."""
        inputs, outputs = (tuple(item.name for item in tensors) for tensors in (self.inputs, self.outputs))
        return (*inputs, *(item.name for item in self.ints), *outputs)

    def triton_types(self, dtype: str) -> dict[str, str]:
        """Triton's type of each run-time argument, in order; KeyError for a ``dtype`` not in ``MODEL_DTYPES``."""
        dtypes = _FIXED_DTYPES | {"model": MODEL_DTYPES[dtype]}
        types = {tensor.name: f"*{dtypes[tensor.dtype]}" for tensor in (*self.inputs, *self.outputs)}
        types |= {scalar.name: "i32" for scalar in self.ints}
        return {name: types[name] for name in self.argument_names}

    def ptx_types(self) -> tuple[str, ...]:
        """PTX type of each run-time argument, in order: ``u64`` for a pointer, ``u32`` for an int32."""
        return ("u64",) * len(self.inputs) + ("u32",) * len(self.ints) + ("u64",) * len(self.outputs)


_K_CACHE = TensorArgument("k_cache", "model", ("B", 1, "H", "L", "D"))
_V_CACHE = TensorArgument("v_cache", "model", ("B", 1, "H", "L", "Dv"))
_ROWS = (TensorArgument("kv_lens", "int32", ("B", 1)), TensorArgument("cu_new_tokens", "int32", ("B+1",)))
_SIZES = (IntArgument("num_seqs", "kv_lens", 0), IntArgument("kv_capacity", "k_cache", 3))
_PARTIAL_ACC = TensorArgument("partial_acc", "float32", ("S", "T", "Hq", "Dv"), only_if="many_splits")
_PARTIAL_STATS = TensorArgument("partial_stats", "float32", ("S", "T", "Hq", 2), only_if="many_splits")
_OUTPUT = TensorArgument("output", "model", ("T", "Hq*Dv"))

KV_APPEND = Signature(
    kernel="kv_append",
    inputs=(
        TensorArgument("k", "model", ("T", "H*D")),
        TensorArgument("v", "model", ("T", "H*Dv")),
        _K_CACHE,
        _V_CACHE,
        *_ROWS,
    ),
    ints=(IntArgument("num_tokens", "k", 0), *_SIZES),
    outputs=(
        TensorArgument("k_cache_out", "model", _K_CACHE.shape, aliases="k_cache"),
        TensorArgument("v_cache_out", "model", _V_CACHE.shape, aliases="v_cache"),
    ),
    constants=("KV_HEADS", "D", "DV", "BLOCK_D", "BLOCK_DV", "BLOCK_T"),
)

RAGGED_ATTENTION = Signature(
    kernel="ragged_attention",
    inputs=(
        TensorArgument("q", "model", ("T", "Hq*D")),
        _K_CACHE,
        _V_CACHE,
        *_ROWS,
        TensorArgument("tree_mask", "int64", ("T",), only_if="tree"),
        TensorArgument("sinks", "model", ("Hq",), only_if="sinks"),
    ),
    ints=(IntArgument("num_tokens", "q", 0), *_SIZES),
    outputs=(_OUTPUT._replace(only_if="one_split"), _PARTIAL_ACC, _PARTIAL_STATS),
    constants=(
        "KV_HEADS", "GROUP", "D", "DV", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N", "NUM_SPLITS",
        "SCALE", "WINDOW", "SOFTCAP",
    ),
)  # fmt: skip

COMBINE_SPLITS = Signature(
    kernel="combine_splits",
    inputs=(_PARTIAL_ACC._replace(only_if=""), _PARTIAL_STATS._replace(only_if="")),
    ints=(IntArgument("num_tokens", "partial_acc", 1),),
    outputs=(_OUTPUT,),
    constants=("HEADS", "DV", "BLOCK_DV", "NUM_SPLITS", "BLOCK_S"),
)

SIGNATURES = {signature.kernel: signature for signature in (KV_APPEND, RAGGED_ATTENTION, COMBINE_SPLITS)}
"""Every kernel's signature by kernel name."""
