"""``chat`` on a small fake engine in a folder; ``gated``: the first answer goes on until it is cancelled."""

import fcntl
import signal
import sys
import termios
import threading

from specexport_runtime import SpecEngine
from specexport_runtime.chat import command
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.decoding.handle import RequestHandle
from tests.support.cases.patience import HANG_S
from tests.support.fakes.engine import make_engine

TEMPLATE = "{% for m in messages %}w1 {{ m.content }} {% endfor %}w2 "
FREE_STEPS = 3


def close_the_gate(engine: SpecEngine) -> None:
    """After a few steps the target waits until a request is cancelled."""
    opened, steps = threading.Event(), []
    execute, cancel = engine.target.execute, RequestHandle.cancel

    def execute_at_the_gate(*args, **options):
        steps.append(1)
        if len(steps) >= FREE_STEPS and not opened.is_set():
            sys.stderr.write("[waiting]\n")
            assert opened.wait(HANG_S)
        return execute(*args, **options)

    def cancel_and_open(handle: RequestHandle) -> None:
        cancel(handle)
        opened.set()

    engine.target.execute = execute_at_the_gate
    RequestHandle.cancel = cancel_and_open


if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    folder, *gated = sys.argv[1:]
    engine = make_engine(chat_template=TEMPLATE)
    if gated:
        close_the_gate(engine)
    SpecEngine.load = lambda *_, **__: engine
    command._check_template = lambda *_: None
    runtime_cli(["chat", folder, "--temperature", "0", "--color"])
