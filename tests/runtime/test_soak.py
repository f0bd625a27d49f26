"""Memory over many requests, engines and forks: what ends gives back what it took."""

import os
import subprocess
import sys

import pytest

from tests.support.cases.memory import needs_linux

PROGRAM = """
import ctypes, gc, os, sys
from specexport_runtime import SamplingParams, SpecEngine
from tests.support.cases.memory import process_bytes

bundle, what, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
params = SamplingParams(max_tokens=1, ignore_eos=True)

def load():
    return SpecEngine.load(bundle, max_num_seqs=2, num_threads=2, spin=False)

def ask(engine, i):  # alone: the engine is idle before it, and after it
    prompt = [10 + i % 900, *range(100, 160)]
    engine.submit(prompt, params, drafter="none", remember=False).result(60)

def requests(i):
    ask(engine, i)

def engines(i):
    mine = load()
    ask(mine, i)
    mine.close()

def forks(i):
    if (child := os.fork()) == 0:
        ask(engine, i)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

engine = load()
ask(engine, 0)
for i in range(times + times // 5):
    if i == times // 5:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = process_bytes()
    globals()[what](i)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
print(process_bytes() - before)
"""


@needs_linux
@pytest.mark.whole
@pytest.mark.parametrize(("what", "times"), [("requests", 500), ("engines", 50), ("forks", 200)])
def test_memory_does_not_grow(demo_bundle, what, times):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, str(demo_bundle), what, str(times)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # what lies free in another is not lost
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2e6
