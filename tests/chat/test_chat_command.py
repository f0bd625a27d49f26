"""``chat``: turns and commands from a pipe and on a terminal, what is kept of them, and what Ctrl-C ends."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from specexport_runtime import SamplingParams
from specexport_runtime.chat import session
from specexport_runtime.chat.lines import Entry, read_entry
from specexport_runtime.chat.session import ChatOptions, Session, ThinkingTags
from specexport_runtime.chat.slips import InterruptHandler
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.intake.chat import render_chat
from tests.support.cases.patience import HANG_S

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('not that') }}{% endif %}"
    "### {{ m.role }}\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}### assistant\n{% endif %}"
)
SAID = ["def read_lines(path):", "class Stack:"]
ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "support" / "fakes" / "chat_on_fakes.py"


@pytest.fixture
def chat(demo_bundle, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)

    def invoke(*lines, options=(), exit_code=0):
        arguments = ["chat", str(demo_bundle), "--chat-template", str(template), "--temperature", "0"]
        arguments += ["--max-tokens", "12", "--ignore-eos", "--threads", "1", "--no-spin", *map(str, options)]
        stdin = "".join(f"{line}\n" for line in lines) if not lines or isinstance(lines[0], str) else lines[0]
        result = CliRunner().invoke(runtime_cli, arguments, input=stdin)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == exit_code, result.output
        return result

    return invoke


def messages_of(path):
    return json.loads(path.read_text())["messages"]


def test_each_line_of_a_pipe_is_a_turn_and_only_new_tokens_are_read(chat, demo_bundle, tmp_path):
    file = tmp_path / "talk.json"
    result = chat(*SAID, "", f"/save {file}", options=["--system", "Write Python.", "--stats"])
    messages = messages_of(file)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[1]["content"], messages[3]["content"]] == SAID
    assert result.stdout == f"{messages[2]['content']}\n{messages[4]['content']}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (first, none), (second, known) = re.findall(r"prompt (\d+) tokens, of these (\d+) known", result.stderr)
    assert int(none) == 0
    assert int(known) == int(first) + 12 - 1 < int(second)
    prompt = render_chat(TEMPLATE, messages[:4], {})
    arguments = ["generate", str(demo_bundle), prompt, "--max-tokens", "12", "--ignore-eos", "--threads", "1"]
    alone = CliRunner().invoke(runtime_cli, [*arguments, "--no-spin", "--no-speculation"])
    assert alone.stdout == f"{messages[4]['content']}\n"


def test_a_conversation_is_saved_taken_up_again_and_changed(chat, tmp_path):
    file, other, again = tmp_path / "talk.json", tmp_path / "other.json", tmp_path / "again.json"
    chat(*SAID, f"/save {file}")
    both = messages_of(file)
    assert both[-1]["finish_reason"] == "length"
    result = chat("/undo", "/save", "/system Be brief.", "/system", f"/save {other}", options=["--load", file])
    assert messages_of(file) == both[:2]
    assert messages_of(other) == [{"role": "system", "content": "Be brief."}, *both[:2]]
    assert "2 turns loaded" in result.stderr
    assert "the last turn is forgotten; 1 turn left\n" in result.stderr
    assert "Be brief.\n" in result.stderr
    assert result.stdout == ""
    result = chat(f"/load {other}", "/system off", SAID[1], f"/save {again}", "/retry", "/reset", f"/save {other}")
    assert messages_of(again) == both
    assert result.stdout == f"{both[-1]['content']}\n" * 2
    assert messages_of(other) == []


def test_a_message_without_an_answer_waits_for_retry(chat, tmp_path):
    file, saved = tmp_path / "talk.json", tmp_path / "saved.json"
    file.write_text(json.dumps([{"role": "user", "content": SAID[0], "name": "me"}]))
    result = chat(f"/load {file}", "/retry", f"/save {saved}")
    assert "/retry sends it" in result.stderr
    assert messages_of(saved)[0] == {"role": "user", "content": SAID[0]}
    assert "the message without an answer is forgotten; 0 turns left\n" in chat(f"/load {file}", "/undo").stderr
    assert result.stdout == f"{messages_of(saved)[1]['content']}\n"
    assert chat(SAID[0]).stdout == result.stdout


@pytest.mark.parametrize(
    ("lines", "entry"),
    [
        (["x\\"], Entry("x")), (['"""one"""'], Entry("one")), (['"""one'], Entry("one")),
        (['"""', "a", 'b"""  '], Entry("a\nb")), (["/system a\\", "b"], Entry("system a\nb", is_command=True)),
        (["  //x"], Entry("/x")), ([" "], Entry("")),
    ],
)  # fmt: skip
def test_what_lines_make(lines, entry):
    def read_line(_):
        if not lines:
            raise EOFError
        return lines.pop(0)

    lines = [*lines]
    assert read_entry(read_line) == entry


