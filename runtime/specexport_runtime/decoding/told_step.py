"""A step of the target, and what drafters are told of it besides its logits: similarities, and features."""

from collections.abc import Sequence as Seq

from specexport_runtime.drafters.base import Drafter, as_feature_drafter, as_similarity
from specexport_runtime.executors.base import StepOutput, Want, as_featured, as_gated
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.sequences.sequence import Sequence


def told_step(
    target: ModelRunner,
    drafter: Drafter,
    sequences: Seq[Sequence],  # all that have tokens in the step
    prompts: Seq[Sequence],  # of these, all with a chunk of their prompt
    first_row: int,
    work: Seq[RowWork],
    want: Want,
) -> StepOutput:
    """A step of the target, as ``ModelRunner.step`` has it; the drafter is told what it wants to know of it.

    Similarities of prompts and features of all that is read cost a little, so both are off in all steps that bring
    nothing that is wanted, and off again however the step ends.
    """
    asks, reads = as_similarity(drafter) if prompts else None, as_feature_drafter(drafter)
    measured = [] if asks is None else [seq for seq in prompts if asks.wants_similarity(seq)]
    gated = as_gated(target.executor) if measured else None
    featured = as_featured(target.executor) if reads is not None else None
    read = [] if featured is None or reads is None else [seq for seq in sequences if reads.wants_features(seq)]
    if gated is None and not read:
        return target.step(first_row, work, want)
    try:
        if gated is not None:
            gated.measure_similarity(True)
        if featured is not None:
            featured.want_features(bool(read))
        output = target.step(first_row, work, want)
        similarity = None if gated is None else gated.similarity
    finally:
        if gated is not None:
            gated.measure_similarity(False)
        if featured is not None:
            featured.want_features(False)
    starts = [0]
    for row in work:
        starts.append(starts[-1] + len(row.tokens))
    if asks is not None and similarity is not None:
        for seq in measured:
            begin = starts[seq.row - first_row]
            # Of a prompt that ends here and has a draft behind it, the draft tokens are no part.
            end = begin + min(len(work[seq.row - first_row].tokens), len(seq.tokens) - target.kv.kv_len(seq.row))
            asks.note_similarity(seq, similarity[:, begin:end])
    if reads is not None and featured is not None and read:
        features = featured.features
        for seq in read:
            begin, end = starts[seq.row - first_row : seq.row - first_row + 2]
            reads.note_features(seq, target.kv.kv_len(seq.row), features[begin:end])
    return output
