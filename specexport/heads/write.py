"""Writing a draft head in the format of speculators (vLLM), so that it serves elsewhere too."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specexport.atomic import write_file, write_text
from specexport.heads.config import HeadConfig
from specexport.heads.files import CONFIG_NAME
from specexport.heads.kinds import KINDS, find_kind
from specexport.heads.modules import DraftHead, FeatureProjection
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors.base import Int32Array

WEIGHTS_NAME = "model.safetensors"
FORMAT_VERSION = "0.9.0"
"""Of speculators, whose names and meanings these are."""


def write_head(
    folder: Path,  # created
    config: HeadConfig,
    head: DraftHead,
    projection: FeatureProjection,  # what the head reads features through
    *,
    ids: Int32Array | None,  # token ids of its LM head, ascending; None for all
    verifier: str,  # name of the target
    lookahead: int,  # draft tokens a round that it was trained for
) -> None:
    """Write a head that was trained here, in bfloat16 and without the embedding: that is the target's."""
    kind = find_kind(config)
    if kind.architecture is None:
        able = " or ".join(other.called for other in KINDS if other.architecture is not None)
        raise UnsupportedModelError(f"a head of kind {config.kind!r} cannot be written.", f"write {able}.")
    state = {name.removeprefix("body."): value for name, value in head.state_dict().items()}
    state.pop("embed_tokens.weight")
    state |= projection.state_dict()
    tensors = {kind.stored_name(name): value.detach().bfloat16().contiguous() for name, value in state.items()}
    if ids is not None:
        offsets = ids.astype(np.int64) - np.arange(len(ids))
        known = np.zeros(config.vocab_size, np.bool_)
        known[ids] = True
        tensors |= {"d2t": torch.from_numpy(offsets), "t2d": torch.from_numpy(known)}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS_NAME, tensors)
    write_text(
        folder / CONFIG_NAME, json.dumps(_make_config(config, kind.architecture, verifier, lookahead), indent=2) + "\n"
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file in one step; raises UserInputError if it cannot be written (a full disk)."""

    def write(temporary: Path) -> None:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors writes files that only their owner can read
        try:
            save_file(dict(tensors), temporary, None if metadata is None else dict(metadata))
        except SafetensorError as error:  # what the operating system said is in its text alone
            raise OSError(errno.EIO, str(error)) from error
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())

    write_file(path, write)


def _make_config(config: HeadConfig, architecture: str, verifier: str, lookahead: int) -> dict[str, Any]:
    """``config.json``."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": lookahead, "accept_tolerance": 0.0, "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "architectures": [architecture],
        "speculators_model_type": config.kind,
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": {**config.layer_config, "vocab_size": config.vocab_size},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **({"eagle_aux_hidden_state_layer_ids": list(config.taps)} if config.projects else {}),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
