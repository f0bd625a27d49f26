"""How long a model's texts may be, and what of it depends on that: held at the longest text that a bundle can have.

transformers chooses the frequencies of ``longrope`` (Ding et al. 2024) and ``dynamic`` anew in each call, by its
largest position: keys in a cache would belong to other angles. A bundle has the table of a text of ``max_model_len``
tokens.

Layers that attend in chunks (Llama 4) or choose entries by an index (DeepSeek-V3.2) see all of a text that is short
enough. Then they are plain, exactly, and the model is made to say so.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.checkpoint.loaded import Checkpoint, FixedRope
from specexport_runtime.errors import UnsupportedModelError

_BY_IDS = "create_position_ids_from_input_ids"


def first_position(module: Any) -> int | None:
    """Number that a module's embedding gives a text's first token; None if it is no embedding that takes positions."""
    if hasattr(module, _BY_IDS) and isinstance(getattr(module, "padding_idx", None), int):
        return int(module.padding_idx) + 1
    return 0 if isinstance(module, torch.nn.Embedding) and type(module) is not torch.nn.Embedding else None


def reserved_positions(model: Any) -> int:
    """Rows of a model's position table that no text uses, before its first token's."""
    return max((first_position(module) or 0 for module in model.modules()), default=0)


BY_LENGTH = ("dynamic", "longrope")
"""Rope types whose angles depend on the length."""
_FIXED = "default"  # what transformers leaves alone
_FIRST = (0, 1, 7)


class _LengthRotary(NamedTuple):
    """One rotary embedding that depends on the length."""

    module: Any
    kind: str | None  # of layers that it is for; None for all
    rope_type: str
    original: int  # positions up to which the angles do not change


def rope_types(config: Any) -> set[str]:
    """Rope types that a configuration names, of all kinds of layers."""
    found: set[str] = set()
    for each in (config, config.get_text_config()):
        for key in ("rope_parameters", "rope_scaling"):
            found.update(_nested(getattr(each, key, None)))
    return found


def _nested(parameters: Any) -> Iterator[str]:
    if not isinstance(parameters, Mapping):
        return
    named = parameters.get("rope_type", parameters.get("type"))
    if isinstance(named, str):
        yield named
    for value in parameters.values():
        yield from _nested(value)


def unknown_rope_types(config: Any) -> list[str]:
    """Rope types of a configuration that transformers has no frequencies for, sorted."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return sorted(rope_types(config) - {"default", config.default_rope_type, *ROPE_INIT_FUNCTIONS})


def list_length_rope_types(model: Any) -> list[str]:
    """Rope types of a model that are still chosen by length, sorted."""
    named = rope_types(model.config) & set(BY_LENGTH)
    modules = [module for module in model.modules() if hasattr(module, "rope_type")]
    return sorted({turn.rope_type for turn in _find_length_rotaries(model)} if modules else named)


def _find_length_rotaries(model: Any) -> list[_LengthRotary]:
    found = []
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for kind, rope_type in (types if isinstance(types, dict) else {None: types}).items():
            if rope_type in BY_LENGTH:
                found.append(
                    _LengthRotary(module, kind, rope_type, _find_original_length(module.config, kind, rope_type))
                )
    return found


def _find_original_length(config: Any, kind: str | None, rope_type: str) -> int:
    if rope_type == "dynamic":
        return int(config.max_position_embeddings)
    parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
    return int(parameters["original_max_position_embeddings"])


def plain_positions(model: Any) -> int | None:
    """Longest sequence for which no table depends on the length; None where none ever does."""
    return min((turn.original for turn in _find_length_rotaries(model)), default=None)


