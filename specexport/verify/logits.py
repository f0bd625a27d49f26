"""Parts ``tensors`` and ``neighbours``: the logits of an engine in every step shape that a decoding round can have.

``tensors`` holds them against eager transformers::

    prefill   one row, the whole sequence, in chunks
    width w   one row, w new tokens on a past, for w = 1 … K+1, each after a rollback of the one before
    ragged    several rows of unequal pasts and unequal new tokens (some none), with rejected tokens left in the cache

``neighbours`` holds them against those of the same tokens one at a time, nothing else in the step. Verifying K+1 tokens
in one step is lossless only if each gets the logits that it would get alone. Quantization can break that: one
activation scale for a whole step (``quantize_dynamic``) lets a large value anywhere coarsen every other token::

    2 … K+1         so many at a time, beside their own successors
    after pieces   K+1 at a time, where what is before them was read in other pieces
    beside others   one at a time, and K+1 at a time, with other sequences in the step

The references come from the caller, so this module imports neither torch nor transformers.
"""

from collections.abc import Sequence

import numpy as np

from specexport.compare import OutputResult, OutputRun, Reference, Rows, compare_case, join_cases
from specexport.rounding import LogitTolerance, logit_tolerance
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.base import MAX_CHUNK, Executor, Float32Array
from specexport_runtime.packing.batch import RowWork

LONGEST_SEQUENCE = 600
"""Most tokens of a sequence of :func:`make_sequences`."""

_MIN_TOKENS = 3  # of a sequence: one before, and two that are neighbours
_MAX_RAGGED_STEPS = 12
_NUM_ROWS = 4
_REFERENCE_BYTES = 256 * 2**20
_MAX_PAST = 506  # the neighbours then lie on both sides of entry 512, where attention of long rows is cut in parts
_MAX_NEIGHBOURS = 12
_PIECE = 7  # divides no size that a kernel works in


def make_sequences(
    texts: Sequence[Sequence[int]], vocab_size: int, *, lookahead: int, max_model_len: int, num_rows: int = _NUM_ROWS
) -> list[list[int]]:
    """Token sequences for the check: real ``texts``, and one of random ids so that rare embeddings are seen too.

    Ids from ``vocab_size`` on are left out. The first of ``num_rows`` has several hundred entries where V allows it.
    """
    pool = [token for text in texts for token in text if token < vocab_size] or [0]
    random = np.random.default_rng(7).integers(0, vocab_size, max_model_len).tolist()
    short = min(4 * (lookahead + 1), max_model_len)
    # References are [len, V] float32; a vocabulary of 262,144 leaves room for fewer tokens.
    budget = _REFERENCE_BYTES // (4 * vocab_size)
    long = max(short, min(LONGEST_SEQUENCE, max_model_len, budget - (num_rows - 1) * short))
    sequences = []
    for row in range(num_rows):
        length = long if row == 0 else max(_MIN_TOKENS, short - 3 * row)
        own = random if row == 1 else [pool[(17 * row + i) % len(pool)] for i in range(length)]
        sequences.append(own[:length])
    return sequences


def check_tensors(
    role: str,  # ``"target"`` or ``"draft"``, for the report
    executor: Executor,
    # token ids, one for each cache row used; none longer than a cache row less K+1 entries
    sequences: Sequence[Sequence[int]],
    references: Sequence[Float32Array],  # logits [len, V] of each sequence
    *,
    lookahead: int,  # K; widths 1 … K+1 are checked
    dtype: str = "float32",  # of the engine; decides the tolerance together with ``num_layers``
    num_layers: int = 1,  # L, attention layers of the model
) -> OutputResult:
    """Compare an engine, which nothing else may use, with reference logits; IncompatibleError for other dtypes."""
    tolerance, reference, cases = logit_tolerance(dtype, num_layers), Reference.of_texts(references), []
    for script in (_run_prefill, _run_widths, *([_run_ragged] if len(sequences) > 1 else [])):
        run = OutputRun(executor, sequences)  # one at a time: logits of large vocabularies are large
        script(run, lookahead)
        cases += [compare_case(name, rows, reference, tolerance) for name, rows in run.cases.items()]
    compared = (
        f"all logits of {{rows}} rows: prefill of {len(sequences[0])} tokens, steps of 1 to {lookahead + 1} tokens, "
        f"ragged steps of {len(sequences)} sequences, each after rollbacks"
    )
    return join_cases(role, cases, tolerance, compared)