def test_stats_help_and_exit(chat):
    result = chat("/stats", *SAID, "/stats", "/help")
    assert "nothing was answered yet" in result.stderr
    found = {line[:32].strip(): line[32:].split() for line in result.stderr.splitlines() if line[:1] != "("}
    assert found["generated tokens"] == ["12", "24"]
    assert found["of these known from before"][0] == found["of these known from before"][1] != "0"
    assert 0 < float(found["acceptance rate"][0]) <= 1
    assert float(found["tokens a round"][1]) > 1
    for name in ("prompt included", "after the first"):
        assert all(float(speed) > 0 for speed in found[f"tokens/s, {name}"])
    assert "/trim" in result.stderr
    assert chat("/exit", SAID[0]).stdout == ""  # what follows is left unsaid


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["/stat"], "there is no command /stat. Fix: did you mean /stats?"),
        (["/usr/bin is what?"], "// begins a message"),
        (["/undo"], "nothing was said yet"),
        (["/stats now"], "takes nothing after it"),
        (["/save"], "needs the name of a file"),
        (["/load no/such/file"], "no/such/file cannot be read"),
        (["/trim none"], "'none' is no number of turns"),
        (["/system refuse"], "The chat template refused: not that"),
        (["refuse"], "The chat template refused: not that"),
        (["word " * 1100], "more than this engine takes. Fix: /trim"),
        ([b"caf\xe9\n"], "line 1 of standard input is not UTF-8"),
    ],
)
def test_a_mistake_in_a_pipe_is_one_line_and_exit_code_2(chat, lines, words):
    result = chat(*lines, exit_code=2)
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--system", "a", "--system-file", "b"], "drop one"),
        (["--system", "refuse"], "not that"),
        (["--load", "no/such/file"], "cannot be read"),
        (["--drafter", "lokup"], "did you mean 'lookup'"),
    ],
)
def test_bad_options_are_refused_before_the_first_line(chat, options, words):
    result = chat(options=options, exit_code=2)
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_bundle_without_a_template_is_refused(demo_bundle):
    result = CliRunner().invoke(runtime_cli, ["chat", str(demo_bundle)], input="x\n")
    assert result.exit_code == 2
    assert "has no chat template. Fix: give one with --chat-template" in result.stderr


