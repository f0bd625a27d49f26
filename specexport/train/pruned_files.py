"""A pruned draft in files: an ordinary checkpoint folder, which transformers and ``specexport build`` read."""

import errno
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from specexport.atomic import write_text
from specexport.checkpoint.load import load_checkpoint, quiet_transformers
from specexport.checkpoint.loaded import Checkpoint
from specexport.train.options import refuse_pruning
from specexport_runtime.errors import CheckpointError, UserInputError

_CONFIG = "config.json"
_ONE_FILE = "100TB"
_PROOF_TOKENS = 32
LAYERS_NAME = "pruned_layers.json"


def round_weights(model: Any) -> None:
    """Give a model the values that its weights will have in a file."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())


def write_draft(folder: Path, model: Any, target: Checkpoint) -> None:
    """Write a model with the target's tokenizer, weights in bfloat16, to an empty folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save(folder, model, target)
    except OSError as error:
        raise UserInputError(f"{folder} cannot be written ({error.strerror}).", "choose another place.") from error


def check_files(folder: Path, model: Any) -> Any:
    """Load what :func:`write_draft` wrote, in float32, and compare; UnsupportedModelError if it differs."""
    tokens = torch.tensor([[(11 * i + 5) % model.config.get_text_config().vocab_size for i in range(_PROOF_TOKENS)]])
    reason = "without some layers it is no model that its configuration can describe"
    try:
        loaded: Any = load_checkpoint(str(folder)).model
        with torch.no_grad():
            wanted, found = (each(input_ids=tokens, use_cache=False).logits for each in (model, loaded))
    except (CheckpointError, ValueError, RuntimeError, IndexError) as error:  # layers are of other kinds by their place
        raise refuse_pruning(model, f"{reason} ({str(error).splitlines()[0]})") from error
    if not torch.allclose(found, wanted, rtol=0, atol=1e-4 * max(1.0, float(wanted.abs().max()))):
        raise refuse_pruning(model, reason)
    return loaded


def _save(folder: Path, model: Any, target: Checkpoint) -> None:
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    parameters = {id(each): each.detach().bfloat16() for each in model.parameters()}  # a tied weight is one
    named = dict(model.named_parameters(remove_duplicate=False))
    state = {name: parameters.get(id(named.get(name)), value) for name, value in model.state_dict().items()}
    before = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=target.bos_token_id, eos_token_id=list(target.eos_token_ids) or None
    )
    try:
        with quiet_transformers():
            model.save_pretrained(folder, state_dict=state, max_shard_size=_ONE_FILE)
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer.from_str(target.tokenizer_json.decode()), **target.special_tokens
            )
            tokenizer.chat_template = target.chat_template
            tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # what the operating system said is in its text alone
        raise OSError(errno.EIO, str(error)) from error
    finally:
        model.generation_config = before
    path = folder / _CONFIG
    values = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "bfloat16"}  # the model's own is that in memory
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    mode = path.stat().st_mode
    for path in folder.iterdir():  # safetensors' own files are for their owner alone
        path.chmod(mode)


def write_layers(folder: Path, told: dict[str, Any]) -> None:
    """Keep what a folder was made of beside it."""
    write_text(folder / LAYERS_NAME, json.dumps(told) + "\n")


def read_layers(folder: Path) -> dict[str, Any]:
    """What :func:`write_layers` kept; empty where there is nothing, or nothing that can be read."""
    try:
        found = json.loads((folder / LAYERS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
