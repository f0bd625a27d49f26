"""A draft head in memory, and giving modules the tensors of its files."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specexport.heads.config import HeadConfig
from specexport.heads.files import HeadFiles
from specexport.heads.modules import FeatureProjection
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from specexport_runtime.executors.base import Float32Array, Int32Array


class HeadCorrection(NamedTuple):
    """What corrects a head's logits by the token in front of a place; see the runtime's ``drafters.correction``."""

    rule: str
    tables: Mapping[str, Float32Array]  # by name
    most: int  # how many tokens of a place it looks at


class LoadedHead(NamedTuple):
    """A head that can run."""

    config: HeadConfig
    head: Any  # its module, in eval mode
    projection: FeatureProjection  # what is part of the target's graph
    ids: Int32Array | None  # token ids of its LM head, int32 [N], ascending; None where it has all
    # what is fed for unknown tokens, float32 [E]; None for a head that reads no feature for them, or has no such tokens
    mask_feature: Float32Array | None = None
    correction: HeadCorrection | None = None  # None: logits stay as the module gives them


class TargetTables(NamedTuple):
    """What a head may share with its target."""

    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]


def load_projection(
    files: HeadFiles,
    config: HeadConfig,
    dtype: torch.dtype,
    make: Callable[[HeadConfig], FeatureProjection] = FeatureProjection,
) -> FeatureProjection:
    """The part of a head that belongs to the target's graph; raises CheckpointError as :func:`fill_module` does."""
    projection = make(config)
    fill_module(projection, files, {name: name for name in projection.state_dict()})
    projection.to(dtype).eval().requires_grad_(False)
    return projection


def fill_module(module: Any, files: HeadFiles, names: Mapping[str, str]) -> None:
    """Give a module's parameters tensors of the files, as ``names`` says; CheckpointError if one does not fit."""
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


@contextmanager
def convert_module_errors(
    files: HeadFiles, *, what: str = "layers", whose: str = "its configuration"
) -> Iterator[None]:
    """Make modules; CheckpointError where none can be made of what a configuration says."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # sizes that do not fit one another, an unknown kind of rotary embedding
        raise CheckpointError(
            f"the head {files.name}: no {what} can be made of {whose} ({type(error).__name__}: {error}).",
            "fetch the head again.",
        ) from error


def refuse_variant(files: HeadFiles, unknown: Set[str], lacking: str, hint: str) -> None:
    """Refuse tensors that compute something else: a head without them would be slow, not wrong."""
    if unknown:
        raise UnsupportedModelError(
            f"the head {files.name} has {len(unknown)} tensors that {lacking}, for example {min(unknown)}: it is a "
            "variant that cannot be imported.",
            hint,
        )


def kept_ids(
    files: HeadFiles, config: HeadConfig, name: str, ids_of: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> Int32Array | None:
    """Token id of each row of an LM head, in their order, as the tensor ``name`` says; None where it is not there.

    ``ids_of`` makes ids of its values. Raises CheckpointError if rows have no ids, or the same ones.
    """
    if name not in files.shapes:
        if config.draft_vocab_size == config.vocab_size:
            return None
        raise CheckpointError(
            f"the head {files.name} has {config.draft_vocab_size} of {config.vocab_size} tokens, and no {name} that "
            "says which.",
            "give the complete head.",
        )
    ids = ids_of(files.tensor(name).flatten().long().numpy())
    known = np.unique(ids)
    if not len(known) == len(ids) == config.draft_vocab_size or known[0] < 0 or known[-1] >= config.vocab_size:
        raise CheckpointError(
            f"the head {files.name}: {name} does not name {config.draft_vocab_size} different tokens below "
            f"{config.vocab_size}.",
            "give the complete head.",
        )
    return ids.astype(np.int32)
