"""A draft head in memory, and giving modules the tensors of its files."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.heads.config import HeadConfig
from specexport.heads.files import HeadFiles
from specexport.heads.modules import DraftHead, FeatureProjection
from specexport_runtime.errors import CheckpointError
from specexport_runtime.executors.base import Float32Array, Int32Array


class LoadedHead(NamedTuple):
    """A head that can run."""

    config: HeadConfig
    head: Any  # in eval mode: a ``DraftHead``, ``MedusaHeads``, ``HydraHeads`` or ``AssistantHead``
    projection: FeatureProjection  # what is part of the target's graph
    ids: Int32Array | None  # token ids of its LM head, int32 [N], ascending; None where it has all
    # what a parallel head is fed for unknown tokens, float32 [E]; None for others, and for a DFlash head, which reads
    # none for them
    mask_feature: Float32Array | None = None


class TargetTables(NamedTuple):
    """What a head may share with its target."""

    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]


def load_projection(files: HeadFiles, config: HeadConfig, dtype: torch.dtype) -> FeatureProjection:
    """The part of a head that belongs to the target's graph; raises CheckpointError as :func:`fill_module` does."""
    projection = make_projection(config)
    fill_module(projection, files, {name: name for name in projection.state_dict()})
    projection.to(dtype).eval().requires_grad_(False)
    return projection


def fill_module(module: Any, files: HeadFiles, names: Mapping[str, str]) -> None:
    """Give a module's parameters the tensors of the files; ``names`` has the tensor of each parameter.

    Raises CheckpointError if tensors are missing, or have other shapes than the configuration says.
    """
    state = module.state_dict()
    missing = sorted(stored for stored in names.values() if stored not in files.shapes)
    if missing:
        raise CheckpointError(
            f"the head {files.name} lacks {len(missing)} tensors, for example {missing[0]}.", "give the complete head."
        )
    for name, stored in names.items():
        if files.shapes[stored] != tuple(state[name].shape):
            raise CheckpointError(
                f"the head {files.name}: {stored} is {list(files.shapes[stored])}, and by its configuration it would "
                f"be {list(state[name].shape)}.",
                "give a head whose config.json belongs to its weights.",
            )
    module.load_state_dict({name: files.tensor(stored) for name, stored in names.items()}, strict=False, assign=True)


def make_head(config: HeadConfig) -> DraftHead:
    """A head of the configuration's kind, before it is given weights."""
    from specexport.heads.dflash import BlockHead
    from specexport.heads.modules import Eagle3Head, EagleHead
    from specexport.heads.mtp import MtpHead

    kinds = {"eagle3": Eagle3Head, "eagle": EagleHead, "mtp": MtpHead, "dflash": BlockHead}
    return kinds[config.kind](config)


def make_projection(config: HeadConfig) -> FeatureProjection:
    """What is part of the target's graph for a head, before it is given weights."""
    from specexport.heads.dflash import ContextProjection

    return ContextProjection(config) if config.kind == "dflash" else FeatureProjection(config)
