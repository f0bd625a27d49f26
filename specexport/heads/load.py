"""Loading a draft head, with what it takes from its target."""

import numpy as np
import torch

from specexport.heads.config import HeadConfig
from specexport.heads.files import MASK, HeadFiles
from specexport.heads.loaded import LoadedHead, TargetTables, fill_module, load_projection, make_head
from specexport.heads.modules import FeatureProjection, make_body
from specexport.heads.mtp import load_body
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from specexport_runtime.executors.base import Float32Array, Int32Array


def load_head(files: HeadFiles, config: HeadConfig, tables: TargetTables, dtype: torch.dtype) -> LoadedHead:
    """Load a head; an embedding or LM head that its files lack is the target's.

    Raises CheckpointError if tensors are missing, or have other shapes than the configuration says, and
    UnsupportedModelError if there are tensors of a variant.
    """
    if config.kind == "medusa":
        from specexport.heads.medusa import load_medusa

        return load_medusa(files, config, tables, dtype)
    if config.kind == "hydra":
        from specexport.heads.hydra import load_hydra

        return load_hydra(files, config, tables, dtype)
    if config.kind == "assistant":
        from specexport.heads.assistant import load_assistant

        return load_assistant(files, config, tables, dtype)
    try:
        with torch.device("meta"):
            head = make_head(config)
        head.to_empty(device="cpu")
        head.body.rotary_emb = make_body(config).rotary_emb  # its buffers are in no file
    except Exception as error:  # sizes that do not fit one another, an unknown kind of rotary embedding
        raise CheckpointError(
            f"the head {files.name}: no layers can be made of its configuration ({type(error).__name__}: {error}).",
            "fetch the head again.",
        ) from error
    if config.kind == "mtp":
        head.body = load_body(files, config, dtype)
    names = {name: name.removeprefix("body.") for name in head.state_dict() if not _is_loaded(config, name)}
    shared = {"embed_tokens.weight", "lm_head.weight"} - files.shapes.keys()
    fill_module(head, files, {name: stored for name, stored in names.items() if name not in shared})
    projection = load_projection(files, config, dtype)
    if config.kind == "dflash":
        _refuse_unknown(files, {*names.values(), *projection.state_dict(), "d2t"})
    ids = _head_ids(files, config)
    if shared and tables.embedding.shape[1] != config.hidden_size:
        raise CheckpointError(
            f"the head {files.name} lacks {sorted(shared)[0]}, and the target's does not fit: it has "
            f"{tables.embedding.shape[1]} values a token, and the head {config.hidden_size}.",
            "give a head that was made for this target.",
        )
    if "embed_tokens.weight" in shared:
        head.embed_tokens.weight = torch.nn.Parameter(tables.embedding, requires_grad=False)
    if "lm_head.weight" in shared:
        rows = tables.lm_head if ids is None else tables.lm_head[torch.from_numpy(ids.astype(np.int64))]
        head.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)
    elif "d2t" in files.shapes:  # rows in the order of their ids
        order = torch.from_numpy(np.argsort(_row_ids(files), kind="stable"))
        head.lm_head.weight.data = head.lm_head.weight.data[order]
    head = head.to(dtype).eval().requires_grad_(False)
    return LoadedHead(config, head, projection, ids, _mask_feature(files, config, projection))


def _is_loaded(config: HeadConfig, name: str) -> bool:
    """Whether a weight came with the layers."""
    return config.kind == "mtp" and name.startswith("body.")


def _mask_feature(files: HeadFiles, config: HeadConfig, projection: FeatureProjection) -> Float32Array | None:
    if config.mask_token_id is None or config.kind == "dflash":
        return None
    states = files.tensor(MASK).flatten().to(next(projection.parameters()).dtype)
    if len(states) != len(config.taps) * config.target_hidden_size:
        raise CheckpointError(
            f"the head {files.name}: {MASK} has {len(states)} values, and {len(config.taps)} hidden states of "
            f"{config.target_hidden_size} are read.",
            "give a head whose config.json belongs to its weights.",
        )
    with torch.no_grad():
        feature: Float32Array = projection(list(states.split(config.target_hidden_size))).float().numpy()
    return feature


def _refuse_unknown(files: HeadFiles, known: set[str]) -> None:
    """Refuse tensors of a variant, which computes something else: a head without them would be slow, not wrong."""
    unknown = sorted(files.shapes.keys() - known)
    if unknown:
        raise UnsupportedModelError(
            f"the head {files.name} has {len(unknown)} tensors that its kind does not have, for example {unknown[0]}: "
            "it is a variant that cannot be imported.",
            "give a plain DFlash head, or an EAGLE-3 or P-EAGLE head.",
        )


def _row_ids(files: HeadFiles) -> np.ndarray:
    """Token id of each row of the LM head: ``d2t`` holds offsets from the row's own number."""
    offsets: np.ndarray = files.tensor("d2t").long().numpy()
    ids: np.ndarray = np.arange(len(offsets)) + offsets
    return ids


def _head_ids(files: HeadFiles, config: HeadConfig) -> Int32Array | None:
    if "d2t" not in files.shapes:
        if config.draft_vocab_size != config.vocab_size:
            raise CheckpointError(
                f"the head {files.name} has {config.draft_vocab_size} of {config.vocab_size} tokens, and no d2t that "
                "says which.",
                "give the complete head.",
            )
        return None
    ids = np.sort(_row_ids(files))
    if len(ids) != config.draft_vocab_size or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise CheckpointError(
            f"the head {files.name}: d2t does not name {config.draft_vocab_size} different tokens below "
            f"{config.vocab_size}.",
            "give the complete head.",
        )
    return None if len(ids) == config.vocab_size else ids.astype(np.int32)
