"""A form that takes too much ends the process in which it is tried, and is refused; what is honest is compiled."""

import json
import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake import trial, watched
from specexport_runtime.intake.grammars import GrammarCompiler
from specexport_runtime.sampling.structured import StructuredOutputs
from tests.support.models.tokenizers import byte_level

pytest.importorskip("llguidance")

NULL = {"type": "null"}
PATTERNS = [{"type": "string", "pattern": f"a{i}"} for i in range(30)]
LOOP = {"$ref": "#/$defs/r"}
LOOPS = {"anyOf": [{"anyOf": [LOOP, NULL]}] * 2000}
SMALL = StructuredOutputs(regex="[a-c]{3}")
CHAIN = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(1500)}
KILLERS = {
    "time": {"$defs": {"r": LOOPS}, **LOOP},
    "time for a token": {"type": "object", "properties": {"a": LOOP}, "required": ["a"], "$defs": {"r": LOOPS}},
    "memory": {"allOf": PATTERNS},
    "memory for what is after a text": {"type": "object", "properties": {"a": {"allOf": PATTERNS}}, "required": ["a"]},
}
KILLED_BY = {
    "time": r"2 seconds of work\.",
    "time for a token": r"0.1 seconds of work for a token\.",
    "memory": r"(2 seconds of work|256 MB of memory)\.",
    "memory for what is after a text": r"(2 seconds of work|256 MB of memory)\.",
}
HONEST = {
    "patterns of many texts": {"properties": {str(i): each for i, each in enumerate(PATTERNS)}},
    "patterns beside descriptions": {
        "properties": {str(i): {"$ref": f"#/$defs/{i}", "description": "d"} for i in range(20)},
        "$defs": {str(i): {"type": "string", "pattern": f"^[A-Z]{{{i + 1}}}$"} for i in range(20)},
    },
    "many properties": {"properties": {str(i): NULL for i in range(5000)}, "required": [str(i) for i in range(5000)]},
    "options": {"properties": {str(i): NULL for i in range(500)}},
    "references": {"$defs": CHAIN | {"d1500": NULL}, "$ref": "#/$defs/d0"},
}


def make_compiler():
    return GrammarCompiler(byte_level(), byte_level().get_vocab_size(), [byte_level().token_to_id("<|end|>")])


@pytest.fixture(scope="module")
def compiler():
    with closing(make_compiler()) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def hasty():
    with closing(make_compiler()) as compiler:
        compiler._trial._most = trial.WORK_S / 5, trial.TOKEN_S, trial.MEMORY // 5
        yield compiler


def process_of(compiler: GrammarCompiler) -> subprocess.Popen[bytes]:
    compiler.compile(StructuredOutputs(regex=os.urandom(8).hex()))
    return compiler._trial._process


@pytest.mark.parametrize("case", KILLERS)
def test_what_takes_too_much_ends_its_own_process(hasty, case):
    before = process_of(hasty)
    with pytest.raises(InvalidRequestError, match=f"it takes more than a form may: {KILLED_BY[case]}"):
        hasty.compile(StructuredOutputs(json=KILLERS[case]))
    assert before.returncode < 0
    assert not hasty.has(StructuredOutputs(json=KILLERS[case]))
    assert process_of(hasty).poll() is None


def test_expressions_and_grammars_are_tried_too(hasty):
    for form in (
        StructuredOutputs(regex="(a|b)*" * 10_000),
        StructuredOutputs(grammar='start: <|im|> "x" A\nA: /&.*/' + "".join(f" & /.*a{i}.*/" for i in range(25))),
        StructuredOutputs(grammar=f"start: %json {json.dumps(KILLERS['memory'])}"),
    ):
        with pytest.raises(InvalidRequestError, match="it takes more than a form may"):
            hasty.compile(form)


def test_depth_ends_the_process_alone(compiler):
    """Beyond what a request may have."""
    compiler.compile(SMALL)
    rules = "".join(f'T{i}: "a" T{i + 1}\n' for i in range(100_000))
    assert "depth of its parts" in compiler._trial.find_fault(f'start: T0\n{rules}T100000: "b"')


@pytest.mark.parametrize("case", HONEST)
def test_what_is_honest_is_compiled(compiler, case):
    assert compiler.compile(StructuredOutputs(json=HONEST[case])).allowed(()).any()


def test_a_process_is_of_one_compiler_and_ends_with_it(compiler):
    """And one that somebody ended is no form's fault."""
    process = process_of(compiler)
    assert process_of(compiler) is process
    process.kill()
    process.wait()
    assert process_of(compiler) is not process
    process = process_of(compiler)
    compiler.close()
    assert process.returncode is not None
    assert process.stdin.closed
    assert process_of(compiler).poll() is None


def test_small_forms_are_taken_where_no_process_can_be_started(monkeypatch, caplog):
    monkeypatch.setattr(trial.sys, "executable", "/nowhere")
    compiler = make_compiler()
    assert compiler.compile(SMALL).allowed(()).any()
    with pytest.raises(InvalidRequestError, match="no process in which so large a form is tried"):
        compiler.compile(StructuredOutputs(regex="a" * 5000))
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_a_large_form_is_given_up_where_its_matcher_takes_too_long(compiler, monkeypatch):
    """Its trial need not come to that place."""
    form = StructuredOutputs(json=HONEST["patterns beside descriptions"] | {"description": "d" * trial.UNTRIED})
    grammar, go = compiler.compile(form), threading.Event()
    other = compiler.compile(form)
    slow = Mock(compute_bitmask=lambda: go.wait(60), is_stopped=lambda: False, is_error=lambda: False)
    monkeypatch.setattr(grammar._matcher, "_matcher", slow)
    monkeypatch.setattr(watched, "MAX_S", 0.01)
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="a token takes more than"):
                grammar.allowed(())
    finally:
        go.set()
    assert not slow.consume_tokens.called
    monkeypatch.undo()
    assert other.allowed(()).any()


SCRIPT = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
from tests.runtime.test_trial import *
compiler = make_compiler()
"""


def run(body):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + body, Path(__file__).parents[2]], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_what_was_tried_is_compiled_whatever_the_callers_stack():
    done = run("""
threading.stack_size(1 << 18)
def work():
    compiler.compile(StructuredOutputs(json=HONEST["references"]))
    compiler._compiled.clear()
    print("done", flush=True)
thread = threading.Thread(target=work)
thread.start()
thread.join()
""")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_has_a_process_of_its_own_and_leaves_the_parents():
    done = run("""
process = process_of(compiler)
child = os.fork()
if not child:
    assert process_of(compiler).pid != process.pid
    compiler.close()
    sys.exit()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert process.poll() is None and process_of(compiler) is process
print(process.pid)
""")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    with pytest.raises(ProcessLookupError):  # it ends with the interpreter
        os.kill(int(done.stdout), 0)
