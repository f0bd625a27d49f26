"""The KV arena on the CPU: what is resident, what goes back, and that copies and exchanges are right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specexport_runtime.executors.ort_arena import paged_capacity
from tests.support.cases.memory import LAYERS, PAGE, Arena, needs_linux, resident_bytes


@pytest.mark.parametrize(("capacity", "item"), [(1, 4), (100, 4), (112, 4), (100, 1), (2050, 2)])
def test_each_head_of_a_row_begins_a_page(capacity, item):
    found = paged_capacity(LAYERS, capacity, item)
    assert found >= capacity
    assert all(found * dim * item % PAGE == 0 for dim in (64, 96))
    smaller = [n for n in range(capacity, found) if all(n * dim * item % PAGE == 0 for dim in (64, 96))]
    assert not smaller


def test_without_a_budget_rows_are_as_long_as_asked_for():
    arena = Arena(gives_back=False)
    assert {cache.shape[3] for cache in arena._caches.values()} == {100}
    assert arena.kv_bytes == 4 * 100 * (2 * 128 + 160) * 4


@needs_linux
def test_memory_follows_what_is_written_and_goes_back():
    arena = Arena(rows=8, capacity=900)
    assert resident_bytes(arena) == 0
    for row, count in enumerate((0, 1, 40, 900)):
        before = resident_bytes(arena)
        arena.fill(row, count)
        assert resident_bytes(arena) - before == arena.row_bytes(count)
    arena.release_pages(3, 50)
    assert resident_bytes(arena) == sum(map(arena.row_bytes, (0, 1, 40, 50)))
    assert all(arena.holds(row, count, row) for row, count in enumerate((0, 1, 40, 50)))
    for row in range(4):
        arena.release_pages(row, 0)
    assert resident_bytes(arena) == 0
    assert not any(cache.any() for cache in arena._caches.values())


@needs_linux
def test_rows_that_change_places_leave_no_memory_behind():
    arena = Arena(capacity=900)
    arena.fill(0, 300)
    arena.fill(1, 700)
    arena.swap_rows(0, 1, (300, 20))
    assert arena.holds(1, 300, 0)
    assert arena.holds(0, 20, 1)
    assert resident_bytes(arena) == arena.row_bytes(300) + arena.row_bytes(20)
    arena.swap_rows(1, 3, (300, 0))
    assert arena.holds(3, 300, 0)
    assert resident_bytes(arena) == arena.row_bytes(300) + arena.row_bytes(20)
    arena.copy_row(3, 2, 100)
    assert arena.holds(2, 100, 0)
    assert arena.holds(3, 300, 0)


def test_rows_change_places_where_no_memory_goes_back():
    arena = Arena(gives_back=False)
    for row, count in ((0, 30), (1, 70)):
        arena.fill(row, count)
    arena.swap_rows(0, 1, (30, 70))
    assert arena.holds(1, 30, 0)
    assert arena.holds(0, 70, 1)
    arena.swap_rows(1, 2, (30, 0))
    assert arena.holds(2, 30, 0)
    arena.swap_rows(3, 2, (0, 30))
    assert arena.holds(3, 30, 0)
    arena.release_pages(3, 0)
    assert arena.holds(3, 30, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_an_arena_of_its_own():
    script = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tests.support.cases.memory import Arena
arena = Arena()
arena.fill(0, 10)
if (child := os.fork()) == 0:
    arena.fill(0, 10, value=-1.0)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert arena.holds(0, 10, 0)
"""
    subprocess.run([sys.executable, "-c", script, Path(__file__).parents[2]], check=True, timeout=120)
