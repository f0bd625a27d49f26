"""Training a draft head: training-time test (Li et al. 2025, section 3.1) over hidden states of the target."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specexport.heads.config import HeadConfig
from specexport.heads.eagle import default_taps
from specexport.heads.kinds import find_kind
from specexport.heads.layered import StepResult, unroll
from specexport.heads.modules import DraftHead, FeatureProjection
from specexport.heads.write import write_head
from specexport.train.options import TrainOptions
from specexport.train.student import Batch, DraftDescription, Guess, shift_left
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.executors.base import Int32Array

BEST_ROWS = 512  # hidden states whose logits over the whole vocabulary are held at a time

LARGE_VOCABULARY, DRAFT_VOCABULARY = 32_768, 16_384
MLP_RATIO = 3.2
"""Width of the MLP: the one layer of a head is most of its step, beside the LM head."""


class Target(NamedTuple):
    """What of the target a head's training needs."""

    whole: Tensor  # its LM head, bfloat16 [V, H]
    ids: Tensor  # token ids of the head's LM head, int64 [N]
    rows: Tensor  # the rows of ``whole`` for them, [N, H]
    softcap: float = 0.0  # bound of its logits; 0 for none

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., N] of what its LM head reads [..., H], for the head's tokens."""
        logits = hidden.to(self.rows.dtype) @ self.rows.T
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def best(self, hidden: Tensor) -> Tensor:
        """Its best token ids of hidden states [n, H], over its whole vocabulary."""
        return torch.cat([(part.to(self.whole.dtype) @ self.whole.T).argmax(-1) for part in hidden.split(BEST_ROWS)])


