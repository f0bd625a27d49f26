"""A form is tried in a process of its own first: one that takes too much ends that process alone.

The matcher is native code. It recurses as deep as rules refer to each other, and there are forms whose time and memory
double with each part. This file is the program of that process too, which has the standard library and llguidance only.
"""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

_log = logging.getLogger(__name__)

T = TypeVar("T")

WORK_S, TOKEN_S, WALL_S = 2.0, 0.1, 30.0
"""Most CPU seconds of a form and of one token of its texts, and most seconds by the clock, of a busy machine."""
MEMORY, STACK = 256 << 20, 128 << 20
"""Most bytes of a form, and of the stack on which it is tried; it is compiled on one of twice the size."""
UNTRIED = 4096
"""Characters of a form that is taken where no process can be started: its tokens take no seconds wherever they are."""
_GROWN = 128 << 20  # bytes that forms have left in the process when another takes its place
_WALKS, _STEPS = 4, 32
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
_stack_lock = threading.Lock()


class Trial:
    """Tries grammars over a vocabulary, one after another; safe from any thread. Its process starts with the first.

    Args:
        vocabulary: gives ``size`` (V), ``ends`` (token ids), ``named`` (texts of special tokens by id), and ``limits``
            of the matcher.
    """

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]]) -> None:
        self._vocabulary, self._lock, self._has_failed = vocabulary, threading.Lock(), False
        self._most = WORK_S, TOKEN_S, MEMORY
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = int  # nothing to end

    def find_fault(self, grammar: str) -> str | None:
        """What a grammar takes too much of, as a sentence without its full stop; None if nothing is."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:  # as it is for a child of this process
                self.close()
                process = self._start()
            if process is None:
                return None if len(grammar) <= UNTRIED else "there is no process in which so large a form is tried"
            used = _query_process(process, grammar)
            if not used:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            if not used or int(used) > _GROWN:
                self.close()
            return None if used else f"it takes more than a form may: {_reason(process.returncode)}"

    def close(self) -> None:
        """End the process; another starts when it is wanted."""
        self._process = None
        self._end()

    def _start(self) -> "subprocess.Popen[bytes] | None":
        try:
            import llguidance

            process = subprocess.Popen(  # noqa: S603 - this file
                [sys.executable, "-I", "-S", __file__, str(Path(llguidance.__file__).parents[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                start_new_session=True,  # signals for a group of processes are not for this one
            )
            self._end = weakref.finalize(self, _end, process)
            if not _query_process(process, {**self._vocabulary(), "most": self._most}):
                raise OSError("it ended")
        except OSError as error:
            self.close()
            if not self._has_failed:
                _log.warning("No process can be started to try forms in: %s. Large ones are refused.", error)
            self._has_failed = True
            return None
        self._process = process
        return process


def _query_process(process: "subprocess.Popen[bytes]", question: Any) -> bytes:
    """The line that it answers; empty if it ends, or must be ended, before it does."""
    stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    clock = threading.Timer(WALL_S, process.kill)
    clock.start()
    try:
        stdin.write(json.dumps(question).encode() + b"\n")
        stdin.flush()
        return stdout.readline()
    except (OSError, ValueError):  # it has ended, or was closed meanwhile
        return b""
    finally:
        clock.cancel()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()  # which leaves a parent's alone
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            cast("IO[bytes]", pipe).close()


def _reason(code: int) -> str:
    reasons = {
        "SIGPROF": f"{WORK_S:g} seconds of work",
        "SIGVTALRM": f"{TOKEN_S:g} seconds of work for a token",
        "SIGSEGV": "depth of its parts",
        "SIGBUS": "depth of its parts",
        "SIGABRT": f"{MEMORY >> 20} MB of memory",
    }
    return next((text for name, text in reasons.items() if code == -getattr(signal, name, 0)), "time or memory")


def run_on_deep_stack(work: Callable[[], T], size: int = 2 * STACK) -> T:
    """The result of ``work``, done on a thread with so many bytes of stack."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_lock:
            before = threading.stack_size(size)
            try:
                result = pool.submit(work)
            finally:
                threading.stack_size(before)
        return result.result()


