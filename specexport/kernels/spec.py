"""One kernel for one model: everything it is compiled for, its constants and its grid. Standard library only."""

from dataclasses import dataclass, replace

from specexport.kernels.signatures import MODEL_DTYPES, SIGNATURES, Signature
from specexport.kernels.tuning import (
    MAX_SPLITS,
    MULTIPROCESSORS,
    TileConfig,
    append_tiles,
    attention_tiles,
    choose_splits,
    combine_tiles,
    next_power_of_two,
)
from specexport_runtime.errors import UserInputError

MAX_HEAD_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What a kernel is compiled for; UserInputError for head counts, sizes or splits that kernels do not take."""

    kernel: str  # ``"kv_append"``, ``"ragged_attention"`` or ``"combine_splits"``
    dtype: str  # element type of the model, ``"float16"`` or ``"bfloat16"``
    num_heads: int  # query heads Hq
    kv_num_heads: int  # key and value heads H; query head ``h`` reads head ``h // (Hq / H)``
    head_size: int  # size of a query and of a key head D, at most 256
    v_head_size: int = 0  # size of a value head Dv, at most 256; 0 for the same as ``head_size``
    scale: float = 1.0  # factor on every score
    window: int = -1  # entries a token sees, its own included; -1 for all
    softcap: float = 0.0  # scores become ``softcap * tanh(score / softcap)``; 0 for off
    # there is a ``tree_mask``: an int64 for each token whose bit ``i`` says that token ``i`` of the row's step is an
    # ancestor of it, or itself (0: causal); parents come before children, a row has at most 64 nodes
    tree: bool = False
    sinks: bool = False  # one more score a head, that takes weight and gives nothing
    # parts the entries are split into; above 1 the result is partial and ``combine_splits`` follows
    num_splits: int = 1
    new_tokens: int = 1  # most new tokens of a row, to choose tiles by; rows may have more

    def __post_init__(self) -> None:
        _ = SIGNATURES[self.kernel], MODEL_DTYPES[self.dtype]
        if not self.v_head_size:
            object.__setattr__(self, "v_head_size", self.head_size)
        if self.kv_num_heads < 1 or self.num_heads % self.kv_num_heads:
            raise UserInputError(
                f"{self.num_heads} query heads cannot share {self.kv_num_heads} KV heads.",
                hint="The number of query heads must be a multiple of the number of KV heads.",
            )
        for size in (self.head_size, self.v_head_size):
            if not 1 <= size <= MAX_HEAD_SIZE:
                raise UserInputError(f"Head size {size} is not supported.", hint=f"Use 1 to {MAX_HEAD_SIZE}.")
        if not 1 <= self.num_splits <= MAX_SPLITS:
            raise UserInputError(f"{self.num_splits} splits are not supported.", hint=f"Use 1 to {MAX_SPLITS}.")
        if self.window == 0 or self.window < -1:
            raise UserInputError(f"A window of {self.window} is no window.", hint="Use -1 for none, or at least 1.")

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.kv_num_heads

    @property
    def signature(self) -> Signature:
        """Run-time arguments of this very kernel, in order: optional tensors are there or not."""
        facts = {"tree"} if self.tree else set()
        facts |= {"sinks"} if self.sinks else set()
        facts |= {"one_split" if self.num_splits == 1 else "many_splits"}
        return SIGNATURES[self.kernel].select(frozenset(facts))

    def tiles(self, sm: int, *, small: bool = False) -> TileConfig:
        """Tile sizes for an architecture such as 90; ``small`` ones use at most 48 KiB of shared memory."""
        size = max(self.head_size, self.v_head_size)
        if self.kernel == "ragged_attention":
            return attention_tiles(sm, size, self.new_tokens * self.group, small=small)
        return append_tiles(size) if self.kernel == "kv_append" else combine_tiles()

    def with_splits(self, sm: int, *, num_seqs: int, kv_len: int, multiprocessors: int = 0) -> "KernelSpec":
        """This kernel with as many splits as fill the GPU in a step of ``num_seqs`` rows of ``new_tokens`` each."""
        tiles = replace(self, kernel="ragged_attention").tiles(sm)
        programs = num_seqs * self.kv_num_heads * -(-self.new_tokens * self.group // tiles.block_m)
        seen = min(kv_len, self.window + self.new_tokens) if self.window > 0 else kv_len
        splits = choose_splits(programs, seen, tiles.block_n, multiprocessors or MULTIPROCESSORS[sm])
        return replace(self, num_splits=splits)

    def constants(self, tiles: TileConfig) -> dict[str, int | float]:
        """Compile-time parameters by name, in the signature's order."""
        values: dict[str, int | float] = {
            "HEADS": self.num_heads,
            "KV_HEADS": self.kv_num_heads,
            "GROUP": self.group,
            "D": self.head_size,
            "DV": self.v_head_size,
            "BLOCK_D": max(next_power_of_two(self.head_size), 16),  # a matrix product takes at least 16
            "BLOCK_DV": max(next_power_of_two(self.v_head_size), 16),
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_T": tiles.block_m,
            "BLOCK_S": next_power_of_two(self.num_splits),
            "NUM_SPLITS": self.num_splits,
            "SCALE": float(self.scale),
            "WINDOW": self.window,
            "SOFTCAP": float(self.softcap),
        }
        return {name: values[name] for name in self.signature.constants}

    def grid(self, tiles: TileConfig, num_tokens: int, num_seqs: int) -> tuple[int, int, int]:
        """Programs in x, y and z, by ``+ - * //`` alone, for symbolic sizes; padding tokens count as one more row."""
        if self.kernel == "kv_append":
            return (num_tokens + tiles.block_m - 1) // tiles.block_m, self.kv_num_heads, 1
        if self.kernel == "combine_splits":
            return num_tokens, self.num_heads, 1
        return num_tokens * self.group // tiles.block_m + num_seqs + 1, self.kv_num_heads, self.num_splits
