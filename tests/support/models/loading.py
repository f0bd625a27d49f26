"""Heads on disk, read for the small Llama that most tests of them draft for."""

from pathlib import Path
from typing import Any

import torch

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.source import resolve_source
from specexport.heads.config import TargetFacts
from specexport.heads.kinds import find_kind, open_head, read_config
from specexport.heads.loaded import TargetTables
from specexport.heads.mtp_files import open_mtp
from tests.support.models.tiny_heads import HIDDEN, LAYERS, VOCAB


def config_of(folder: Path, **changes: Any) -> Any:
    """A head's files and its configuration; ``changes`` are of another target."""
    files = open_head(resolve_source(str(folder), None))
    return files, read_config(files, TargetFacts(LAYERS, HIDDEN, VOCAB)._replace(**changes))


def load_head(files: Any, config: Any, tables: TargetTables) -> Any:
    return find_kind(config).load(files, config, tables, torch.float32)


def load_module(folder: Path, num_layers: int) -> tuple[Any, Any]:
    model: Any = load_checkpoint(str(folder), dtype="float32").model
    text = model.config.get_text_config()
    files = open_mtp(resolve_source(str(folder), None), text.to_dict())
    config = read_config(files, TargetFacts(num_layers, text.hidden_size, text.vocab_size))
    return model, load_head(files, config, tables_of(model))


def tables_of(model: Any) -> TargetTables:
    return TargetTables(*(t.weight.detach() for t in (model.get_input_embeddings(), model.get_output_embeddings())))


def load(folder: Path, target: Any) -> Any:
    """A head in memory, with the tables of ``target`` where its files lack some."""
    files, config = config_of(folder, text=target.config)
    return load_head(files, config, tables_of(target))