# What follows runs in the process.


def _serve_queries() -> None:
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

    vocabulary = json.loads(sys.stdin.readline())
    alphabet = _Alphabet(vocabulary)
    tokenizer = LLTokenizer(TokenizerWrapper(alphabet), n_vocab=vocabulary["size"], eos_token=vocabulary["ends"])
    limits, (work_s, token_s, memory) = LLParserLimits(**vocabulary["limits"]), vocabulary["most"]
    begun = _read_memory_sizes()[1]
    print(0, flush=True)  # noqa: T201 - the parent reads it
    for line in sys.stdin:
        grammar = json.loads(line)
        _limit_memory(memory)
        _limit_work("PROF", work_s)
        with suppress(ValueError):  # what is wrong with it is said where it is compiled
            _try_grammar(grammar, tokenizer, limits, alphabet, token_s)
        _limit_work("PROF", 0)
        print(_read_memory_sizes()[1] - begun, flush=True)  # noqa: T201


class _Alphabet:
    """As many bytes as there are ids, and special tokens as they are: all that a grammar can name."""

    bos_token_id = None

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        named = {int(token): text.encode("latin-1") for token, text in vocabulary["named"].items()}
        plain = [token for token in range(vocabulary["size"]) if token not in named][:256]
        spelled = {token: bytes([byte]) for byte, token in enumerate(plain)} | named
        self.tokens = [spelled.get(token, b"") for token in range(vocabulary["size"])]
        self.special_token_ids, self.eos_token_id = sorted(named), vocabulary["ends"][0]
        self.ids = sorted(spelled.keys() - set(vocabulary["ends"]))
        self.closing = {plain[byte] for byte in b'",]}' if byte < len(plain)}  # of a value, and on to the next
        self._plain = plain

    def __call__(self, data: bytes) -> list[int]:
        return [self._plain[byte] for byte in data if byte < len(self._plain)]


def _try_grammar(grammar: str, tokenizer: Any, limits: Any, alphabet: _Alphabet, token_s: float) -> None:
    """Compile a grammar and go through some of its texts: a row of the parser may be more than all before it."""
    from llguidance import LLMatcher

    has_failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits)
    if has_failed or messages:
        return
    whole, dice = LLMatcher(tokenizer, grammar, limits=limits, log_level=0), random.Random(0)  # noqa: S311
    for _ in range(_WALKS):
        matcher = whole.deep_copy()
        for _ in range(_STEPS):
            _limit_work("VIRTUAL", token_s)
            mask = matcher.compute_bitmask()
            if matcher.is_error() or matcher.is_stopped():
                break
            forced = matcher.compute_ff_tokens()
            allowed = [token for token in alphabet.ids if mask[token >> 3] >> (token & 7) & 1]
            closing = [token for token in allowed if token in alphabet.closing and dice.random() < 0.5]
            if not forced and not allowed:
                break
            matcher.consume_tokens(forced or [dice.choice(closing or allowed)])
        _limit_work("VIRTUAL", 0)


def _limit_work(clock: str, seconds: float) -> None:
    """End this process by a signal when it has worked so long; 0: no more of that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(getattr(signal, f"ITIMER_{clock}"), seconds)


def _limit_memory(more: int) -> None:
    """Let allocations fail beyond what there is now and ``more`` bytes, where the system counts it."""
    if size := _read_memory_sizes()[0]:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(ValueError):  # the system's own limit is lower
            resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _read_memory_sizes() -> tuple[int, int]:
    """Bytes of this process: of its addresses, and in memory; 0 where the system does not say."""
    try:
        size, resident = Path("/proc/self/statm").read_text().split()[:2]
    except OSError:
        return 0, 0
    return int(size) * os.sysconf("SC_PAGE_SIZE"), int(resident) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    if hasattr(signal, "setitimer"):
        for number in (signal.SIGPROF, signal.SIGVTALRM):  # what starts a process may have set them aside
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    run_on_deep_stack(_serve_queries, STACK)
