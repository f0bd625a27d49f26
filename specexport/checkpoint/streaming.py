"""Running a model whose weights are in no memory: each is read for the operation that wants it, and let go after it.

The parameters are on the ``meta`` device. A torch function mode sees every call with one of them among its arguments,
and makes the call with what it stands for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map

from specexport.checkpoint.stored import CHUNK, Stored, StoredWeight, stored_by_id
from specexport.host import map_in_threads

_CPU = torch.device("cpu")
_PART = 1 << 22  # elements of a layer's weight that are read and multiplied at a time
_VIEWS = (torch.Tensor.T.__get__, torch.Tensor.mT.__get__)
"""Properties that have the values too."""


class _Streaming(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
    """See the module."""

    def __init__(self, weights: dict[int, StoredWeight]) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call, with what the parameters stand for."""
        del types
        named = kwargs or {}
        if not tree_any(self._is_stored, (args, named)):
            return func(*args, **named)
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property
            given = tree_map(self._load_stored_weight, args) if func in _VIEWS else args
            return _CPU if func == torch.Tensor.device.__get__ else func(*given, **named)
        if func is torch.nn.functional.linear:
            return self._linear(*args, **named)
        if func is torch.nn.functional.embedding:
            return self._embedding(*args, **named)
        if name in _ABOUT:
            return func(*args, **named)
        args, named = tree_map(self._load_stored_weight, (args, named))
        return func(*args, **named)

    def _is_stored(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._weights

    def _load_stored_weight(self, value: Any) -> Any:
        return self._weights[id(value)].whole() if self._is_stored(value) else value

    def _linear(self, source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Some outputs at a time on each core: what was read is multiplied while it is in the cache."""
        bias = self._load_stored_weight(bias)
        if not self._is_stored(weight):
            return torch.nn.functional.linear(source, weight, bias)
        stored, grad = self._weights[id(weight)], torch.is_grad_enabled()

        def part(bounds: tuple[int, int]) -> Tensor:
            rows = slice(*bounds)
            with torch.set_grad_enabled(grad):
                return torch.nn.functional.linear(source, stored.rows(*bounds), None if bias is None else bias[rows])

        parts = list(map_in_threads(part, stored.chunks(_PART)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _embedding(self, ids: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        """The rows that are looked up, and no others. What else the function takes is about training."""
        if not self._is_stored(weight):
            return torch.nn.functional.embedding(ids, weight)
        stored = self._weights[id(weight)]
        wanted, places = ids.unique(return_inverse=True)
        rows = [stored.rows(row, row + 1) for row in wanted.tolist()]
        return torch.cat(rows)[places]


_ABOUT = {"size", "dim", "numel", "stride", "is_floating_point", "is_contiguous", "element_size", "requires_grad_"}
"""Functions that ask about a tensor, and do not read it."""


@contextmanager
def streamed(model: Any, stored: Stored) -> Iterator[None]:
    """Within the block, ``model`` runs with the weights that ``stored`` reads; nothing changes without any."""
    if not stored:
        yield
        return
    with _one_thread(), _Streaming(stored_by_id(model, stored)):
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within the block, torch divides no operation: cores have parts of layers instead, and do not wait for others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def use_random_weights(model: Any, stored: Stored) -> Iterator[None]:
    """Within the block, ``model`` runs with one block of random numbers for all weights: nothing is read."""
    if not stored:
        yield
        return
    width = int(model.config.get_text_config().hidden_size)
    generator = torch.Generator().manual_seed(20)
    largest = max(min(weight.shape[0] * weight.row_size, max(CHUNK, weight.row_size)) for weight in stored.values())
    noise = torch.randn(largest + 1, generator=generator) * width**-0.5
    weights = {
        id_: StoredWeight(weight.shape, weight.dtype, _RandomRows(weight, noise))
        for id_, weight in stored_by_id(model, stored).items()
    }
    with _one_thread(), _Streaming(weights):
        yield


class _RandomRows:
    """Rows that differ by where in the block they begin."""

    def __init__(self, weight: StoredWeight, noise: Tensor) -> None:
        self._weight, self._noise = weight, noise

    def __call__(self, start: int, stop: int) -> Tensor:
        """See ``StoredWeight.rows``."""
        row = self._weight.row_size
        size = (stop - start) * row
        if size > len(self._noise):  # not a matrix that is worked on in chunks
            repeats = -(-size // len(self._noise))
            flat = self._noise.repeat(repeats)[:size]
        else:
            first = start * row % (len(self._noise) - size + 1)
            flat = self._noise[first : first + size]
        return flat.reshape(stop - start, *self._weight.shape[1:]).to(self._weight.dtype)


@contextmanager
def use_empty_weights(model: Any, stored: Stored) -> Iterator[dict[int, str]]:
    """Within the block, stored parameters are unwritten CPU tensors, which take no memory; gives names by address."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    made: dict[int, torch.nn.Parameter] = {}
    for name in stored:
        meta = parameters[name]
        if id(meta) not in made:
            made[id(meta)] = torch.nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype), requires_grad=False)
    replace_parameters(model, made)
    try:
        yield {made[id(parameters[name])].data_ptr(): name for name in stored}
    finally:
        replace_parameters(model, {id(made[id(parameters[name])]): parameters[name] for name in stored})


def replace_parameters(model: Any, new: "dict[int, torch.nn.Parameter]") -> None:
    """Put other parameters into a model, by the identity of the old ones; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                module._parameters[name] = new[id(parameter)]


def load_all(model: Any, stored: Stored) -> None:
    """Read all stored parameters into memory, in place."""
    made = {
        id_: torch.nn.Parameter(weight.whole(), requires_grad=False)
        for id_, weight in stored_by_id(model, stored).items()
    }
    replace_parameters(model, made)
