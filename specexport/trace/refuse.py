"""What cannot be traced exactly is refused here, by model type and reason, before any tracing starts."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specexport.checkpoint.lengths import (
    CHUNKED,
    INDEXED,
    find_full_attention_length,
    has_full_selection,
    list_length_rope_types,
)
from specexport.trace.outside import is_outside
from specexport.trace.quirks import can_select
from specexport_runtime.abi import LARGEST_SIZE
from specexport_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from specexport.trace.recurrence import RecurrenceCall

_KEEP_STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_TRACEABLE_LAYERS = {
    *("full_attention", "sliding_attention"),  # with a plain KV cache
    *_KEEP_STATES,  # with a state: the recurrence itself is looked for
    *("mlp", "moe", "dense", "sparse"),  # with nothing
}
_LAYER_REASONS = {
    CHUNKED: "lets a token see its own chunk only, which is neither causal nor a window",
    INDEXED: "chooses the entries that a token sees by an index of its own",
    "compressed_sparse_attention": "keeps compressed entries and chooses among them",
    "heavily_compressed_attention": "keeps compressed entries",
}
HINT = "use a decoder with causal or sliding-window attention and fixed rotary or learned positions."


def refuse(model: Any, reason: str, hint: str = HINT) -> UnsupportedModelError:
    """The error for a model that cannot be exported (returned, not raised)."""
    name = f"{getattr(model.config, 'model_type', '?')} ({type(model).__name__})"
    return UnsupportedModelError(f"{name} cannot be exported: {reason}.", hint)


def check_config(model: Any) -> None:
    """Refuse, with ``UnsupportedModelError``, what the configuration alone gives away."""
    config = model.config
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise refuse(model, "it is an encoder-decoder model")
    if turning := list_length_rope_types(model):
        reason = f"the angles of its rope type {turning[0]!r} depend on the sequence's length, and no length was chosen"
        raise refuse(model, reason, "use a checkpoint with rope type default, linear, llama3 or yarn.")
    traceable = _TRACEABLE_LAYERS | ({INDEXED} if has_full_selection(model) else set())
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - traceable)
    if odd:
        kinds = [f"{kind}, which {_LAYER_REASONS.get(kind, 'keeps no plain KV cache')}" for kind in odd]
        longest, hint = find_full_attention_length(model), HINT
        if longest is not None and not set(odd) - {CHUNKED, INDEXED}:
            hint = (
                f"texts of up to {longest} tokens are not affected: build it with `--max-model-len {longest}` or less."
            )
        raise refuse(model, f"it has layers of kind {'; '.join(kinds)}", hint)
    if _has_alibi(model, text) and not is_outside(model):
        raise refuse(model, "its ALiBi position bias does not go through the attention interface")
    if _has_alibi(model, text) and config.model_type == "falcon":
        raise refuse(
            model,
            "transformers adds its ALiBi position bias, rounded to bfloat16, twice in eager attention, otherwise once",
        )
    _check_forward(model)


def _has_alibi(model: Any, text: Any) -> bool:
    nested = getattr(text, "attn_config", None)
    by_config = getattr(text, "alibi", False) or getattr(nested, "alibi", False)
    return bool(by_config) or any(hasattr(module, "build_alibi_tensor") for module in model.modules())


def _check_forward(model: Any) -> None:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not can_select(model):
        raise refuse(model, "its forward pass takes no logits_to_keep, and it has no LM head to select logit rows at")
    if "position_ids" not in parameters and not takes_any:
        raise refuse(model, "its forward pass takes no position_ids")


def check_layers(model: Any, called: list[int], *, recurs: bool = False) -> None:
    """Refuse a model with layers whose attention was not seen; with ``recurs`` some keep a state instead."""
    text = model.config.get_text_config()
    expected = getattr(text, "decoder_layers", text.num_hidden_layers)  # BART's other number is its encoder's
    kept = sorted(_KEEP_STATES.intersection(getattr(text, "layer_types", None) or ()))
    if kept and not recurs:
        from transformers import __version__

        reason = (
            f"its layers of kind {', '.join(kept)} keep a state, and compute it in no function that is known here "
            f"(transformers is {__version__})"
        )
        raise refuse(model, reason, "install the version of transformers that specexport asks for, or report it.")
    if not recurs and len(called) < expected:
        asked = f"only {len(set(called))} of its {expected} layers call transformers' attention interface"
        raise refuse(model, f"{asked}; the others compute in code of their own, which is not known")


def check_states(model: Any, calls: "Sequence[RecurrenceCall]") -> None:
    """Refuse a model with a recurrence whose state is empty, or larger than a manifest may say."""
    for call in calls:
        sizes = {"its state": call.geometry.shape, "what a token gives to it": (call.geometry.width,)}
        for what, shape in sizes.items():
            if not all(1 <= size <= LARGEST_SIZE for size in shape):
                raise refuse(
                    model,
                    f"recurrence {call.index} ({call.kind}) has {'x'.join(map(str, shape))} for {what}, outside 1 to "
                    f"{LARGEST_SIZE} each",
                    "check the sizes of its kernels and heads in config.json.",
                )
