"""GGUF files in parts are read as the file that they are parts of, or refused by their own count."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.source import gguf_parts, hash_checkpoint
from specexport.trace.check import compute_reference_logits
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import GROUPED, make_model

TENSORS = 27
"""Of the model: 2 layers of 12, and 3 more, of which the LM head is the last."""
SEQUENCES = [[5, 9, 200, 31, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file; its LM head in a part of its own; and four parts."""
    folder = tmp_path_factory.mktemp("parts")
    model = make_model("Qwen2", GROUPED)
    assert not model.config.tie_word_embeddings
    assert len(model.state_dict()) == TENSORS
    assert list(model.state_dict())[-1] == "lm_head.weight"
    for name, split in (("whole", 0), ("head", TENSORS - 1), ("many", 7)):
        write_gguf(model, folder / f"{name}.gguf", split=split, kinds={"mlp.down_proj": "Q8_0"})
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("given", ["head-00001-of-00002", "head-00002-of-00002", "many-00003-of-00004"])
@pytest.mark.parametrize("stream", [False, True])
def test_parts_are_the_whole_file(folder: Path, given: str, stream: bool) -> None:
    whole = load_checkpoint(str(folder / "whole.gguf"), stream=stream)
    parts = load_checkpoint(str(folder / f"{given}.gguf"), stream=stream)
    assert parts.source == f"{given[:5]}00001{given[-9:]}.gguf"
    assert bool(parts.stored) == stream
    read = parts.model.state_dict() if not stream else {name: weight.whole() for name, weight in parts.stored.items()}
    wanted = whole.model.state_dict() if not stream else {name: weight.whole() for name, weight in whole.stored.items()}
    assert read.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_array_equal(read[name].numpy(), weight.numpy())
    if not stream:
        np.testing.assert_array_equal(
            compute_reference_logits(parts, SEQUENCES)[0], compute_reference_logits(whole, SEQUENCES)[0]
        )


def test_kept_weights_are_read_from_the_part_that_they_lie_in(tmp_path: Path) -> None:
    for name, split in (("whole", 0), ("many", 7)):
        write_gguf(make_model("Qwen2", GROUPED), tmp_path / f"{name}.gguf", split=split, kinds={"": "Q8_0"})
    whole = load_checkpoint(str(tmp_path / "whole.gguf"), keep=True, stream=True).kept
    parts = load_checkpoint(str(tmp_path / "many-00001-of-00004.gguf"), keep=True, stream=True).kept
    assert whole.keys() == parts.keys()
    for name, weight in whole.items():
        np.testing.assert_array_equal(weight.floats(), parts[name].floats())


def test_the_hash_is_over_all_parts(copy: Path) -> None:
    first, last = (copy / f"head-0000{number}-of-00002.gguf" for number in (1, 2))
    before = hash_checkpoint(str(first))
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert hash_checkpoint(str(first)) != before


def test_parts_that_are_links_go_by_the_names_of_the_links(copy: Path) -> None:
    wanted = load_checkpoint(str(copy / "whole.gguf")).model.state_dict()
    for number, path in enumerate(sorted(copy.glob("many-*.gguf"))):
        path.rename(copy / f"{9 - number:064x}")
        path.symlink_to(f"{9 - number:064x}")
    found = load_checkpoint(str(copy / "many-00001-of-00004.gguf")).model.state_dict()
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name].numpy(), weight.numpy())


@pytest.mark.parametrize("spelling", [str.upper, str.title])
def test_names_of_parts_may_be_spelled_in_capitals(copy: Path, spelling: Callable[[str], str]) -> None:
    paths = [path.rename(copy / spelling(path.name)) for path in sorted(copy.glob("many-*.gguf"))]
    for given in paths:
        assert gguf_parts(given) == tuple(paths)
    found, wanted = (load_checkpoint(str(path)).model.state_dict() for path in (paths[1], copy / "whole.gguf"))
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name].numpy(), weight.numpy())


def test_a_missing_part_is_named(copy: Path) -> None:
    """The one with the LM head: without it the model would have the embedding as its head."""
    (copy / "head-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"part 2, head-00002-of-00002\.gguf, is not beside it"):
        load_checkpoint(str(copy / "head-00001-of-00002.gguf"))


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("head-00001-of-00002", "model", r"model\.gguf is named as a whole file, and says that it is one of 2 parts"),
        ("head-00001-of-00002", "model-00001-of-00001", r"named as a whole file, and says that it is one of 2 parts"),
        ("many-00002-of-00004", "head-00002-of-00002", r"named as one of 2 parts, and says that it is one of 4 parts"),
        ("whole", "head-00002-of-00002", r"named as one of 2 parts, and says of itself that it is whole"),
        ("head-00001-of-00002", "head-00002-of-00002", r"named as part 2, and says that it is part 1"),
    ],
)
def test_parts_that_their_names_lie_about_are_refused(copy: Path, source: str, name: str, said: str) -> None:
    shutil.copy(copy / f"{source}.gguf", copy / "taken")
    (copy / "taken").replace(copy / f"{name}.gguf")
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(str(copy / f"{name}.gguf"))


def test_parts_of_two_files_are_refused(copy: Path) -> None:
    """Of another model with as many parts: there is a tensor twice, or fewer than are counted."""
    write_gguf(make_model("Qwen2", GROUPED), copy / "other.gguf", split=14)
    shutil.copy(copy / "other-00002-of-00002.gguf", copy / "head-00002-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"is in two of its parts|counts \d+ tensors in all parts"):
        load_checkpoint(str(copy / "head-00001-of-00002.gguf"))
