"""What a bundle with a head drafts, against what it should."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest

PROMPTS = [[5, 9, 200, 17, 8], [3, 77], [250] * 4 + [12, 13, 14, 15, 16], [9, 8, 7]]


def check_drafts(
    bundle: Path, wanted: Callable[[list[int], int, int], list[int]], lookahead: int = 3, **options: Any
) -> None:
    """Every greedy draft of ragged batches is the wanted one, and the text is plain decoding's.

    Args:
        bundle: with a head.
        wanted: gives the draft behind some tokens, of a length, whose ids are below a limit.
        lookahead: K.
        options: of the engine.
    """
    engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False, max_num_seqs=3, **options)
    rounds: list[tuple[list[int], list[int]]] = []

    class Watch:
        def on_round(self, record: Any) -> None:
            for event in record.events:
                before = event.sequence.tokens[: len(event.sequence.tokens) - len(event.tokens)]
                rounds.append((before, list(event.proposal.tokens)))

        def on_finish(self, _: Any) -> None: ...

    engine.add_observer(Watch())
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    plain = [list(result.token_ids) for result in engine.generate(PROMPTS, params, drafter="none")]
    rounds.clear()
    found = engine.generate(PROMPTS, params, drafter="head", num_speculative_tokens=lookahead)
    assert [list(result.token_ids) for result in found] == plain
    compared, limit = 0, load_manifest(bundle).vocabulary.size
    for before, drafted in rounds:
        if drafted:
            assert drafted == wanted(before, len(drafted), limit), before
            compared += len(drafted)
    assert compared > 60
    engine.check()
    engine.close()
