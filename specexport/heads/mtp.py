"""MTP modules in torch: a decoder layer as the target's own, over an embedding and the hidden state before it.

DeepSeek-V3 (DeepSeek-AI 2024, section 2.2): ``h' = layer(M [norm(h_i), norm(emb(t_{i+1}))])``, and the LM head behind a
norm. Which of the two comes first in the file's matrix, and whether the norm is before or behind what the next step
reads, differs by writer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specexport.checkpoint.load import quiet_transformers
from specexport.heads.config import HeadConfig
from specexport.heads.files import HeadFiles
from specexport.heads.modules import DraftHead, RunModule, body_config, norm_class
from specexport_runtime.errors import CheckpointError, UnsupportedModelError


class MtpHead(DraftHead):
    """One MTP module, run again on its own hidden state for every further token."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, norm = config.hidden_size, norm_class(config)
        self.embed_norm, self.feature_norm = norm(width), norm(width)
        self.fc = nn.Linear(2 * width, width, bias=False)

    def hidden(self, embedded: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """See :meth:`DraftHead.hidden`."""
        state: Tensor = self.fc(self.side_by_side(self.embed_norm(embedded), self.feature_norm(features)))
        for layer in self.body.layers:
            state = run(layer, state)
        return state


def load_body(files: HeadFiles, config: HeadConfig, dtype: torch.dtype) -> Any:
    """The decoder layers of an MTP module and its last norm, loaded as transformers loads those of the target.

    Checkpoints store experts one by one and transformers joins them, so its own loading is what reads them right.
    Raises CheckpointError if tensors are missing, or have other shapes than the configuration says, and
    UnsupportedModelError if transformers has no model of this kind.
    """
    from transformers import AutoModelForCausalLM

    made = body_config(config)
    kind = AutoModelForCausalLM._model_mapping.get(type(made), None)
    if kind is None:
        raise UnsupportedModelError(
            f"{files.name}: transformers has no layers of {made.model_type} in its own code.", "draft with `lookup`."
        )
    prefix = kind.base_model_prefix + "."
    names = [name for name in files.shapes if name.startswith("layers.") or name == "norm.weight"]
    state = {prefix + name: files.tensor(name) for name in names}
    dummy = torch.zeros(1, config.hidden_size)  # a table of one row, for there is no vocabulary here
    state |= {prefix + "embed_tokens.weight": dummy, "lm_head.weight": dummy.clone()}
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(
                None, config=made, state_dict=state, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # shapes that do not fit
        raise CheckpointError(
            f"{files.name}: its MTP module cannot be loaded ({type(error).__name__}: {error}).",
            "give a checkpoint whose config.json belongs to its weights.",
        ) from error
    missing = sorted(name.removeprefix(prefix) for name in report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{files.name}: its MTP module lacks {len(missing)} tensors, for example {missing[0]}.",
            "give the complete checkpoint.",
        )
    body = getattr(model, kind.base_model_prefix)
    del body.embed_tokens
    return body
