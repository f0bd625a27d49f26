"""What the decoding loop needs from an engine. Implementations know nothing of sequences, sampling or drafting."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import StepShape
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.logit_rows import LogitRows, NumpyRows
from specexport_runtime.executors.row_kernels import RowAsk

if TYPE_CHECKING:
    from specexport_runtime.bundle.arrays import CutHead
    from specexport_runtime.bundle.entry import ModelEntry

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
StepOutput = npt.NDArray[Any]
"""Logits [R, V] float32, or token ids [R] int64: what ``execute`` was asked for."""

Want = Literal["logits", "token_ids"]


class StepBuffers(NamedTuple):
    """Host arrays of one packed step, to be filled in place before ``execute`` (shapes: see ``abi``).

    They belong to the executor. The arrays of one shape keep their contents from step to step as long as ``prepare``
    returns the same objects, so inputs that depend on the shape alone need not be filled again.
    """

    input_ids: Int64Array
    positions: Int64Array
    logit_rows: Int64Array
    kv_lens: Int32Array
    cu_new_tokens: Int32Array
    row_starts: Int64Array
    row_ends: Int64Array
    row_totals: Int32Array
    pad_index: Int64Array
    unpad_index: Int64Array
    kv_positions: Int64Array | None = None
    """Only where the shape has a ``kv_span``."""
    token_features: Float32Array | None = None
    """Only of a draft head."""
    state_steps: Int64Array | None = None
    """Only of a model that keeps states."""
    adapter_ids: Int64Array | None = None
    """Only of a target with adapters to choose from."""
    parents: Int64Array | None = None
    """Only of a target that verifies trees: ones, which a step that changes them puts back."""


class Executor(ABC):
    """One engine with its KV arena of ``num_rows`` rows of ``kv_capacity`` entries.

    What an engine need not be able to do has a default. Each such ability is a group of members after the attribute
    that says whether it is there; methods of a group that is not there do nothing, or raise SpecexportError.
    """

    vocab_size: int
    """Rows of the LM head, the width of the logits. A head that was cut (``bundle.arrays``) has fewer than V."""
    num_rows: int
    kv_capacity: int
    engine_seconds: float = 0.0
    """Seconds spent inside engine execution since creation."""
    max_num_tokens: int | None = None
    """Most tokens of one step that mixes any sequences; None for no limit."""

    @abstractmethod
    def prepare(self, shape: StepShape) -> StepBuffers:
        """Bind the arena rows and buffers for ``shape`` and return the host arrays to fill."""

    @abstractmethod
    def execute(self, want: Want = "logits") -> StepOutput:
        """Run the prepared step.

        Args:
            want: ``"token_ids"`` where the greedy token of each row is all that is needed: then only ids leave a GPU.

        Returns:
            logits [R, V], float32, or token ids [R], int64 (argmax of the raw logits, ``NO_TOKEN`` for a row that
            holds a NaN); a view that the next ``execute`` overwrites.
        """

    @abstractmethod
    def move_row(self, source: int, destination: int, kv_len: int) -> None:
        """Copy the first ``kv_len`` cache entries of row ``source`` to row ``destination``, in every layer."""

    @abstractmethod
    def clear_row(self, row: int) -> None:
        """The sequence in ``row`` is gone: no value it left, a NaN for example, may reach the next one's attention."""

    @abstractmethod
    def move_entries(self, row: int, entries: Int64Array, start: int = 0) -> None:
        """Put the listed cache entries of a row (ascending) one after the other from ``start`` on, in every layer.

        None of them lies before its new place.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the engine and its memory."""

    def capture(self, shapes: list[StepShape]) -> None:
        """Make ``shapes`` fast to run (bindings on a CPU, graphs on a GPU). Never changes results."""

    # ---- rows of logits ----

    keeps_rows: bool = False
    """Tokens are drawn from logits where the engine left them; else numpy's rows are given."""
    head: "CutHead | None" = None
    """Which token ids the first rows of the LM head are; None: each is its own number."""

    def set_head(self, head: "CutHead | None") -> None:
        """Set :attr:`head`."""
        self.head = head

    def execute_rows(self, asks: Sequence[RowAsk]) -> LogitRows:
        """Run the prepared step, with what is asked of each row of logits; without, there are only greedy tokens."""
        return NumpyRows(self.execute("logits" if asks else "token_ids"), asks, self.head)

    # ---- steps that wait for none before them ----

    chains: bool = False
    """Steps can be put on the device one after the other."""

    def enqueue(self, *, fed: bool, asks: Sequence[RowAsk] = ()) -> None:
        """Put the prepared step on the device; its result is the greedy token of each row of logits.

        Args:
            asks: of each row of logits, only with ``keeps_rows``: tokens that are drawn are the result of their rows.
            fed: its T input ids are those that the step before gives, of as many rows of logits. False begins a chain.
        """
        raise SpecexportError("steps of this engine cannot be chained.")

    def collect(self) -> list[LogitRows]:
        """Wait for the steps of a chain: the rows of each."""
        return []

    # ---- copies of rows ----

    copies_rows: bool = False
    """Rows can be copied, and stay as they are when no sequence runs in them.

    ``floor`` of a row: it is gone on from after so many tokens or more, see ``recedes``.
    """

    def copy_row(self, source: int, destination: int, kv_len: int, floor: int = 0) -> None:
        """Copy what is left of the first ``kv_len`` entries of a row, in every layer; the source keeps them."""
        raise SpecexportError("rows of this engine cannot be copied.")

    def swap_rows(self, one: int, other: int, kv_lens: tuple[int, int], floors: tuple[int, int] = (0, 0)) -> None:
        """Exchange what is left of the first entries of two rows, in every layer.

        ``kv_lens`` of them, of ``one`` and of ``other``, with these floors.
        """
        raise SpecexportError("rows of this engine cannot be copied.")

    # ---- rows that are written to files ----

    def row_views(self, row: int, kv_len: int, floor: int = 0) -> "list[npt.NDArray[Any]]":
        """The memory of what is left of a row's first entries in every layer, [H, entries, D], then of its states."""
        raise SpecexportError("rows of this engine cannot be stored.")

    # ---- memory of rows ----

    gives_back: bool = False
    """Pages that are of no use go back to the system; ``swap_rows`` leaves nothing after the exchanged entries."""
    recedes: bool = False
    """Some layers have windows, and the system takes the memory before them back.

    No layer reads what lies a window or more before a row's floor.
    """

    def row_bytes(self, entries: int) -> int:
        """Bytes of memory that the first ``entries`` of a row take, in all layers: whole pages; 0 if not known."""
        return 0

    def release_pages(self, row: int, kept: int) -> None:
        """Give the pages of a row back that hold none of its first ``kept`` entries; nothing unless ``gives_back``."""

    def recede(self, row: int, floor: int) -> None:
        """Give back what no layer reads after ``floor`` tokens; nothing unless ``recedes``."""

    # ---- trees ----

    takes_trees: bool = False
    """A row's new tokens may be a tree: ``StepBuffers.parents``."""

    # ---- states ----

    num_pending: int = 0
    """S of a model that keeps states: tokens whose inputs a row can keep aside, see ``abi.num_pending``; else 0.

    Rows then have states beside KV entries, and copying a row copies its state whole.
    """

    # ---- adapters of a target, where each token of a step comes with a number ----

    num_adapters: int = 0
    """LoRA adapters to choose from, numbered from 1."""
    default_adapter: int = 0
    """That of rows which name none; 0 for none."""

    # ---- gates of a target, for drafting with the target itself ----

    num_gates: int = 0
    """G: a mixer (2i: attention, recurrences) and an MLP (2i+1) for each layer i; 0 without gates.

    The gates hold for every ``execute`` until they are set again; they belong to no step shape.
    """
    gate_kinds: Sequence[str] = ()
    """What each gate is for (``abi.GateKind``); empty: an attention and an MLP in each layer."""

    def set_layers(self, mask: BoolArray | None) -> None:
        """Run only the parts whose gate in ``mask`` [G] is True; None runs all. A part that is off costs nothing."""
        raise SpecexportError("layers of this engine cannot be switched off.")

    def measure_similarity(self, wanted: bool) -> None:
        """Whether the next steps compute :attr:`similarity`."""
        raise SpecexportError("this engine measures no similarity.")

    @property
    def similarity(self) -> Float32Array:
        """Cosine similarity [N, T] of the last step, float32: the residual stream before and after each mixer.

        A copy. Empty, [N, 0], if it was not measured.
        """
        return np.zeros((self.num_gates // 2, 0), np.float32)

    # ---- features: of a target that a draft head reads, or of a draft head ----

    feature_size: int = 0
    """E; 0 for an engine without features."""
    gives_features: bool = False
    """It is a target's, and gives features of the tokens of a step."""

    def want_features(self, wanted: bool) -> None:
        """Whether the next steps compute :attr:`features`. A step that does not pays nothing for them."""
        raise SpecexportError("this engine gives no features.")

    @property
    def features(self) -> Float32Array:
        """Features [T, E] of the last step, float32; a view that the next step overwrites. [0, E] if not computed."""
        return np.zeros((0, self.feature_size), np.float32)

    reads_features: bool = False
    """It is a draft head's: each token of a step comes with a feature, ``StepBuffers.token_features``."""
    num_draft_heads: int = 0
    """How many heads a draft head is of, each for a place of a draft. 0 for a kind that is one head."""
    reads_draft: bool = False
    """Each of its heads reads what those before it guessed: as many tokens as a row ends in, so many its head reads.
    Where several heads do not, a token is the number of a head."""
    num_modules: int = 0
    """How many MTP modules a draft head is of, each for a token of a draft; see ``drafters.in_turn``."""

    @property
    def next_features(self) -> Float32Array:
        """What the last step handed on for its logit rows [R, E], float32; a view that the next step overwrites."""
        return np.zeros((0, self.feature_size), np.float32)

    # ---- caches that two engines read ----

    borrows_cache: bool = False
    """It is a draft head's that reads caches of the target and has none: a step attends to the target's entries and
    adds none of its own."""
    can_lend: bool = False
    """Another engine can read its caches."""

    def lend(self, layers: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """See :class:`CacheLender`."""
        raise SpecexportError("caches of this engine cannot be lent.")


WAY_BACK = 1024
"""Tokens before its end from where a text can still be gone on from, if layers forget what is before their window."""
RECEDE_EVERY = 64
"""Tokens by which a row grows before more of it is forgotten."""
MAX_CHUNK = 512
"""Most prompt tokens of a row in one step, unless a smaller number is given."""
MAX_BEHIND_WINDOW = WAY_BACK + RECEDE_EVERY + MAX_CHUNK
"""Entries that a layer keeps beside its window, at most."""


class CacheLender(Protocol):
    """Whose caches a draft head may read: an executor that ``can_lend``."""

    def lend(self, layers: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Caches of some layers [rows, 1, H, L, D], the memory itself.

        Args:
            layers: numbers of the layers; the first one's caches are named ``k_cache.0`` and ``v_cache.0``, and so on.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What an engine is opened for.

    Attributes:
        folder: the bundle's folder.
        entry: the model's manifest entry.
        role: ``"target"``, ``"draft"`` or ``"head"``.
        num_rows: cache rows.
        kv_capacity: L, entries of a cache row, where the engine does not fix it.
        lookahead: largest K of the bundle.
        num_threads: on a CPU: compute threads; None takes the cores really available.
        spin: on a CPU: let idle threads spin.
        share_threads: on a CPU: let all engines of this process take one pool of threads.
        unpad_kv: False opens the graph for caches that hold padding entries.
        cuda_graphs: on a GPU: record decode and verify steps and replay them; None leaves it to the backend.
        lender: of a draft head that has no cache: whose it reads; None lets it read zeros.
        lends: of a target: a draft head reads its caches, with windows of its own.
        gives_back: memory of rows that is of no use goes back to the system; only where the backend can.
    """

    folder: Path
    entry: "ModelEntry"
    role: str
    num_rows: int
    kv_capacity: int
    lookahead: int
    num_threads: int | None = None
    spin: bool = True
    share_threads: bool = False
    unpad_kv: bool = True
    cuda_graphs: bool | None = None
    lender: CacheLender | None = None
    lends: bool = False
    gives_back: bool = False


class EngineBackend(NamedTuple):
    """What runs the engines of one backend: the runtime's half of ``specexport.backends``.

    Attributes:
        open: opens an engine.
        on_gpu: CUDA graphs may be asked for.
        has_padded_kv: bundles have graphs for caches that hold padding entries.
        has_gates: layers of a target can be switched off, for drafting with the target itself.
        copies_rows: rows can be copied, and keep what they have when nobody runs in them: prefixes can be reused.
        stores_rows: rows can be written to files: kept prefixes can survive their engine.
        gives_back: memory of rows that is of no use can go back to the system: the KV cache can have a budget.
        same_bits: a token's logits have the same bits, whatever else is in a step and however its prompt was cut.
        modules: Python modules that running needs.
        provider: ONNX Runtime's execution provider that running needs; None for none but its own.
    """

    open: Callable[[EngineRequest], Executor]
    on_gpu: bool = False
    has_padded_kv: bool = False
    has_gates: bool = False
    copies_rows: bool = False
    stores_rows: bool = False
    gives_back: bool = False
    same_bits: bool = False
    modules: tuple[str, ...] = ()
    provider: str | None = None
