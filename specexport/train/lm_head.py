"""From the last hidden state to logits as a model itself does it: its LM head, and what it does behind that."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from specexport.train.refuse import refuse_pruning

_PROOF_TOKENS = 16


class LmHead:
    """A model's way from what its LM head reads to its logits; factors and bounds on logits are in it.

    It is the model's own forward pass, with its layers replaced by a module that hands on what it is given. The weights
    are a bfloat16 copy; ``model`` is a transformers causal language model in float32. UnsupportedModelError: its
    forward pass cannot be split there.
    """

    def __init__(self, model: Any) -> None:
        body = model.base_model
        shell = copy.copy(model)
        parts = {name: _Given() if part is body else part for name, part in model._modules.items()}
        shell.__dict__["_modules"] = parts
        self._shell, self._dtype = shell, torch.float32
        tokens = torch.arange(1, 1 + _PROOF_TOKENS)[None] % model.config.get_text_config().vocab_size
        try:
            with torch.no_grad():
                wanted = model(input_ids=tokens, use_cache=False).logits
                hidden = body(input_ids=tokens, use_cache=False)[0]
                found = self(hidden[0])
        except Exception as error:  # it asks its layers for more than their output
            raise refuse_pruning(model, f"its LM head cannot be run alone ({type(error).__name__}: {error})") from error
        if not torch.allclose(found, wanted[0], rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
            raise refuse_pruning(model, "its logits do not follow from its last hidden state alone")
        head, self._dtype = model.get_output_embeddings(), torch.bfloat16
        shell.__dict__["_modules"] = {
            name: copy.deepcopy(part).bfloat16() if part is head else part for name, part in parts.items()
        }

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, H]."""
        logits: Tensor = self._shell(inputs_embeds=hidden[None].to(self._dtype), use_cache=False).logits[0]
        return logits


class _Given(nn.Module):  # type: ignore[misc]  # torch is not followed
    """In the place of a model's layers: its output is its input."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        return _Output(inputs_embeds)


class _Output(tuple[Tensor]):
    """What layers give, as models take it: by name or by number. There is nothing but the hidden state."""

    def __new__(cls, hidden: Tensor) -> "_Output":
        return super().__new__(cls, (hidden,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