def _run_prefill(run: OutputRun, lookahead: int) -> None:
    # An engine with profiles computes the logits that verifying needs, and no more a step.
    size = run.runner.max_chunk if run.runner.executor.max_num_tokens is None else lookahead + 1
    while left := len(run.texts[0]) - run.past():
        run.step("prefill", [min(size, left)])


def _run_widths(run: OutputRun, lookahead: int) -> None:
    length = len(run.texts[0])
    # Widths are tried on a short past and on the longest one, whose cache entries span many blocks.
    for first_past in dict.fromkeys((3, max(0, length - 2 * (lookahead + 1)))):
        run.runner.kv.release(0)
        for width in range(1, min(lookahead + 1, length) + 1):
            run.go_to(0, min(first_past + width - 1, length - width))
            # Nothing of it is committed: the next width overwrites these entries.
            run.step(f"width {width}", [width], kept=[0], drafts=True)


def _run_ragged(run: OutputRun, lookahead: int) -> None:
    """Rounds as decoding makes them: every row takes its own number of tokens and keeps its own number of them."""
    random, width = np.random.default_rng(11), lookahead + 1
    for row, text in enumerate(run.texts):
        run.go_to(row, min(len(text) // 2, max(0, len(text) - 2 * width)))
    for _ in range(_MAX_RAGGED_STEPS):
        most = [min(width, len(text) - run.past(row)) for row, text in enumerate(run.texts)]
        if not any(most):
            break
        # Wrong tokens first, as a rejected draft leaves them: never committed, so they must not be seen.
        wrong = [random.integers(0, run.runner.executor.vocab_size, limit).tolist() for limit in most]
        run.runner.step(0, [RowWork(tokens, min(len(tokens), 1), drafts=len(tokens)) for tokens in wrong])
        counts = [int(random.integers(0, limit + 1)) for limit in most]
        counts = counts if any(counts) else most
        kept = [int(random.integers(0, count + 1)) for count in counts]
        run.step("ragged", counts, kept=kept, drafts=True)


def check_neighbours(
    role: str,  # ``"target"`` or ``"draft"``, for the report
    executor: Executor,
    # token ids: the subject and its company, none longer than a cache row less K+1 entries
    sequences: Sequence[Sequence[int]],
    *,
    lookahead: int,  # K
    tolerance: float = 0.0,  # see ``tolerance.step_tolerance``
) -> OutputResult:
    """Step the end of ``sequences[0]`` alone and in company, and compare the logits; the engine must be idle."""
    if not sequences or min(map(len, sequences)) < _MIN_TOKENS:
        raise InvalidRequestError(
            f"the neighbours part needs sequences of {_MIN_TOKENS} tokens or more.", "give longer prompts."
        )
    subject, company = sequences[0], sequences[1 : min(_NUM_ROWS, executor.num_rows)]
    past = min(_MAX_PAST, max(len(subject) // 2, len(subject) - _MAX_NEIGHBOURS))
    end = min(past + _MAX_NEIGHBOURS, len(subject))

    def run(width: int, others: Sequence[Sequence[int]] = (), piece: int = MAX_CHUNK) -> Rows:
        """Logits of the subject's tokens, ``width`` a step, each of ``others`` taking as many in its row."""
        run = OutputRun(executor, [subject[:end], *others], max_chunk=piece)
        run.go_to(0, past)
        for row, text in enumerate(others, start=1):
            # The first companion stays at its first token, where activations are largest in most models.
            run.go_to(row, 0 if row == 1 else min(past, len(text) // 2))
        beside = [min(width, len(text) - run.past(row)) for row, text in enumerate(others, start=1)]
        while left := end - run.past():
            # Nothing of the companions is committed: they take the same tokens again in each step.
            own, none = min(width, left), [0] * len(others)
            wanted, drafts = [own, *[1] * len(others)], [False, *[True] * len(others)]
            run.step("", [own, *beside], kept=[own, *none], wanted=wanted, drafts=drafts)
        return run.cases[""]

    width = min(lookahead + 1, end - past)
    reference = Reference.of(run(1))
    runs = {f"{count} at a time": run(count) for count in range(2, width + 1)}
    runs[f"{width} at a time after pieces of {_PIECE}"] = run(width, piece=_PIECE)
    if company:
        others = f"beside {len(company)} other rows"
        runs |= {f"1 at a time {others}": run(1, company), f"{width} at a time {others}": run(width, company)}
    allowed = LogitTolerance(tolerance, tolerance)
    cases = [compare_case(name, rows, reference, allowed) for name, rows in runs.items()]
    compared = f"{end - past} tokens after {past}, each against the same token alone in a step"
    return join_cases(role, cases, allowed, compared)
