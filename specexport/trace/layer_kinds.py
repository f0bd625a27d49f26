"""Which decoder layers compute the same with other weights, found by watching a model run.

Every call of a torch function is written down with its arguments: weights by their names in the layer, results by their
numbers, all else as it is. Layers are of one kind if their notes are the same up to the layer's own number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any

from specexport.trace.layers import get_hidden_state

ATTENTION, RECURRENCE = "attention", "recurrence"
"""Words for what a tensor that a step keeps belongs to."""


class LayerKinds(NamedTuple):
    """What is known of a model's decoder layers."""

    layers: Any  # the list of them
    path: str  # its name in the model
    kinds: tuple[int, ...]  # of each layer, the first layer that computes the same
    # Calls of attention and of recurrences that each layer makes
    calls: tuple[Mapping[str, int], ...]
    rest: tuple[Any, ...]  # what each layer gives beside the hidden state, None for layers that give that alone

    def traced(self, taps: Sequence[int] = ()) -> list[int]:
        """Layers that must be traced: the first and the last of each kind, and those that a head reads after."""
        found = set(self.kinds) | {tap - 1 for tap in taps if 0 < tap <= len(self.kinds)}
        last = {kind: layer for layer, kind in enumerate(self.kinds)}
        return sorted(found | set(last.values()))

    def numbers(self, word: str, layer: int) -> range:
        """Numbers, among those of the model, of the calls that a layer makes."""
        first = sum(calls[word] for calls in self.calls[:layer])
        return range(first, first + self.calls[layer][word])


class LayersDiffer(Exception):  # noqa: N818
    """A layer's trace is not what its kind says; the text says why."""


