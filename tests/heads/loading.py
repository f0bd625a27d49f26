"""Heads on disk, read for the small Llama that most tests of them draft for."""

from pathlib import Path
from typing import Any

import torch
from tiny_heads import HIDDEN, LAYERS, VOCAB

from specexport.frontend.source import resolve_source
from specexport.heads.files import open_head
from specexport.heads.load import load_head
from specexport.heads.loaded import TargetTables
from specexport.heads.read import read_config


def config_of(folder: Path, **changes: Any) -> Any:
    """A head's files and its configuration; ``changes`` are sizes of another target."""
    files = open_head(resolve_source(str(folder), None))
    sizes = {"num_layers": LAYERS, "target_hidden_size": HIDDEN, "vocab_size": VOCAB} | changes
    return files, read_config(files, **sizes)


def load(folder: Path, target: Any) -> Any:
    """A head in memory, with the tables of ``target`` where its files lack some."""
    files, config = config_of(folder, target_layer=target.config.to_dict())
    tables = TargetTables(*(t.weight.detach() for t in (target.get_input_embeddings(), target.get_output_embeddings())))
    return load_head(files, config, tables, torch.float32)
