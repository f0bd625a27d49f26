"""Tune profiles: the table, the file, and what is ignored or refused."""

import json
import logging
import os

import pytest

from specexport_runtime import user_cache
from specexport_runtime.costs.tune_profile import TuneCell, TuneProfile, TuneRounds, default_path, load_profile
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.machine import machine_key


def make_profile(**values):
    cells = [
        TuneCell(
            "lookup",
            1,
            0,
            8,
            {0: 100.0, 8: 150.5},
            {0: TuneRounds(None, None, None, 9.5), 8: TuneRounds(0.5, 4.25, 0.01, 11.0)},
        ),
        TuneCell("lookup", 1, 1024, 4, {0: 90.0, 4: 120.0}),
        TuneCell("lookup", 8, 0, 2, {0: 400.0, 2: 410.0}),
        TuneCell("lookup", 4, 0, 3, {0: 300.0, 3: 350.0}),
        TuneCell("draft-model", 1, 512, 0, {0: 100.0, 2: 80.0}),
    ]
    given = {
        "bundle": "tiny", "build_key": "k", "machine": machine_key(), "date": "2026-01-02T03:04:05+00:00",
        "command": ("specexport", "tune"), "settings": {"tokens": 8}, "cells": tuple(cells),
    }  # fmt: skip
    return TuneProfile(**(given | values))


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setenv(user_cache.ROOT_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "bundle").mkdir()
    return tmp_path / "bundle"


def save(path, profile=None):
    path.write_text(json.dumps((profile or make_profile()).to_json()))
    return path


@pytest.mark.parametrize(
    ("rows", "context", "lookahead"),
    [
        (1, 10, 8),
        (1, 1023, 8),
        (1, 1024, 4),  # a measured context counts from its length on
        (1, 9999, 4),
        (2, 10, 3),  # the next larger batch
        (4, 10, 3),
        (5, 10, 2),
        (8, 10, 2),
        (64, 10, 2),  # beyond the largest
    ],
)
def test_table(rows, context, lookahead):
    assert make_profile().lookahead("lookup", rows, context) == lookahead


def test_below_the_smallest_context_and_unknown_drafters():
    assert make_profile().lookahead("draft-model", 1, 5) == 0
    assert make_profile().lookahead("self", 1, 5) is None


def test_json_is_exact():
    profile = make_profile()
    assert TuneProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_older_profiles_say_nothing_of_rounds():
    data = make_profile().to_json()
    for cell in data["cells"]:
        del cell["rounds"]
    old = TuneProfile.from_json(data)
    assert not any(cell.rounds for cell in old.cells)
    assert [cell._replace(rounds={}) for cell in make_profile().cells] == list(old.cells)


def test_speedup_is_that_of_the_chosen_k():
    assert [round(cell.speedup, 3) for cell in make_profile().cells] == [1.505, 1.333, 1.025, 1.167, 1.0]


def test_named_file_is_read(bundle, tmp_path, caplog):
    path = save(tmp_path / "p.json")
    assert load_profile(path, bundle=bundle, build_key="k") == make_profile()
    assert not caplog.records


def test_without_a_profile_there_is_none(bundle, caplog):
    assert load_profile(None, bundle=bundle, build_key="k") is None
    assert not caplog.records
    assert not default_path(bundle)


def test_default_place_belongs_to_the_folder(bundle, tmp_path, monkeypatch):
    save(default_path(bundle, writable=True))
    assert load_profile(None, bundle=bundle, build_key="k") == make_profile()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(bundle)
    for same in ("bundle", "link", "./bundle/../bundle"):
        assert load_profile(None, bundle=type(bundle)(same), build_key="k") == make_profile()
    (tmp_path / "other").mkdir()
    assert load_profile(None, bundle=tmp_path / "other", build_key="k") is None


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"build_key": "old"}, ["another build"]),
        ({"machine": "other"}, ["another machine"]),
        ({"machine": "other", "build_key": "old"}, ["another build", "another machine"]),
    ],
)
def test_a_stale_profile_is_ignored_and_says_why(bundle, tmp_path, caplog, values, said, named):
    path = save(tmp_path / "p.json" if named else default_path(bundle, writable=True), make_profile(**values))
    with caplog.at_level(logging.WARNING):
        assert load_profile(path if named else None, bundle=bundle, build_key="k") is None
    (record,) = caplog.records
    text = record.getMessage()
    assert "stale" in text
    assert f"specexport tune {bundle} --prompts" in text
    for part in ("another build", "another machine"):
        assert (part in text) == (part in said)


MALFORMED = [
    "", "{", "[]", "[" * 9999, '{"schema": "specexport.tune/2"}', '{"schema": "specexport.tune/1"}', b"\xff\xfe",
]  # fmt: skip
CHANGES = [
    ("cells", 5), ("cells", [1]), ("cells", [{}]), ("command", None), ("bundle", 1), ("settings", 3),
    ("machine", None),
]  # fmt: skip
CELL_CHANGES = [
    ("drafter", "psychic"), ("batch_size", 0), ("context", -1), ("lookahead", -2), ("lookahead", None),
    ("lookahead", "x"), ("tokens_per_second", [1]), ("tokens_per_second", {"x": 1}), ("rounds", [1]),
    ("rounds", {"2": {}}), ("rounds", {"2": {"acceptance_rate": "x"}}),
]  # fmt: skip


def malformed_texts():
    yield from MALFORMED
    for name, value in CHANGES:
        yield json.dumps(make_profile().to_json() | {name: value})
    for name, value in CELL_CHANGES:
        data = make_profile().to_json()
        data["cells"][0][name] = value
        yield json.dumps(data)


@pytest.mark.parametrize("text", list(malformed_texts()), ids=range(len(list(malformed_texts()))))
def test_a_malformed_file_is_refused_if_named_and_ignored_if_not(bundle, tmp_path, caplog, text):
    text = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "p.json").write_bytes(text)
    with pytest.raises(InvalidRequestError, match=r"p\.json is malformed: .*specexport tune"):
        load_profile(tmp_path / "p.json", bundle=bundle, build_key="k", drafters=KINDS)
    default_path(bundle, writable=True).write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert load_profile(None, bundle=bundle, build_key="k", drafters=KINDS) is None
    assert "malformed" in caplog.text
    assert f"specexport tune {bundle}" in caplog.text


def test_a_missing_file_is_refused_if_named(bundle, tmp_path):
    with pytest.raises(InvalidRequestError, match=r"none\.json cannot be read \(No such file"):
        load_profile(tmp_path / "none.json", bundle=bundle, build_key="k")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX permissions")
def test_what_others_may_write_is_trusted_only_if_named(bundle, caplog):
    path = save(default_path(bundle, writable=True))
    path.chmod(0o666)
    assert load_profile(path, bundle=bundle, build_key="k") == make_profile()
    assert not caplog.records
    assert load_profile(None, bundle=bundle, build_key="k") is None
    assert "others may write" in caplog.text
