"""One pool of threads for target and draft: the same texts, fewer threads, and never unasked."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, sys
from specexport_runtime.executors import open as engines, ort
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.operators import register

bundle, shared, large = sys.argv[1], sys.argv[2] == "shared", sys.argv[3] == "large"
if large:
    engines.SMALL_DRAFT_PARAMETERS = ort.SMALL_DRAFT_PARAMETERS = 0
threads = lambda: len(os.listdir("/proc/self/task"))
import onnxruntime
before = threads()
engine = SpecEngine.load(bundle, num_threads=3, share_threads=shared, max_num_seqs=1)
opened = threads() - before
text = engine.generate("def add(a, b):", SamplingParams(max_tokens=24), drafter="draft-model")[0].token_ids
engine.close()
refused = []
for others in ({"num_threads": 2}, {"num_threads": 3, "spin": False}, {}):
    try:
        SpecEngine.load(bundle, max_num_seqs=1, **others).close()
    except InvalidRequestError as error:
        refused.append(str(error))
try:
    options = onnxruntime.SessionOptions()
    register(options)
    model = os.path.join(bundle, "target", "model.onnx")
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    others = "opened"
except Exception as error:
    others = str(error)
print(json.dumps({"threads": opened, "text": text, "others": others, "refused": refused}))
"""


@pytest.fixture(scope="module")
def run(demo_bundle):
    def call(*arguments):
        command = [sys.executable, "-c", PROGRAM, str(demo_bundle), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return call


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_target_and_a_large_draft_share_their_threads_where_they_may(run):
    shared, apart = run("shared", "large"), run("apart", "large")
    assert shared["text"] == apart["text"]
    assert shared["threads"] < apart["threads"]
    assert apart["others"] == "opened"
    assert apart["refused"] == []
    asked = [message.split(" asked for")[0] for message in shared["refused"]]
    assert asked == ["2 compute threads are", "threads that do not spin are"]
    assert "use_per_session_threads" in shared["others"]  # why a library does not do it unasked


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_small_draft_runs_on_the_calling_thread_and_shares_nothing(run):
    assert run("shared", "small")["others"] == "opened"