class HeadStudent:
    """A head in training, with its projection. See :class:`specexport.train.student.Student`."""

    def __init__(self, head: DraftHead, projection: FeatureProjection, target: Target) -> None:
        self.head, self.projection, self.target = head, projection, target
        self.modules = torch.nn.ModuleDict({"head": head, "projection": projection})
        head.embed_tokens.weight.requires_grad_(False)

    def describe(self) -> dict[str, Any]:
        """Its LM head's tokens: what else it is made of, its target and its kind say."""
        return {"draft_vocab_size": len(self.target.ids)}

    def losses(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Of each draft step, over the head's own tokens."""
        for result in self._unroll(batch, steps):
            yield self._loss(batch, result)

    def guesses(self, batch: Batch, steps: int) -> Iterator[Guess]:
        """Its best tokens; each step reads what the head itself gave at this place in the steps before."""
        best = self.target.best(batch.last.flatten(0, 1)).view(batch.tokens.shape)
        for step, result in enumerate(self._unroll(batch, steps)):
            loss = None if step else float(self._loss(batch, result))
            drafted = self.target.ids[result.logits.argmax(-1)]
            yield Guess(drafted, shift_left(best, result.offset), result.valid, result.offset, loss)

    def _unroll(self, batch: Batch, steps: int) -> Iterator[StepResult]:
        features = self.projection([state[:, :-1] for state in batch.states])
        return unroll(self.head, batch.tokens, features, batch.lengths, steps)

    def _loss(self, batch: Batch, result: StepResult) -> Tensor:
        width, offset = result.logits.shape[1], result.offset
        with torch.no_grad():
            last = torch.nn.functional.pad(batch.last[:, offset:], (0, 0, 0, offset))[:, :width]
            wanted = self.target.logits(last)
        return masked_cross_entropy(result.logits, wanted, result.valid)


class HeadTrainingPlan:
    """How a head is made of a target. See :class:`specexport.train.student.Plan`.

    ``texts`` are token ids that the target wrote: the tokens of the LM head are counted there.
    """

    def __init__(self, options: TrainOptions, checkpoint: Any, texts: Sequence[Sequence[int]]) -> None:
        self._options, self._model = options, checkpoint.model
        text = self._model.config.get_text_config()
        size = draft_size(options.draft_vocab_size, checkpoint.vocab_size)
        self._ids = count_ids(texts, size, checkpoint.vocab_size, checkpoint.eos_token_ids)
        self._softcap = float(getattr(text, "final_logit_softcapping", None) or 0.0)
        self._config: HeadConfig = new_config(options.head_kind, text, checkpoint.vocab_size, len(self._ids))

    @property
    def taps(self) -> Sequence[int]:
        """The taps that its configuration names."""
        return self._config.taps

    def make(self, note: Callable[[str], None]) -> HeadStudent:  # noqa: ARG002  # it is made at once
        """A random head over the target's embedding, with the target's rows in its LM head."""
        model: Any = self._model
        make = find_kind(self._config).make
        assert make is not None  # noqa: S101 - the options allow kinds that can be trained
        head, projection = make(self._config), FeatureProjection(self._config)
        table, rows = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
        head.embed_tokens.weight.data = table
        kept = torch.from_numpy(self._ids.astype(np.int64))
        head.lm_head.weight.data = rows[kept].clone()
        del self._model
        return HeadStudent(head, projection, Target(rows.bfloat16(), kept, rows[kept].bfloat16(), self._softcap))

    def write(self, folder: Path, student: Any) -> None:
        """In the format of speculators."""
        write_head(
            folder,
            self._config,
            student.head,
            student.projection,
            ids=None if len(self._ids) == self._config.vocab_size else self._ids,
            verifier=Path(self._options.target).name,
            lookahead=self._options.draft_steps,
        )

    def describe(self) -> DraftDescription:
        """For the model card."""
        name = Path(self._options.target).name
        return DraftDescription(
            title=f"A draft head for {name}",
            form=f"Kind {self._options.kind}, in the format of speculators.",
            use=f"Use it with `specexport build {name} --head FOLDER`. "
            "The embedding is the target's, and is not in the files.",
            flag="--head",
        )


def new_config(kind: str, target: Any, vocab_size: int, draft_vocab_size: int) -> HeadConfig:
    """A head of one layer for a target as transformers configures it; EAGLE-3 has a norm a hidden state."""
    width, layers = int(target.hidden_size), int(target.num_hidden_layers)
    head_dim = 64 if width < 512 else 128
    heads = 2 ** max(1, math.ceil(math.log2(width / head_dim)))
    mlp = 128 * math.ceil(MLP_RATIO * width / 128)
    several = kind == "eagle3"
    return HeadConfig(
        kind=kind,
        layer_config={
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 4),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": int(getattr(target, "max_position_embeddings", None) or 32_768),
        },
        taps=tuple(sorted({max(0, tap) for tap in default_taps(layers)})) if several else (AFTER_NORM,),
        target_hidden_size=width,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        projects=several,
        norm_before_residual=several,
        fc_norm=several,
        norm_output=not several,  # as the target's own, which an MTP module reads
    )


def draft_size(asked: int | None, vocab_size: int) -> int:
    """N, the tokens of a new head's LM head."""
    return min(asked or (DRAFT_VOCABULARY if vocab_size > LARGE_VOCABULARY else vocab_size), vocab_size)


def count_ids(texts: Iterable[Sequence[int]], size: int, vocab_size: int, keep: Iterable[int]) -> Int32Array:
    """Token ids of an LM head, int32 [size], ascending: the target's most frequent ones, and those to ``keep``."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    seen = sorted(counts, key=lambda token: (-counts[token], token))
    order = dict.fromkeys([*(token for token in keep if 0 <= token < vocab_size), *seen, *range(vocab_size)])
    return np.array(sorted(list(order)[:size]), np.int32)


def masked_cross_entropy(logits: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Mean cross entropy of a head's distribution under the target's, of logits [B, T, N], where ``valid`` [B, T]."""
    places = valid.flatten()
    log_q = functional.log_softmax(logits.flatten(0, 1)[places].float(), dim=-1)
    p = functional.softmax(target.flatten(0, 1)[places].float(), dim=-1)
    return -(p * log_q).sum(dim=-1).mean()