def max_positions(model: Any) -> int | None:
    """Longest sequence that the model supports; None for no limit. ``dynamic`` stretches it by its factor."""
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    if limit is not None:
        limit = None if limit < 0 else limit - reserved_positions(model)  # XLNet has -1, which is no limit
    turns = [turn for turn in _find_length_rotaries(model) if turn.rope_type == "dynamic"]
    if limit is None or not turns:
        return limit
    config, kind = turns[0].module.config, turns[0].kind
    parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
    return int(limit * float(parameters.get("factor", 1.0)))


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not followed
def freeze_rope(model: Any, max_len: int) -> FixedRope | None:
    """Hold rotary embeddings at the angles of ``max_len`` tokens, in place; UnsupportedModelError if that fails."""
    turns = _find_length_rotaries(model)
    for turn in turns:
        wanted = _angles(turn, (*_FIRST, max_len - 1))
        _freeze_rope_type(turn)
        found = _angles(turn, (*_FIRST, max_len - 1)), _angles(turn, _FIRST)
        if not all(_are_equal(angles, wanted) for angles in found):
            raise UnsupportedModelError(
                f"{model.config.model_type} ({type(model).__name__}) cannot be exported: the angles of its rope type "
                f"{turn.rope_type!r} depend on the sequence's length in a way of its own.",
                "use a checkpoint with rope type default, linear, llama3 or yarn.",
            )
    texts = sorted({_describe(turn, max_len) for turn in turns})
    return FixedRope(max_len, "; ".join(texts)) if texts else None


def _angles(turn: _LengthRotary, positions: tuple[int, ...]) -> tuple[Tensor, ...]:
    named = {} if turn.kind is None else {"layer_type": turn.kind}
    found: tuple[Tensor, ...] = turn.module(torch.zeros(1), torch.tensor([positions]), **named)
    return tuple(each[0, : len(_FIRST)].clone() for each in found)


def _are_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def _freeze_rope_type(turn: _LengthRotary) -> None:
    if turn.kind is None:
        turn.module.rope_type = _FIXED
    else:
        turn.module.rope_type = {**turn.module.rope_type, turn.kind: _FIXED}


def _describe(turn: _LengthRotary, max_len: int) -> str:
    where = "" if turn.kind is None else f" of {turn.kind} layers"
    if turn.rope_type == "longrope":
        return f"longrope{where}: the {'long' if max_len > turn.original else 'short'} factors"
    return f"dynamic{where}: " + (f"stretched for {max_len} tokens" if max_len > turn.original else "not stretched")


CHUNKED, INDEXED = "chunked_attention", "indexed_attention"


def _indexers(model: Any) -> Iterator[Any]:
    for module in model.modules():
        if type(module).__name__.endswith("Indexer") and isinstance(getattr(module, "index_topk", None), int):
            yield module


def _layer_types(model: Any) -> set[str]:
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


def _tuned(model: Any) -> list[Any]:
    """Attention whose scores grow with the position, in steps."""
    return [module for module in model.modules() if getattr(module, "attn_temperature_tuning", False)]


def find_full_attention_length(model: Any) -> int | None:
    """Longest text of which tokens see all before them; None where no layer leaves entries out, or it is unknown."""
    limits = [module.index_topk for module in _indexers(model)] if INDEXED in _layer_types(model) else []
    if CHUNKED in _layer_types(model):
        chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
        limits.append(int(chunk or 0))  # without a size nothing is known
        limits += [int(module.floor_scale) - 1 for module in _tuned(model)]  # the first step is no change
    return min(limits, default=None) or None


def replace_partial_attention(model: Any, max_len: int) -> bool:
    """Make such layers plain for texts of at most ``max_len`` tokens, in place; False if it leaves all as they are."""
    longest = find_full_attention_length(model)
    if longest is None or max_len > longest:
        return False
    config = model.config.get_text_config()
    if CHUNKED in _layer_types(model):
        config.layer_types = ["full_attention" if kind == CHUNKED else kind for kind in config.layer_types]
        for module in _tuned(model):
            module.attn_temperature_tuning = False
    for module in _indexers(model):
        module.forward = _choose_all_entries
    return True


def _choose_all_entries(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """What an index gives where it chooses everything: all entries, for each token [B, T, T]."""
    rows, tokens = hidden_states.shape[:2]
    return torch.arange(tokens, dtype=torch.int32).expand(rows, tokens, tokens)


def has_full_selection(model: Any) -> bool:
    """Whether the model has indexes, and all of them choose everything."""
    found = [getattr(module.forward, "__name__", "") == _choose_all_entries.__name__ for module in _indexers(model)]
    return bool(found) and all(found)


def freeze_length(checkpoint: Checkpoint, max_len: int) -> None:
    """Hold what depends on a text's length at the longest text, in place: rotary tables, partial attention."""
    checkpoint.rope = freeze_rope(checkpoint.model, max_len)
    if replace_partial_attention(checkpoint.model, max_len):
        checkpoint.max_positions = max_len
