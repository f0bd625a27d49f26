"""Measuring the attention similarity of prompts while the target reads them, for drafters that choose layers by it."""

from collections.abc import Sequence as Seq

from specexport_runtime.drafters.base import Drafter, as_similarity
from specexport_runtime.executors.base import StepOutput, Want, as_gated
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.sequences.sequence import Sequence


def measured_step(
    target: ModelRunner, drafter: Drafter, prompts: Seq[Sequence], first_row: int, work: Seq[RowWork], want: Want
) -> StepOutput:
    """A step of the target; the drafter is told the similarity of prompts that it wants to know.

    Measuring costs a little in every layer, so it is off in all steps that bring no such prompt, and off again however
    the step ends.

    Args:
        target: the target.
        drafter: who may want to know.
        prompts: sequences with a chunk of their prompt in the step.
        first_row: see ``ModelRunner.step``.
        work: likewise.
        want: likewise.

    Returns:
        what ``ModelRunner.step`` does.
    """
    asks = as_similarity(drafter) if prompts else None
    wanted = [] if asks is None else [seq for seq in prompts if asks.wants_similarity(seq)]
    gated = as_gated(target.executor) if wanted else None
    if gated is None or asks is None:
        return target.step(first_row, work, want)
    gated.measure_similarity(True)
    try:
        output = target.step(first_row, work, want)
        similarity = gated.similarity
    finally:
        gated.measure_similarity(False)
    starts = [0]
    for row in work:
        starts.append(starts[-1] + len(row.tokens))
    for seq in wanted:
        begin = starts[seq.row - first_row]
        # Of a prompt that ends here and has a draft behind it, the draft tokens are no part.
        end = begin + min(len(work[seq.row - first_row].tokens), len(seq.tokens) - target.kv.kv_len(seq.row))
        asks.note_similarity(seq, similarity[:, begin:end])
    return output
