"""A forked child has no decoding thread: it says so instead of waiting, and its parent goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

CHILD_S = 60
BEGIN = f"""
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from tests.support.fakes.engine import make_engine
from tests.support.fakes.submitted import slow_down
from specexport_runtime import SamplingParams
from specexport_runtime.errors import EndlessWaitError

engine = make_engine()
params = SamplingParams(max_tokens=12)

def fork():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm({CHILD_S})  # whatever happens, nobody waits for ever
    return child

def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + script, Path(__file__).parents[2]],
        capture_output=True, text=True, timeout=4 * CHILD_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_child_forked_while_a_request_runs_raises_and_can_leave():
    lines = run("""
finished = engine.submit([2], params)
finished.result()
started, go = slow_down(engine)
handle = engine.submit([1], params)
stream = iter(handle)
first = next(stream)
calls = {
    "submit": lambda: engine.submit([1]),
    "generate": lambda: engine.generate([1]),
    "stream": lambda: engine.stream([1]),
    "result": handle.result,
    "iterate": lambda: next(stream),
    "load": engine.current_load,
    "check": engine.check,
}
assert started.wait(60)
child = fork()
if child == 0:
    for name, call in calls.items():
        try:
            call()
            print(name, "went through")
        except EndlessWaitError as error:
            print(name, "forked" in error.message, "idle" in error.hint)
    print("finished", len(finished.result().token_ids))
    handle.cancel()
    engine.close()
    sys.exit(7)
go.set()
print("parent", len(handle.result(60).token_ids), len(engine.generate([3], params)[0].token_ids))
print("child", wait(child))
""")
    names = ["submit", "generate", "stream", "result", "iterate", "load", "check"]
    assert [line for line in lines if not line.startswith("parent")] == [
        *(f"{name} True True" for name in names),
        "finished 12",
        "child 7",
    ]
    assert "parent 12 12" in lines


def test_a_child_that_only_leaves_is_not_held_up_by_the_lock():
    lines = run("""
started, go = slow_down(engine)
handle = engine.submit([1], params)
stream = iter(handle)
next(stream)
engine._loop._lock.acquire()  # as another thread may hold it just then
child = fork()
if child == 0:
    sys.exit(7)
engine._loop._lock.release()
print("child", wait(child))
go.set()
print("parent", len(handle.result(60).token_ids))
""")
    assert lines == ["child 7", "parent 12"]


def test_an_idle_engine_goes_on_in_parent_and_child():
    lines = run("""
tokens = engine.generate([1], params)[0].token_ids
engine._loop._lock.acquire()  # as another thread may hold it just then
child = fork()
if child == 0:
    sys.exit(0 if engine.generate([1], params)[0].token_ids == tokens else 1)
engine._loop._lock.release()
print("child", wait(child), engine.generate([1], params)[0].token_ids == tokens)
""")
    assert lines == ["child 0 True"]


@pytest.mark.parametrize("shared", [False, True], ids=["own threads", "shared threads"])
def test_a_child_of_an_engine_with_threads_writes_the_text_and_ends(demo_bundle, shared):
    """ONNX Runtime's threads stay in the parent; glibc would wait for them where their pool is freed."""
    lines = run(f"""
from specexport_runtime import SpecEngine
engine = SpecEngine.load({str(demo_bundle)!r}, num_threads=2, spin={shared}, share_threads={shared}, max_num_seqs=1)
tokens = engine.generate("def add(", params)[0].token_ids
threading.Event().wait(0.5)  # it is waited for threads that sleep
child = fork()
if child == 0:
    tokens = tokens == engine.generate("def add(", params)[0].token_ids
    engine.close()
    print("child", tokens)
    sys.exit(7)
print("parent", wait(child), engine.generate("def add(", params)[0].token_ids == tokens)
""")
    assert lines == ["child True", "parent 7 True"]
