"""The training loop: batches in, a better draft out, with all that is needed to go on after a crash."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specexport.heads.write import write_tensors
from specexport.train.store import FeatureStore, batches
from specexport.train.student import Batch, Student, shift_left
from specexport_runtime.errors import InvalidRequestError

STEP_DECAY = 0.8
"""Weight of each further draft step in the loss, as EAGLE-3's own training has it."""


@dataclass(frozen=True)
class TrainSettings:
    """How a draft is trained."""

    steps: int = 3  # draft steps of the training-time test, of heads
    batch_tokens: int = 2048  # most tokens of a batch
    max_len: int = 512  # tokens of a text that are read
    matrix_rate: float = 0.003  # learning rate of the matrices (Muon)
    vector_rate: float = 5e-4  # that of all else (AdamW), the LM head included
    warmup: int = 30  # batches until the full rate
    total: int = 1000  # batches in all; the rate falls till then, to no less than 2 % of the full one
    seed: int = 0  # of the order of batches


class Trainer:
    """Trains a draft on the texts of ``store`` that ``indices`` names."""

    def __init__(self, student: Student, store: FeatureStore, indices: Sequence[int], settings: TrainSettings) -> None:
        self.student = student
        self.store, self.indices, self.settings = store, indices, settings
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self._trained().items():
            is_matrix = parameter.dim() == 2 and "lm_head" not in name
            (matrices if is_matrix else others).append(parameter)
        self._rates = settings.matrix_rate, settings.vector_rate
        self.optimizers: list[Any] = [
            torch.optim.Muon(matrices, lr=self._rates[0], weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=self._rates[1], betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.done = 0
        self.tokens = 0
        self.seconds = 0.0
        self.curve: list[dict[str, Any]] = []
        self._epochs: list[list[list[int]]] = []

    def rate(self) -> float:
        """Share of the full learning rate at this batch."""
        settings = self.settings
        if self.done < settings.warmup:
            return (self.done + 1) / settings.warmup
        left = (settings.total - self.done) / max(1, settings.total - settings.warmup)
        return max(0.02, min(1.0, left))

    def step(self) -> float:
        """Learn from one batch; returns the loss of the first draft step, nats a token."""
        start = time.perf_counter()
        share = self.rate()
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
        batch = self.read(self._next_batch())
        total, losses = torch.zeros(()), list[float]()
        with torch.autocast("cpu", torch.bfloat16):
            for number, loss in enumerate(self.student.losses(batch, self.settings.steps)):
                losses.append(float(loss.detach()))
                total = total + STEP_DECAY**number * loss
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self._trained().values() if p.grad is not None], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.done += 1
        self.tokens += int(batch.lengths.sum())
        self.seconds += time.perf_counter() - start
        return losses[0]

    def read(self, indices: Sequence[int]) -> Batch:
        """The texts of a batch, filled up to one length."""
        examples = [self.store.read(i) for i in indices]
        tokens = [each.tokens[: self.settings.max_len] for each in examples]
        lengths = torch.tensor([len(each) for each in tokens])
        states = [each.states[: self.settings.max_len].float() for each in examples]
        padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        filled = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        *taps, last = padded.unbind(dim=2)
        return Batch(filled, taps, last, lengths)

    def _next_batch(self) -> list[int]:
        """The batch at this number: the same one in every run."""
        epoch, before = 0, 0
        while self.done >= before + len(found := self._make_epoch_batches(epoch)):
            before += len(found)
            epoch += 1
        return found[self.done - before]

    def _make_epoch_batches(self, epoch: int) -> list[list[int]]:
        settings = self.settings
        if epoch == len(self._epochs):
            seed = settings.seed + 1000 * epoch
            found = batches(self.store, self.indices, settings.batch_tokens, settings.max_len, seed)
            self._epochs.append(list(found))
        return self._epochs[epoch]

    def save(self, folder: Path) -> None:
        """Write all that :meth:`resume` needs; what was there is replaced when that is whole."""
        tensors: dict[str, Tensor] = dict(self._trained())
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"{_OPTIMIZER}{number}.{index}.{key}"] = torch.as_tensor(value)
        fields = {name: getattr(self, name) for name in _FIELDS}
        whole = {name: value.detach().contiguous() for name, value in tensors.items()}
        folder.mkdir(parents=True, exist_ok=True)
        meta = {"state": json.dumps(fields), "settings": json.dumps(self._collect_run_settings())}
        write_tensors(folder / STATE_NAME, whole, meta)

    def resume(self, folder: Path) -> bool:
        """Go on from what :meth:`save` wrote, False if nothing; InvalidRequestError if it is damaged or of others."""
        path = folder / STATE_NAME
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            before, fields = json.loads(meta["settings"]), json.loads(meta["state"])
            self._check_settings(path, before)
            self._load_state(tensors, {name: fields[name] for name in _FIELDS})
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(
                f"{path} is damaged ({error}).", "remove it, and give the same command again: it learns from the start."
            ) from error
        return True

    def _check_settings(self, path: Path, before: dict[str, Any]) -> None:
        now = self._collect_run_settings()
        other = [name for name, value in now.items() if before.get(name) != value]
        if other:
            raise InvalidRequestError(
                f"{path} was written with {other[0]} {before.get(other[0])}, and now it is {now[other[0]]}.",
                "give the same settings, or another folder with --work.",
            )

    def _load_state(self, tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
        """Become what was saved; an error if something is missing or has another shape."""
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        for key, value in tensors.items():
            if key.startswith(_OPTIMIZER):
                number, index, name = key.removeprefix(_OPTIMIZER).split(".")
                states[int(number)].setdefault(int(index), {})[name] = value
        with torch.no_grad():
            for name, parameter in self._trained().items():
                parameter.copy_(tensors[name])
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        for name, value in fields.items():
            setattr(self, name, value)

    def _trained(self) -> dict[str, Tensor]:
        return {name: each for name, each in self.student.modules.named_parameters() if each.requires_grad}

    def _collect_run_settings(self) -> dict[str, Any]:
        return asdict(self.settings) | self.student.describe() | {"texts": self.store.made_of}


STATE_NAME = "state.safetensors"
_FIELDS = ("done", "tokens", "seconds", "curve")
_OPTIMIZER = "optimizer."


class Acceptance(NamedTuple):
    """How a draft would do on texts that it did not learn from."""

    # for each draft step, the share of places where its best token is the target's, of the places where all steps
    # before were right
    rates: tuple[float, ...]
    length: float  # mean tokens a round with as many drafts: 1 and the accepted ones
    loss: float  # of the first step, nats a token
    overlap: float | None  # see :class:`specexport.train.student.Guess`


def measure_acceptance(trainer: Trainer, indices: Sequence[int], steps: int = 5) -> Acceptance:
    """Greedy drafts on held-out texts; the tokens fed are the text's own, as an accepted draft's are."""
    right, seen = [0.0] * steps, [0.0] * steps
    losses: list[float] = []
    overlaps: list[float] = []
    for group in batches(trainer.store, indices, trainer.settings.batch_tokens, trainer.settings.max_len, 0):
        batch = trainer.read(group)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            alive: Tensor | None = None
            for step, guess in enumerate(trainer.student.guesses(batch, steps)):
                # A place counts where the text went on as the target would have: there a draft can be right.
                follows = shift_left(batch.tokens, 1 + guess.offset)
                chance = guess.valid if alive is None else alive & guess.valid
                hit = chance & (guess.drafted == guess.wanted)
                seen[step] += float(chance.sum())
                right[step] += float(hit.sum())
                alive = hit & (follows == guess.wanted)
                losses += [] if guess.loss is None else [guess.loss]
                overlaps += [] if guess.overlap is None else [guess.overlap]
    rates = tuple(r / max(s, 1.0) for r, s in zip(right, seen, strict=True))
    length = 1 + sum(math.prod(rates[: n + 1]) for n in range(steps))
    return Acceptance(rates, length, _mean(losses) or 0.0, _mean(overlaps))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
