"""Passes over the traced model: one pass a file, each reporting how many things it changed."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.channel_ranges import ChannelRanges
    from specexport.passes.base import CountingPass
    from specexport.passes.block_weight import BlockWeight
    from specexport.passes.low_rank import Adapter
    from specexport_runtime.executors.base import Int32Array

__all__ = ["default_passes", "run_passes"]


class PassRecipe(Protocol):
    """What the passes need to know of a recipe."""

    @property
    def dtype(self) -> str:
        """Numpy name of the dtype of weights, activations and caches."""
        ...


def default_passes(
    recipe: PassRecipe,
    *,
    pack: bool = False,
    quantize: str | None = None,
    quantize_lm_head: bool = True,
    quantize_operator: str = "",
    quantize_block: int = 0,
    head_ids: "Int32Array | None" = None,
    ranges: "Mapping[str, ChannelRanges] | None" = None,
    kept: "Mapping[str, BlockWeight] | None" = None,
    adapters: "Seq[Adapter]" = (),
    own_operators: bool = False,
) -> "list[CountingPass]":
    """The passes of one model's build, in order, each with its reason; see ``pipeline.list_passes``."""
    from specexport.passes.pipeline import list_passes

    return list_passes(
        recipe.dtype,
        pack=pack,
        quantize=quantize,
        quantize_lm_head=quantize_lm_head,
        quantize_operator=quantize_operator,
        quantize_block=quantize_block,
        head_ids=head_ids,
        ranges=ranges,
        kept=kept,
        adapters=adapters,
        own_operators=own_operators,
    )


def run_passes(
    ir_model: "ir.Model",
    passes: "Seq[CountingPass]",
    *,
    dump_dir: Path | None = None,
    on_pass: Callable[[str], Any] | None = None,
) -> tuple[tuple[str, int], ...]:
    """Run ``passes`` in order on ``ir_model``, in place, checking the contract before the first and after each.

    Args:
        ir_model: the traced model.
        passes: from ``default_passes``.
        dump_dir: write the graph after each pass here as ``NN-name.onnx`` (without weights) and ``NN-name.txt``.
        on_pass: called with each pass's name when it is done.

    Returns:
        (name, number of changes) of each pass.

    Raises:
        CheckFailedError: the contract does not hold; the message names the pass after which it broke.
    """
    from specexport.passes.pipeline import run_list

    return run_list(ir_model, passes, dump_dir=dump_dir, on_pass=on_pass)
