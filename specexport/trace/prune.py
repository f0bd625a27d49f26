"""A model with fewer decoder layers: which of them do least, and what must change where they go.

A layer does little where its output points where its input did. ASD (Metel et al. 2024) leaves such parts of layers
out; for whole layers, 1 minus the mean cosine of the two over tokens is ShortGPT's Block Influence (Men et al. 2024).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.checkpoint.loaded import Checkpoint
from specexport.checkpoint.stored import WEIGHT_PREFIX
from specexport.trace.attention import LayerCall
from specexport.trace.check import TOLERANCE
from specexport.trace.experts import make_experts_traceable
from specexport.trace.geometry import probe_layers
from specexport.trace.layers import find_layers, get_hidden_state
from specexport.trace.quirks import has_logits_to_keep
from specexport.trace.refuse import check_config, refuse

_HINT = "leave out --draft-layers, or take another draft."
_PROOF_TOKENS = 32

OnLayer = Callable[[int, Tensor, Tensor], None]


def choose_layers(
    checkpoint: Checkpoint, count: int, pieces: Sequence[npt.NDArray[np.int64]]
) -> list[tuple[int, float]]:
    """The decoder layers that change the hidden state least, with their similarities, in the order of choice.

    A layer's similarity (-1 to 1) is the mean cosine of its input and output (Men et al. 2024), measured anew after
    each choice on ``pieces`` (token ids, int64), which are read ``count`` times.
    """
    model: Any = checkpoint.model
    check_config(model)
    layers = find_layers(model, _HINT)
    dropped: dict[int, float] = {}
    # One at a time: a layer is measured on what reaches it when those chosen before are gone, as in the pruned model.
    for _ in range(count):
        found = _measure(model, layers, pieces, dropped)
        layer = max((i for i in range(len(layers)) if i not in dropped), key=found.__getitem__)
        dropped[layer] = found[layer]
    return list(dropped.items())


def drop_layers(checkpoint: Checkpoint, dropped: Collection[int], hint: str = _HINT) -> None:
    """Take decoder layers out of a model, in place; UnsupportedModelError if it differs from handing inputs on."""
    model: Any = checkpoint.model
    check_config(model)
    layers = find_layers(model, hint)
    kept = [i for i in range(len(layers)) if i not in dropped]
    vocab = model.config.get_text_config().vocab_size
    tokens = torch.tensor([[(11 * i + 5) % vocab for i in range(_PROOF_TOKENS)]])
    whole = _calls(model)
    wanted_calls = [replace(whole[old], index=new, layer=new) for new, old in enumerate(kept)]
    with skip_layers(model, dropped, hint):
        wanted = _compute_logits(model, tokens)
    owners = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    _remove(model, layers, kept)
    checkpoint.kept = {  # layers have other numbers now
        WEIGHT_PREFIX + name: checkpoint.kept[WEIGHT_PREFIX + owners[id(parameter)]]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if WEIGHT_PREFIX + owners[id(parameter)] in checkpoint.kept
    }
    checkpoint.num_parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        calls, found = _calls(model), _compute_logits(model, tokens)
    except Exception as error:  # whatever of it still counts on all layers
        raise refuse(model, f"without some layers its forward pass fails ({_line(error)})", hint) from error
    limit = TOLERANCE[model.dtype] * max(1.0, float(wanted.abs().max()))
    if calls != wanted_calls or not torch.allclose(found, wanted, rtol=0, atol=limit, equal_nan=True):
        raise refuse(model, "what its layers compute depends on their number or on their place", hint)


@contextmanager
def skip_layers(model: Any, dropped: Collection[int], hint: str = _HINT) -> Iterator[None]:
    """Within the block, ``dropped`` decoder layers hand their input on; refused with ``hint`` where they cannot."""
    with _watch(model, find_layers(model, hint), dropped, hint=hint):
        yield


def _measure(
    model: Any, layers: Any, pieces: Sequence[npt.NDArray[np.int64]], dropped: Collection[int]
) -> dict[int, float]:
    """Mean cosine of input and output of each layer over all tokens, with some layers left out."""
    sums = [0.0] * len(layers)

    def note(index: int, before: Tensor, after: Tensor) -> None:
        cosines = torch.cosine_similarity(before.float(), after.float(), dim=-1)
        sums[index] += float(cosines.mean()) * before.shape[-2]

    with _watch(model, layers, dropped, note):
        for piece in pieces:
            _compute_logits(model, torch.from_numpy(piece)[None], last=1)
    total = sum(map(len, pieces))
    # What is no number (float16 overflows) is refused later, by name. Rounding can go beyond 1.
    means = np.clip(np.nan_to_num(np.array(sums) / total, nan=-1.0), -1.0, 1.0)
    return dict(enumerate(means.round(6).tolist()))


@contextmanager
def _watch(
    model: Any, layers: Any, dropped: Collection[int], note: OnLayer | None = None, hint: str = _HINT
) -> Iterator[None]:
    """Within the block, ``dropped`` layers hand their input on, and ``note`` gets (layer, input, output) of each."""

    def hook(index: int) -> Callable[..., Any]:
        def after(_layer: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
            before = given[0] if given else named.get("hidden_states")
            hidden = get_hidden_state(output)
            if not isinstance(before, Tensor) or not isinstance(hidden, Tensor) or before.shape != hidden.shape:
                raise refuse(model, f"layer {index} does not turn one hidden state into another", hint)
            if note is not None:
                note(index, before, hidden)
            if index not in dropped:
                return None
            return (before, *output[1:]) if isinstance(output, tuple) else before

        return after

    hooks = [layer.register_forward_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _compute_logits(model: Any, ids: Tensor, last: int = 0) -> Tensor:
    """Logits of ``ids`` [1, T]: of the last few tokens, or of all where ``last`` is 0."""
    with torch.no_grad():
        asked = {"logits_to_keep": last} if has_logits_to_keep(model) else {}
        logits: Tensor = model(input_ids=ids, use_cache=False, **asked).logits
    return logits[:, -last:]


def _calls(model: Any) -> list[LayerCall]:
    with make_experts_traceable(model, grouped=False):
        found = probe_layers(model)
    if found.recurrences:
        raise refuse(model, "some of its layers keep a state", _HINT)
    return list(found.attention)


def _remove(model: Any, layers: Any, kept: Sequence[int]) -> None:
    """Take all other layers out of their list, number the rest anew, and shorten what configurations say of each."""
    size = len(layers)
    around = [module for module in model.modules() if any(part is layers for part in module.modules())]
    inside = [module for layer in layers for module in layer.modules()]
    configs = [module.config.get_text_config() for module in (*around, *inside) if hasattr(module, "config")]
    for config in {id(config): config for config in configs}.values():
        if config.num_hidden_layers == size:
            _shorten(config, size, kept)
    for i in sorted(set(range(size)) - set(kept), reverse=True):
        del layers[i]
    for new, old in enumerate(kept):
        for module in layers[new].modules():
            if getattr(module, "layer_idx", None) == old:
                module.layer_idx = new


def _shorten(config: Any, size: int, kept: Sequence[int]) -> None:
    config.num_hidden_layers = len(kept)
    if isinstance(dense := getattr(config, "first_k_dense_replace", None), int):
        config.first_k_dense_replace = sum(i < dense for i in kept)
    for name, value in list(vars(config).items()):
        # layer_types, mlp_layer_types, no_rope_layers, …
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == size:
            setattr(config, name, type(value)(value[i] for i in kept))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
