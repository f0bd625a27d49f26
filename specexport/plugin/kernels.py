"""The compiled kernels behind a plugin: one for each tactic. Needs Triton and no GPU."""

from dataclasses import dataclass
from functools import cache

from specexport.kernels.compile import CompiledKernel, compile_kernel
from specexport.kernels.spec import KernelSpec
from specexport.kernels.tuning import TileConfig, attention_tiles

MOST_SHARED_BYTES = 48 * 1024
"""Shared memory that every launcher gives a kernel. Whether TensorRT opts in to more is not documented."""

_QUERIES = (16, 32, 64, 128)  # a tile holds tokens times the query heads that share a KV head
_COMPILED_AS = {86: 80, 87: 80}  # PTX for 8.0 runs on all 8.x; no newer one is known to be as portable
DEFAULT_TACTIC = 0  # TensorRT's number for "there is one way only"; custom ones are positive


@dataclass(frozen=True)
class PluginKernels:
    """What one plugin embeds."""

    spec: KernelSpec
    by_tactic: dict[int, CompiledKernel]  # by TensorRT's tactic number; that of attention is the queries of a tile

    @property
    def tactics(self) -> list[int]:
        """Custom tactics, in ascending order; empty where there is one kernel only."""
        return sorted(tactic for tactic in self.by_tactic if tactic != DEFAULT_TACTIC)

    def tactic_for(self, num_tokens: int, num_seqs: int) -> int:
        """The tactic for a profile's optimum of T tokens and B rows: the smallest tile that holds a row's queries."""
        queries = -(-num_tokens // max(num_seqs, 1)) * self.spec.group
        tactics = self.tactics or [DEFAULT_TACTIC]
        return next((tactic for tactic in tactics if tactic >= queries), tactics[-1])


def tile_options(spec: KernelSpec, sm: int) -> dict[int, TileConfig]:
    """Tile sizes by tactic number, all within ``MOST_SHARED_BYTES``; UserInputError for an unknown ``sm``."""
    if spec.kernel != "ragged_attention":
        return {DEFAULT_TACTIC: spec.tiles(sm, small=True)}
    size = max(spec.head_size, spec.v_head_size)
    options = {tiles.block_m: tiles for tiles in (attention_tiles(sm, size, n, small=True) for n in _QUERIES)}
    return options if len(options) > 1 else {DEFAULT_TACTIC: next(iter(options.values()))}


def kernel_architecture(sm: int) -> int:
    """The architecture that kernels for ``sm`` are compiled for: itself, or an older one whose PTX it runs."""
    return _COMPILED_AS.get(sm, sm)


@cache
def compile_plugin(spec: KernelSpec, sm: int) -> PluginKernels:
    """Compile every kernel of a plugin for an architecture: 80, 89, 90, 100 or 120.

    UserInputError for an unknown ``sm``, or if Triton was told to interpret; MissingDependencyError without Triton;
    CheckFailedError if a kernel cannot be embedded.
    """
    options = tile_options(spec, sm)
    return PluginKernels(spec, {tactic: compile_kernel(spec, sm, tiles=tiles) for tactic, tiles in options.items()})
