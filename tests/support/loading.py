"""Heads on disk, read for the small Llama that most tests of them draft for."""

from pathlib import Path
from typing import Any

import torch

from specexport.checkpoint import load_checkpoint
from specexport.checkpoint.source import resolve_source
from specexport.heads.files import open_head
from specexport.heads.load import load_head
from specexport.heads.loaded import TargetTables
from specexport.heads.mtp_files import open_mtp
from specexport.heads.read import read_config
from tests.support.tiny_heads import HIDDEN, LAYERS, VOCAB


def config_of(folder: Path, **changes: Any) -> Any:
    """A head's files and its configuration; ``changes`` are sizes of another target."""
    files = open_head(resolve_source(str(folder), None))
    sizes = {"num_layers": LAYERS, "target_hidden_size": HIDDEN, "vocab_size": VOCAB} | changes
    return files, read_config(files, **sizes)


def load_module(folder: Path, num_layers: int) -> tuple[Any, Any]:
    """The target of a folder and the MTP module in it."""
    model: Any = load_checkpoint(str(folder), dtype="float32").model
    values = model.config.get_text_config().to_dict()
    files = open_mtp(resolve_source(str(folder), None), values)
    width, vocab = values["hidden_size"], values["vocab_size"]
    config = read_config(files, num_layers=num_layers, target_hidden_size=width, vocab_size=vocab)
    return model, load_head(files, config, tables_of(model), torch.float32)


def tables_of(model: Any) -> TargetTables:
    return TargetTables(*(t.weight.detach() for t in (model.get_input_embeddings(), model.get_output_embeddings())))


def load(folder: Path, target: Any) -> Any:
    """A head in memory, with the tables of ``target`` where its files lack some."""
    files, config = config_of(folder, target_layer=target.config.to_dict())
    return load_head(files, config, tables_of(target), torch.float32)
