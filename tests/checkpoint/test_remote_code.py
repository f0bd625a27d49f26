"""A checkpoint may bring Python code; it must not run unless it is trusted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from specexport.checkpoint.source import hash_checkpoint
from specexport.verify.checkpoint import find_checkpoint
from specexport_runtime.bundle.entry import SourceEntry
from specexport_runtime.errors import CheckpointError
from tests.support.cases.entries import make_entry

CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import PretrainedConfig
class EvilConfig(PretrainedConfig):
    model_type = "evil"
"""
SCRIPT = """
import pathlib, sys
from specexport.checkpoint.load import load_checkpoint
from specexport_runtime.errors import SpecexportError
for trusted in (False, True):
    try:
        load_checkpoint(sys.argv[1], trust_remote_code=trusted)
    except SpecexportError:
        print(trusted, pathlib.Path(sys.argv[2]).exists())
"""


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    folder, marker = tmp_path / "evil", tmp_path / "marker"
    folder.mkdir()
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    (folder / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    # A process of its own: transformers copies such code to a folder that it chooses when it is imported.
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(marker)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.stdout.splitlines() == ["False False", "True True"], done.stderr


def test_a_checkpoint_whose_code_was_trusted_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.py").write_text("x = 1")
    (folder / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    for trusted in (False, True):
        sha256 = hash_checkpoint(str(folder), remote_code=trusted)
        entry = make_entry(source=SourceEntry("custom", sha256, "Custom"))
        manifest: Any = SimpleNamespace(models={"target": entry}, recipe={"trust_remote_code": trusted})
        assert find_checkpoint(manifest, "target", str(folder), tmp_path) == str(folder)
        assert find_checkpoint(manifest, "target", None, tmp_path / "bundle") == str(folder)
        (folder / "model.py").write_text(f"x = {trusted}")
        if trusted:
            with pytest.raises(CheckpointError, match="not what this target was built from"):
                find_checkpoint(manifest, "target", str(folder), tmp_path)


@pytest.mark.parametrize("cached", [False, True])
def test_nothing_is_fetched_that_only_a_bundle_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """A stranger's bundle: its checkpoint is sought on this machine, and a fetch must be asked for."""
    folder, asked = tmp_path / "hub" / "snapshot", []
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")

    def snapshot_download(repo_id: str, **named: Any) -> str:
        asked.append((repo_id, named["revision"], named.get("local_files_only", False)))
        if not cached and asked[-1][2]:
            raise LocalEntryNotFoundError("not there")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    entry = make_entry(source=SourceEntry("someone/model", hash_checkpoint(str(folder)), "Llama"))
    manifest: Any = SimpleNamespace(models={"target": entry}, recipe={"revision": "v1"})
    if cached:
        assert find_checkpoint(manifest, "target", None, tmp_path / "bundle") == str(folder)
    else:
        with pytest.raises(CheckpointError, match=r"not on this machine.*--checkpoint, or a hub id to fetch it from"):
            find_checkpoint(manifest, "target", None, tmp_path / "bundle")
    assert asked == [("someone/model", "v1", True)]
    assert find_checkpoint(manifest, "target", "someone/model", tmp_path / "bundle") == "someone/model"
    assert asked[1:] == [("someone/model", "v1", False)]
