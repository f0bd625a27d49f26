"""Limits of containers and units: cgroup v1 and v2, as the kernel's documents describe their files."""

from functools import partial
from pathlib import Path

import pytest

from specexport_runtime import machine

V1_CPU = {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("listed", "files", "cores"),
    [
        ("4:cpu:/", {"cpu": V1_CPU}, 1),
        ("4:cpu,cpuacct:/", {"cpu,cpuacct": V1_CPU}, 1),
        ("4:cpu:/docker/a", {"cpu/docker/a": V1_CPU}, 1),
        ("4:cpu:/docker/of-the-host", {"cpu": V1_CPU}, 1),  # a container without a namespace of groups
        ("4:cpu:/", {"cpu": {**V1_CPU, "cpu.cfs_quota_us": "-1"}}, 8),
        ("4:cpuset:/", {"cpuset": V1_CPU}, 8),
        ("0::/system.slice/a.service", {"system.slice/a.service": {"cpu.max": "100000 100000"}}, 1),
        ("0::/a.slice/b", {"a.slice/b": {"cpu.max": "max 100000"}, "a.slice": {"cpu.max": "350000 100000"}}, 3),
        ("0::/", {"": {"cpu.max": "50000 100000"}}, 1),
        ("0::/", {}, 8),
    ],
)
def test_cores_are_cut_by_every_group_above(tmp_path, monkeypatch, listed, files, cores):
    _write(tmp_path, listed, files)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "control_groups", _groups_in(tmp_path))
    assert machine.available_cores() == cores


@pytest.mark.parametrize(
    ("listed", "files", "limit"),
    [
        ("9:memory:/docker/a", {"memory/docker/a": {"memory.limit_in_bytes": "1048576"}}, 1 << 20),
        ("9:memory:/", {"memory": {"memory.limit_in_bytes": "9223372036854771712"}}, None),  # how v1 says none
        ("0::/a.slice/b", {"a.slice/b": {"memory.max": "max"}, "a.slice": {"memory.max": "2097152"}}, 2 << 20),
    ],
)
def test_memory_is_limited_by_every_group_above(tmp_path, monkeypatch, listed, files, limit):
    _write(tmp_path, listed, files)
    monkeypatch.setattr(machine, "control_groups", _groups_in(tmp_path))
    assert machine.memory_bytes()[2] == limit


def _write(folder: Path, listed: str, files: dict[str, dict[str, str]]) -> None:
    (folder / "listed").write_text(f"1:name=systemd:/\n{listed}\n")
    for group, values in files.items():
        (folder / group).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / group / name).write_text(value + "\n")


def _groups_in(folder: Path) -> "partial[object]":
    return partial(machine.control_groups, root=folder, listed=folder / "listed")
