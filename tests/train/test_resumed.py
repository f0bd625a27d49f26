"""A training that was ended, anywhere and by anything, goes on to the same bits; a folder that does not fit is told."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specexport.cli import main
from specexport.train import run, store
from specexport.train.options import TrainOptions
from specexport.train.run import train_draft
from specexport.train.store import FeatureStore
from specexport.train.work import LOCK_NAME, Paused, lock_folder
from specexport_runtime.errors import InvalidRequestError, UserInputError
from tests.support.models.tiny_models import make_llama, save_checkpoint
from tests.support.models.training import LAYERS, options

_KILLED = """
import os, signal, sys
from pathlib import Path
from specexport import atomic
from specexport.heads import write
from specexport.train import loop, run, store
from specexport.train.options import TrainOptions
from specexport_runtime import SpecEngine

place, target, prompts, bundle, output, *never = sys.argv[1:]
run.LOOK_EVERY, store.FILE_TOKENS = 4, 300
counts = {}

def kill_at(module, name, count, wanted=lambda *_: True):
    before = getattr(module, name)
    def instead(*given, **named):
        counts[name] = counts.get(name, 0) + wanted(*given)
        if counts[name] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*given, **named)
    setattr(module, name, instead)

def is_named(text):
    return lambda source, path, *_: text in str(path)

if place == "texts":  # half of the second group's last line is on the disk
    fsync = os.fsync
    def cut(descriptor):
        if len(open(output + ".work/texts.jsonl").readlines()) == 40:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 20)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)
    os.fsync = cut
elif place == "states":  # the second file is written, and not yet renamed
    kill_at(os, "replace", 2, is_named("states-"))
elif place == "batch":
    kill_at(loop.Trainer, "step", 11)
elif place == "state":  # the second saving is written, and not yet renamed
    kill_at(os, "replace", 2, is_named("state.safetensors"))
elif place == "draft":
    kill_at(os, "replace", 1, is_named("config.json"))
run.train_draft(TrainOptions(target, Path(output), (Path(prompts),), bundle=Path(bundle), max_tokens=24, batches=12,
                             batch_tokens=256, threads=1))
"""


@pytest.fixture
def stores_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FILE_TOKENS", 300)


@pytest.fixture(scope="module")
def whole(target: Path, prompts: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run gives that nothing ended; its files of hidden states are as many as they may be."""
    folder = tmp_path_factory.mktemp("whole") / "head"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LOOK_EVERY", 4)
        train_draft(options(target, prompts, bundle, folder))
    return folder


