"""Ids that a checkpoint's files state are taken as they stand there, or refused in one line."""

import json
from pathlib import Path

import pytest

from specexport.checkpoint.load import load_checkpoint
from specexport_runtime.errors import CheckpointError

NO_IDS = ['"</s>"', '"2"', "2.0", "2.5", "true", "[[2, 7]]", '[2, "7"]', "[2, null]", "[2, 7.0]", "-1", "{}", "[2, -7]"]


def state(folder: Path, name: str, key: str, value: str) -> None:
    path = folder / name
    found = json.loads(path.read_text(encoding="utf-8"))
    found[key] = "HERE"
    path.write_text(json.dumps(found).replace('"HERE"', value), encoding="utf-8")


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", NO_IDS)
def test_what_is_no_id_ends_no_text(folder: Path, name: str, value: str) -> None:
    state(folder, name, "eos_token_id", value)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(folder))
    assert str(caught.value).startswith(f"tiny: eos_token_id in {name} is {value}, which is no token id")


@pytest.mark.parametrize("value", ['"<s>"', '"1"', "1.0", "[1]", "false"])
def test_what_is_no_id_begins_no_text(folder: Path, value: str) -> None:
    state(folder, "config.json", "bos_token_id", value)
    with pytest.raises(CheckpointError, match=r"bos_token_id in config\.json is .*, which is no token id\. Fix: write"):
        load_checkpoint(str(folder))


@pytest.mark.parametrize("text", ["", '{"eos_token_id": [0, 11]', "\ufeff{}", "[]", "null", "[" * 9999, '"eos"'])
def test_a_generation_config_that_is_no_object_is_not_passed_over(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"^tiny: generation_config\.json (cannot be read|holds no JSON object)"):
        load_checkpoint(str(folder))


@pytest.mark.parametrize(("value", "ends"), [("[5, 7]", (5, 7, 2)), ("9", (9, 2)), ("null", (2,)), ("[]", (2,))])
def test_ids_are_taken_as_they_are(folder: Path, value: str, ends: tuple[int, ...]) -> None:
    state(folder, "generation_config.json", "eos_token_id", value)
    assert load_checkpoint(str(folder)).eos_token_ids == ends
    assert load_checkpoint(str(folder), stream=True).eos_token_ids == ends


def test_a_checkpoint_needs_no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_checkpoint(str(folder)).eos_token_ids == (2,)
