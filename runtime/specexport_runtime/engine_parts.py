"""What an engine is put together from: its drafters, and what they can do."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specexport_runtime.batch import ModelRunner
from specexport_runtime.decoder import Decoder
from specexport_runtime.draft_length import DraftLength
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import as_gated
from specexport_runtime.manifest import ModelEntry
from specexport_runtime.requests import Obstacle
from specexport_runtime.trace import RoundTracer

if TYPE_CHECKING:
    from specexport_runtime.cost_curves import CostCurves
    from specexport_runtime.tune_profile import TuneProfile

MAX_BACKLOG = 32  # tokens that a draft model catches up on within a drafting step: several copied drafts in a row


def make_drafters(
    target: ModelRunner, draft: ModelRunner | None, *, vocab_size: int, match_length: int
) -> dict[str, Drafter]:
    """Every drafter that an engine has, by the names that draft plans use, cheap ones first.

    Args:
        target: the target; one with gates can draft with its own layers.
        draft: the draft model, if there is one.
        vocab_size: ids below it may be drafted.
        match_length: fewest tokens that lookup must match.
    """
    drafters: dict[str, Drafter] = {"lookup": LookupDrafter(match_length=match_length)}
    if draft is not None:
        drafters["draft-model"] = ModelDrafter(draft, vocab_size=vocab_size, max_backlog=MAX_BACKLOG)
    if as_gated(target.executor) is not None and target.unpad_kv and target.unpad_input:
        drafters["self"] = SelfDrafter(target, vocab_size=vocab_size)
    return drafters


def make_decoder(
    target: ModelRunner,
    drafters: Mapping[str, Drafter],
    curves: "CostCurves | None",
    profile: "TuneProfile | None",
    lookahead: int,
    max_num_batched_tokens: int,
) -> Decoder:
    """The decoder of an engine.

    Args:
        target: the target.
        drafters: see :func:`make_drafters`.
        curves: what steps cost, to choose K by; None for no choice.
        profile: bounds the K that is chosen.
        lookahead: largest K.
        max_num_batched_tokens: most tokens of one step.
    """
    lengths: DraftLength | None = None
    if curves is not None:
        from specexport_runtime.goodput import GoodputLength

        lengths = GoodputLength(curves, lookahead, profile)
    return Decoder(
        target,
        ChainDrafter(drafters, lengths),
        max_num_batched_tokens=max_num_batched_tokens,
        lengths=lengths,
        tracer=RoundTracer(curves),
    )


def check_empty(decoder: Decoder, draft: ModelRunner | None) -> None:
    """Assert that nothing of any request is left in an engine.

    Args:
        decoder: its decoder.
        draft: its draft model, if there is one.

    Raises:
        SpecexportError: something is.
    """
    decoder.check()
    if decoder.has_work:
        raise SpecexportError(f"nothing was asked for, and there is {decoder.load}.")
    if draft is not None:
        draft.kv.check()
        if draft.kv.num_committed:
            raise SpecexportError(f"{draft.kv.num_committed} cache entries of the draft model were left behind.")


def self_draft_obstacle(target: ModelRunner, entry: ModelEntry | None = None) -> Obstacle | None:
    """Why a target cannot draft with its own layers; None if it can.

    Args:
        target: the target.
        entry: what the manifest says of it, if it comes from a bundle.
    """
    if not (target.unpad_kv and target.unpad_input):
        return Obstacle("drafter 'self' needs unpadded KV and unpadded input.", "leave unpad_kv and unpad_input on.")
    if as_gated(target.executor) is not None:
        return None
    if entry is None:
        return Obstacle("drafter 'self' needs a target whose layers can be switched off.", "use another drafter.")
    if entry.gate_obstacle is not None:
        return Obstacle(
            f"drafter 'self': layers of this target ({entry.architecture}) cannot be skipped exactly: "
            f"{entry.gate_obstacle.rstrip('.')}.",
            "use drafter 'lookup', or build with --draft.",
        )
    if entry.backend != "ort-cpu":
        return Obstacle(
            f"drafter 'self' needs backend ort-cpu; this target was built for {entry.backend}.",
            "build it with --backend ort-cpu.",
        )
    return Obstacle(
        "drafter 'self': this bundle was built before targets could draft with their own layers.", "build it again."
    )