def check_same(folder: Path, whole: Path) -> None:
    """Of a draft and all that it was made of: every bit."""
    for name in ("model.safetensors", "config.json", "curve.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    works = [each.with_name(f"{each.name}.work") for each in (folder, whole)]
    first, second = ((each / "texts.jsonl").read_bytes() for each in works)
    assert first == second
    stores = [FeatureStore(each / "eagle3-states", made_of(each)) for each in works]
    assert len(stores[0]) == len(stores[1]) == 40
    for i in range(40):
        assert all(map(torch.equal, stores[0].read(i), stores[1].read(i)))
    for path in (works[0] / "eagle3-states").iterdir():
        with safe_open(path, framework="pt") as file:
            assert len(json.loads(file.metadata()["lengths"])) % store.BATCH == 0, path.name
    states = [load_file(each / "eagle3-state" / "state.safetensors") for each in works]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert sum(name.startswith("optimizer.") for name in states[0]) > 20
    left = [path for path in [*works[0].rglob("*"), *folder.parent.iterdir()] if ".tmp-" in path.name]
    assert not left


def made_of(work: Path) -> str:
    with safe_open(work / "eagle3-states" / "states-00000.safetensors", framework="pt") as file:
        return str(file.metadata()["made_of"])


@pytest.mark.bundle
@pytest.mark.parametrize("place", ["texts", "states", "batch", "state", "draft"])
def test_a_killed_run_goes_on_with_the_same_curve(
    place: str, whole: Path, target: Path, prompts: Path, bundle: Path, tmp_path: Path, saves_often: None,
    stores_often: None,
) -> None:  # fmt: skip
    places = [str(target), str(prompts), str(bundle), str(tmp_path / "cut")]
    ended = subprocess.run([sys.executable, "-c", _KILLED, place, *places], check=False, env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "cut").exists()
    work = tmp_path / "cut.work"
    assert (work / "eagle3-states" / "states-00000.safetensors").exists() == (place != "texts")
    assert (work / "eagle3-state" / "state.safetensors").exists() == (place in ("batch", "state", "draft"))
    notes: list[str] = []
    resumed = train_draft(
        options(target, prompts, bundle, tmp_path / "cut"), lambda event: notes.append(f"{event.stage} {event.message}")
    )
    assert [point["batch"] for point in resumed.curve] == [4, 8, 12]
    check_same(tmp_path / "cut", whole)
    assert any(note.startswith("write 40 of") for note in notes) == (place == "texts")
    assert any("goes on after" in note for note in notes) == (place in ("batch", "state", "draft"))


@pytest.mark.bundle
def test_a_run_of_some_hours_ends_in_time_and_the_next_goes_on(whole, target, prompts, bundle, tmp_path, saves_often):
    """Of almost no time: each run does the least that it can, and the last one gives the same draft."""
    pauses = []
    while True:
        try:
            train_draft(options(target, prompts, bundle, tmp_path / "head", hours=1e-9))
            break
        except Paused as paused:
            pauses.append((paused.what, paused.done))
            assert not (tmp_path / "head").exists()
    assert pauses == [
        ("texts written", 32),
        *(("texts read", n) for n in (8, 16, 24, 32)),
        *(("batches learned", n) for n in range(1, 12)),
    ]
    check_same(tmp_path / "head", whole)


@pytest.mark.bundle
def test_the_command_says_that_the_time_is_up(target: Path, prompts: Path, bundle: Path, tmp_path: Path) -> None:
    given = ["train-draft", str(target), "--prompts", str(prompts), "--bundle", str(bundle), "-q"]
    given += ["--max-tokens", "24", "--hours", "1e-9", "-o", str(tmp_path / "h")]
    found = CliRunner().invoke(main, given)
    assert (found.exit_code, found.output) == (
        0,
        f"The time is up: 32 of 40 texts written, saved in {tmp_path / 'h.work'}. The same command goes on.\n",
    )
    found = CliRunner().invoke(main, [*given, "--json"])
    assert json.loads(found.stdout) == {"finished": False, "what": "texts read", "done": 8, "total": 40}


@pytest.mark.bundle
def test_a_work_folder_that_does_not_fit_is_told(whole, target, prompts, bundle, tmp_path, saves_often):
    """Of another training, damaged, of somebody else, or in use: one line each, and nothing is touched."""
    before = whole.with_name("head.work")

    def refused(message: str, change: Callable[[Path], object], **changes: Any) -> None:
        folder = tmp_path / "w" / str(len(list((tmp_path / "w").glob("*"))))
        shutil.copytree(before, folder)
        change(folder)
        files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME}
        with pytest.raises(InvalidRequestError, match=message) as caught:
            train_draft(options(target, prompts, bundle, tmp_path / "out", work=folder, **changes))
        assert caught.value.exit_code == 2
        assert caught.value.hint
        assert files == {path: path.read_bytes() for path in files}
        assert not (tmp_path / "out").exists()

    def cut(name: str) -> Callable[[Path], object]:
        return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)

    def swapped(folder: Path) -> None:
        (folder / "eagle3-states" / "states-00000.safetensors").rename(
            folder / "eagle3-states" / "states-00001.safetensors"
        )

    def other_key(folder: Path) -> None:
        path = folder / "eagle3-states" / "states-00000.safetensors"
        save_file(load_file(path), path, {"lengths": "[1]", "made_of": "x"})

    def half(folder: Path) -> None:
        path = folder / "eagle3-state" / "state.safetensors"
        with safe_open(path, framework="pt") as file:
            told = file.metadata()
        save_file({name: value for name, value in load_file(path).items() if "optimizer" in name}, path, told)

    def line(folder: Path) -> None:
        path = folder / "texts.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:6], lines[6][:40], *lines[7:]]) + "\n")

    refused(r"texts\.jsonl is damaged in line 7", line)
    refused(r"states-00000\.safetensors is damaged \(", cut("eagle3-states/states-00000.safetensors"))
    refused(r"states-00000\.safetensors is damaged \(its lengths are of other texts\)", other_key)
    refused(r"eagle3-states lacks states-00000\.safetensors", swapped)
    refused(r"state\.safetensors is damaged \(", cut("eagle3-state/state.safetensors"))
    refused(r"state\.safetensors is damaged \(", half)
    refused("holds texts of other prompts or settings", lambda _: None, seed=1)
    refused("was written with matrix_rate 0.003, and now it is 0.01", lambda _: None, rate=0.01)
    refused("exists and is no work folder of a training", lambda folder: (folder / LOCK_NAME).unlink())
    file = tmp_path / "file"
    file.write_text("mine")
    for work in (file, file / "below"):
        with pytest.raises(InvalidRequestError, match=r"cannot be a work folder \(.*\)"):
            train_draft(options(target, prompts, bundle, tmp_path / "out", work=work))
    with (
        lock_folder(tmp_path / "used"),
        pytest.raises(InvalidRequestError, match=rf"process {os.getpid()} is training in"),
    ):
        train_draft(options(target, prompts, bundle, tmp_path / "out", work=tmp_path / "used"))
    assert not (tmp_path / "used").exists()


@pytest.mark.bundle
def test_an_error_of_the_caller_leaves_no_folder(target: Path, prompts: Path, bundle: Path, tmp_path: Path) -> None:
    short = save_checkpoint(make_llama(seed=12, num_hidden_layers=2), tmp_path / "short")
    for where, given in ((tmp_path / "none", {}), (short, {}), (target, {"kind": "pruned", "keep_layers": LAYERS})):
        with pytest.raises(UserInputError):
            train_draft(TrainOptions(str(where), tmp_path / "a" / "b" / "out", (prompts,), **given))
        with pytest.raises(UserInputError):
            train_draft(options(where, prompts, tmp_path / "no-bundle", tmp_path / "a" / "b" / "out", **given))
    with pytest.raises(InvalidRequestError, match="max_tokens is 128"):
        train_draft(options(target, prompts, bundle, tmp_path / "a" / "b" / "out", max_tokens=128))
    assert not (tmp_path / "a").exists()
