"""MTP modules in torch: a decoder layer as the target's own, over an embedding and the hidden state before it.

DeepSeek-V3 (DeepSeek-AI 2024, section 2.2): ``h' = layer(M [norm(h_i), norm(emb(t_{i+1}))])``, and the LM head after a
norm. Which of the two comes first in the file's matrix, and whether the norm is before or after what the next step
reads, differs by writer. ``mtp_files`` finds modules in checkpoints, and knows their names.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from specexport.checkpoint.load import quiet_transformers
from specexport.heads.config import HeadConfig, TargetFacts
from specexport.heads.files import HeadFiles, is_named
from specexport.heads.kind import AFTER_LAST, BEFORE_NORM, SWAPPED, Reading
from specexport.heads.layered import layered_kind, load_layered, read_layer_settings, read_layered
from specexport.heads.modules import DraftHead, RunModule, body_config, norm_class
from specexport.heads.mtp_files import EMBED_NORM, name_beside_module, num_modules, stored_name
from specexport_runtime.abi import AFTER_NORM
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


def read_module(files: HeadFiles, target: TargetFacts) -> HeadConfig:
    """What MTP modules compute, one or several in turn; raises CheckpointError as ``read_layered`` does."""
    config = read_layered(files, target, "mtp", _read_layer_config(files), (AFTER_NORM,), "the target's checkpoint")
    # What writers of these names mean, as far as it is known; a checkpoint says nothing of it.
    stored = {key.rpartition(".")[0].rpartition(".")[2] for _, key in files.stored.values()}
    norm_output = bool(files.values.get("norm_output", "enorm" not in stored))
    return replace(config, norm_output=norm_output, feature_first="token_layernorm" in stored and not is_named(files))


def _read_layer_config(files: HeadFiles) -> dict[str, Any]:
    """Configuration of a layer for each module: the target's own, with the kinds of layers that the tensors have."""
    count = num_modules(files)
    sparse = [any(f"layers.{i}." in name and ".experts." in name for name in files.shapes) for i in range(count)]
    config = {key: value for key, value in read_layer_settings(files).items() if value is not None}
    config["num_hidden_layers"] = count
    choices: dict[str, Any] = {
        "layer_types": [_attention(files, i) for i in range(count)],
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "first_k_dense_replace": sparse.index(True) if any(sparse) else count,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, each in enumerate(sparse) if not each],
    }
    return config | {key: value for key, value in choices.items() if key in config}


def _attention(files: HeadFiles, number: int) -> str:
    """The kind of a layer; those with sinks see a window (MiMo-V2)."""
    sinks = any(name.startswith(f"layers.{number}.self_attn.") and "sink" in name for name in files.shapes)
    return "sliding_attention" if sinks else "full_attention"


def readings_of_module(config: HeadConfig, num_layers: int) -> Sequence[Reading]:
    """All there are: checkpoints say nothing of these, and one wrong choice hides what another is worth."""
    found = []
    firsts, outputs = ((own, not own) for own in (config.feature_first, config.norm_output))
    others = (AFTER_NORM,) if config.taps == (num_layers,) else (num_layers,)
    for taps, first, output in product((config.taps, others), firsts, outputs):
        changes = [
            (AFTER_LAST if taps == (AFTER_NORM,) else BEFORE_NORM) if taps != config.taps else "",
            SWAPPED if first != config.feature_first else "",
            f"norm_output {str(output).lower()}" if output != config.norm_output else "",
        ]
        reading = replace(config, taps=taps, feature_first=first, norm_output=output)
        found.append(Reading(reading, ", ".join(filter(None, changes))))
    return found


KIND = layered_kind(
    name="mtp",
    called="an MTP module",
    recognizes=lambda files: not is_named(files) and EMBED_NORM in files.shapes,
    read=read_module,
    load=partial(load_layered, MtpHead, load_body=load_body),
    readings=readings_of_module,
    speculators=("mtp",),
    our_name=name_beside_module,
    make=MtpHead,
    architecture="MTPDraftModel",
    stored_name=stored_name,
)