@pytest.mark.parametrize(
    "content",
    [
        "{}", "nothing", "[" * 10**5, '[{"role": "user", "content": 1}]',
        '[{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]',
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_neither_loaded_nor_replaced(chat, tmp_path, content):
    file = tmp_path / "notes.txt"
    file.write_text(content)
    assert str(file) in chat(f"/load {file}", exit_code=2).stderr
    assert "is there, and no conversation" in chat(f"/save {file}", exit_code=2).stderr
    assert file.read_text() == content
    assert "cannot be written" in chat(f"/save {tmp_path / 'none' / 'x'}", exit_code=2).stderr


@pytest.mark.parametrize("tags", ["", "<think>hm</think>"])
def test_thinking_is_told_from_what_is_said(tags):
    thinking = ThinkingTags(begun=not tags)
    pieces = ["<th", "ink>", "hm", "</", "think", ">", "\n", "so", "<think>a</think>", "b"]
    dim = [thinking(piece) for piece in (pieces if tags else pieces[2:])]
    wanted = [False, True, True, True, True, True, False, False, False, False]
    assert dim == (wanted if tags else wanted[2:])


def test_a_message_is_not_lost_when_nothing_was_said(monkeypatch, capsys):
    from tests.support.fakes.engine import make_engine

    engine = make_engine(chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")
    chat = Session(engine, ChatOptions(SamplingParams(), 4, {"speculation": False}), InterruptHandler())
    chat.say("w1 w2")
    before = chat.conversation.messages
    empty = engine.generate(["w1"], SamplingParams(max_tokens=1))[0]._replace(token_ids=[], finish_reason="cancelled")
    with monkeypatch.context() as patch:
        patch.setattr(session, "stream_answer", lambda *_, **__: empty)
        chat.say("w3")
    assert chat.conversation.messages == before
    assert "/retry sends your message again" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(session, "stream_answer", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            chat.retry()
    assert (chat.conversation.messages, chat.unsent) == (before, "w3")
    chat.retry()
    assert chat.conversation.messages[:-1] == [*before, {"role": "user", "content": "w3"}]
    assert chat.unsent is None
    engine.close()


def test_ctrl_c_is_told_once_kept_while_nobody_listens_and_then_the_commands():
    slips, told, earlier = InterruptHandler(), [], []
    slips._earlier = lambda *_: earlier.append(1)
    with pytest.raises(KeyboardInterrupt), slips.allow_interrupts():
        slips(signal.SIGINT, None)
    with slips.notify_on_interrupt(lambda: told.append(1)):
        slips(signal.SIGINT, None)
        assert (told, earlier) == ([1], [])
        slips(signal.SIGINT, None)
        assert earlier == [1]
    with slips.allow_interrupts():
        pass
    slips(signal.SIGINT, None)
    with slips.notify_on_interrupt(lambda: told.append(2)):
        assert told == [1, 2]
    slips(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt), slips.allow_interrupts():
        pass


class Terminal:
    def __init__(self, *command, **environment):
        here, there = pty.openpty()
        self._here = here
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, start_new_session=True,
            env={**os.environ, "TERM": "dumb", **environment},
        )  # fmt: skip
        os.close(there)
        self.text = ""

    def wait_for(self, words):
        """Read until ``words`` come; what came until then is forgotten."""
        end = time.monotonic() + HANG_S
        while words not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self._here], [], [], 0.2)[0]:
                try:
                    data = os.read(self._here, 4096)
                except OSError:  # nobody is at the other side any more
                    data = b""
                assert data, self.text
                self.text += data.decode(errors="replace")
        seen, _, self.text = self.text.partition(words)
        return seen

    def enter(self, text):
        os.write(self._here, text.encode())

    def slip(self):
        """Press Ctrl-C while a line is read.

        Python's readline sees a signal only when it interrupts its ``select``: one that comes between the echo and
        that is kept until the next key. Nobody is so quick; a test is.
        """
        end = time.monotonic() + HANG_S
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0] != "S":
            assert time.monotonic() < end, "it does not wait for a key"
            time.sleep(0.01)
        self.enter(CTRL_C)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(HANG_S)
        os.close(self._here)


CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture
def terminal(tmp_path, request):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    opened = Terminal(
        *(sys.executable, DRIVER, tmp_path, *request.param),
        PYTHONPATH=paths,
        SPECEXPORT_CACHE_DIR=str(tmp_path / "cache"),
    )
    yield opened
    opened.close()


@pytest.mark.parametrize("terminal", [["gated"]], indirect=True)
def test_ctrl_c_ends_an_answer_or_a_line_and_nothing_else(terminal, tmp_path):
    terminal.wait_for("Ctrl-D leaves.")
    terminal.wait_for("> ")
    terminal.enter("w1 w2 w3\n")
    terminal.wait_for("[waiting]")
    terminal.enter(CTRL_C)
    terminal.wait_for("(cut off)")
    terminal.wait_for("> ")
    terminal.enter("w4 w5")
    terminal.wait_for("w4 w5")
    terminal.slip()
    terminal.wait_for("Ctrl-C again leaves")
    terminal.wait_for("> ")
    terminal.enter("/stat\n")
    terminal.wait_for("did you mean /stats?")
    terminal.enter(f"/save {tmp_path / 'talk.json'}\n")
    terminal.wait_for("saved in")
    question, answer = messages_of(tmp_path / "talk.json")
    assert question["content"] == "w1 w2 w3"
    assert answer["finish_reason"] == "cancelled"
    assert answer["content"].startswith(" w")
    terminal.wait_for("> ")
    terminal.slip()
    terminal.wait_for("Ctrl-C again leaves")
    terminal.wait_for("> ")
    terminal.slip()
    assert terminal.process.wait(HANG_S) == 0
    history = tmp_path / "cache" / "chat" / "history"
    assert "w1 w2 w3" in history.read_text().splitlines()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.parametrize("terminal", [[]], indirect=True)
def test_a_conversation_that_grew_too_long_is_trimmed_by_hand(terminal):
    terminal.wait_for("> ")
    long = " ".join(["w1"] * 20)
    for _ in range(2):
        terminal.enter(f"/system {long}\n{long}\n")
        terminal.wait_for("(cut off" if not _ else "more than this engine takes")
        terminal.wait_for("> ")
    terminal.enter("/trim\n")
    terminal.wait_for("1 turn forgotten")
    terminal.wait_for("(cut off")
    terminal.wait_for("> ")
    terminal.enter(CTRL_D)
    assert terminal.process.wait(HANG_S) == 0
