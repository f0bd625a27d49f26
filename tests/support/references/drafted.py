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
    check_drafts_of(engine, wanted, lookahead, load_manifest(bundle).vocabulary.size)
    engine.close()


def check_drafts_of(
    engine: SpecEngine,
    wanted: Callable[[list[int], int, int], list[int]],
    lookahead: int,
    limit: int,
    *,
    tokens: int = 14,
    least: int = 60,
) -> None:
    """The same of an engine that is open.

    Args:
        engine: with a head, for three sequences.
        wanted: see :func:`check_drafts`.
        lookahead: K.
        limit: ids below it may be drafted.
        tokens: of each text.
        least: draft tokens that are compared, at least.
    """
    found = drafted_and_wanted(engine, wanted, lookahead, limit, tokens=tokens)
    for drafted, expected in found:
        assert drafted == expected
    assert sum(len(drafted) for drafted, _ in found) > least


def drafted_and_wanted(
    engine: SpecEngine,
    wanted: Callable[[list[int], int, int], list[int]],
    lookahead: int,
    limit: int,
    *,
    tokens: int = 14,
) -> list[tuple[list[int], list[int]]]:
    """Each greedy draft of ragged batches, and the one that was wanted; the text is plain decoding's.

    See :func:`check_drafts_of` for the arguments.
    """
    rounds: list[tuple[list[int], list[int]]] = []

    class Watch:
        def on_round(self, record: Any) -> None:
            for event in record.events:
                before = event.request.tokens[: len(event.request.tokens) - len(event.tokens)]
                rounds.append((before, list(event.proposal.tokens)))

        def on_finish(self, _: Any) -> None: ...

    engine.add_observer(Watch())
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    plain = [list(result.token_ids) for result in engine.generate(PROMPTS, params, drafter="none")]
    rounds.clear()
    found = engine.generate(PROMPTS, params, drafter="head", num_speculative_tokens=lookahead)
    assert [list(result.token_ids) for result in found] == plain
    engine.check()
    return [(drafted, wanted(before, len(drafted), limit)) for before, drafted in rounds if drafted]