class LayerWatch(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
    """Writes down what each layer of one run computes."""

    def __init__(self, model: Any, kept: Sequence[Tensor], num_caches: int) -> None:
        super().__init__()
        self._layers, self._path = _layer_list(model)
        self._trouble: str | None = None if self._path else "its layers are in no list"
        self._kept = {id(each): (ATTENTION if i < num_caches else RECURRENCE, i) for i, each in enumerate(kept)}
        self._owners = _owners(model, self._path)
        self._outside: dict[int, int] = {}  # numbers of values that no layer made, by identity
        self._local: dict[int, str] = {}  # names of values within the layer that runs
        self._held: list[Any] = []  # keeps identities from being used anew
        self._now: int | None = None
        self._notes: list[list[Any]] = []
        self._calls: list[dict[str, int]] = []
        self._rest: list[Any] = []
        self._seen: dict[str, list[int]] = {}  # what is kept, as far as the layer that runs has asked for it
        self._hidden: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call, and note it."""
        del types
        named = kwargs or {}
        if self._now is None:
            return func(*args, **named)
        note = (func, self._to_comparable(args), self._to_comparable(named))
        result = func(*args, **named)
        self._notes[-1].append(note)
        self._number_results(result)
        return result

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, one run of the model is watched."""
        hooks = []
        for index, layer in enumerate(self._layers):
            hooks.append(layer.register_forward_pre_hook(self._make_enter_hook(index), with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._make_leave_hook(index)))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def result(self) -> LayerKinds | str:
        """The kinds of the layers that ran, or why there are none."""
        if self._trouble is None and len(self._notes) != len(self._layers):
            self._trouble = "not every layer runs once"
        if self._trouble is not None:
            return self._trouble
        try:
            kinds = self._kinds()
        except (TypeError, ValueError):  # of an object that is compared with another
            return "its layers are given what cannot be compared"
        return LayerKinds(self._layers, self._path, kinds, tuple(self._calls), tuple(self._rest))

    def _kinds(self) -> tuple[int, ...]:
        kinds: list[int] = []
        numbered: dict[int, frozenset[int]] = {}  # of each kind with two layers, where a layer's number stands
        for layer, notes in enumerate(self._notes):
            for first in sorted(set(kinds)):
                places = _find_number_places(self._notes[first], notes, first, layer)
                if places is not None and numbered.setdefault(first, places) == places:
                    kinds.append(first)
                    break
            else:
                kinds.append(layer)
        return tuple(kinds)

    def _make_enter_hook(self, index: int) -> Callable[..., None]:
        def enter(_layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = given[0] if given else named.get("hidden_states")
            if self._now is not None or index != len(self._notes) or not isinstance(hidden, Tensor):
                self._trouble = self._trouble or "its layers do not run one after the other"
                return
            if index and hidden is not self._hidden:
                self._trouble = self._trouble or "something is computed between its layers"
            self._now = index
            self._local, self._seen = {id(hidden): "hidden"}, {ATTENTION: [], RECURRENCE: []}
            self._held.append(hidden)
            self._notes.append([(self._to_comparable(given), self._to_comparable(named))])

        return enter

    def _make_leave_hook(self, index: int) -> Callable[..., None]:
        def leave(_layer: Any, _given: Any, output: Any) -> None:
            if self._now != index:
                return
            self._notes[-1].append(self._to_comparable(output))
            self._now, self._hidden = None, get_hidden_state(output)
            rest = None if isinstance(output, Tensor) else tuple(output[1:])
            if tree_any(lambda each: isinstance(each, Tensor), rest):
                self._trouble = self._trouble or "its layers hand more on than a hidden state"
            self._rest.append(rest)
            self._calls.append({word: len(seen) // 2 for word, seen in self._seen.items()})  # two tensors a call

        return leave

    def _number_results(self, result: Any) -> None:
        """Give what a function made a number in its layer; what it got and gives back keeps its own."""
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and id(value) not in self._local:
                self._local[id(value)] = f"value {len(self._local)}"
                self._held.append(value)

    def _to_comparable(self, value: Any) -> Any:
        """Arguments in a form that can be compared."""
        if isinstance(value, Tensor):
            return self._describe_tensor(value)
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *(self._to_comparable(each) for each in value))
        if isinstance(value, dict):
            return ("dict", *((key, self._to_comparable(each)) for key, each in sorted(value.items())))
        if isinstance(value, slice):
            return (
                "slice",
                self._to_comparable(value.start),
                self._to_comparable(value.stop),
                self._to_comparable(value.step),
            )
        return value

    def _describe_tensor(self, value: Tensor) -> str:
        """In words, so that no number of a tensor is taken for a layer's."""
        key = id(value)
        if key in self._local:
            return self._local[key]
        if key in self._kept:
            word, number = self._kept[key]
            if number not in self._seen[word]:
                self._seen[word].append(number)
            return f"{word} {number - self._seen[word][0]}"
        if key in self._owners:
            layer, name = self._owners[key]
            whose = "own" if layer == self._now else layer
            return f"weight {name} of {whose}: {value.dtype} {tuple(value.shape)}"
        if key not in self._outside:
            self._outside[key] = len(self._outside)
            self._held.append(value)
        return f"outside {self._outside[key]}"


def _layer_list(model: Any) -> tuple[Any, str]:
    """The list of modules with the most weights, which is that of the layers, and its name; an empty one if none is."""
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.ModuleList)]
    outer = [each for each in lists if not any(each[0].startswith(f"{other}.") for other, _ in lists)]
    sizes = {name: sum(weight.numel() for weight in each.parameters()) for name, each in outer}
    name, layers = max(outer, key=lambda each: sizes[each[0]], default=("", ()))
    return layers, name


def _owners(model: Any, path: str) -> dict[int, tuple[int | None, str]]:
    """Layer and name of each weight by identity; the name within the layer, or the whole one outside of layers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    found: dict[int, tuple[int | None, str]] = {}
    for name, weight in named:
        number, _, inner = name.removeprefix(f"{path}.").partition(".")
        inside = name.startswith(f"{path}.") and number.isdecimal()
        found.setdefault(id(weight), (int(number), inner) if inside else (None, name))
    return found


def _find_number_places(one: Any, other: Any, first: int, second: int) -> frozenset[int] | None:
    """Where the notes of layers ``first`` and ``second`` have these numbers; None if they differ in more."""
    flat = list(_leaves(one)), list(_leaves(other))
    if len(flat[0]) != len(flat[1]):
        return None
    places = set()
    for place, (a, b) in enumerate(zip(*flat, strict=True)):
        if type(a) is int and type(b) is int and (a, b) == (first, second):
            places.add(place)
        elif type(a) is not type(b) or not (a == b or (a != a and b != b)):  # noqa: PLR0124 - not a number
            return None
    return frozenset(places)


def _leaves(note: Any) -> Iterator[Any]:
    if isinstance(note, (tuple, list)):
        yield len(note)
        for each in note:
            yield from _leaves(each)
    else:
        yield note
