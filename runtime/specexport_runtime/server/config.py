"""What a server may do, and for whom: every limit in one place, checked before anything is loaded."""

import ipaddress
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.chat_dialect import REASONING_PARSERS
from specexport_runtime.intake.tool_formats.families import PARSERS

_LONGEST_S = 7 * 86400.0
_LONGEST_NAME = 256

T = TypeVar("T")


def _setting(
    default: T, text: str, check: Callable[[str, Any], None] | None = None, heading: str = "Limits", choices: Any = None
) -> T:
    """A field that has a flag of ``serve``, with its help below ``heading``; ``check`` is told the flag."""
    made: T = field(default=default, metadata={"text": text, "check": check, "heading": heading, "choices": choices})
    return made


def get_flag_name(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def _make_range_check(low: int, high: int | None = None) -> Callable[[str, Any], None]:
    wanted = f"an integer from {low} to {high}" if high is not None else f"an integer of {low} or more"

    def check(flag: str, value: Any) -> None:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or value < low or (high is not None and value > high):
            raise InvalidRequestError(f"{flag} is {value!r}.", f"give {wanted}.")

    return check


def _check_seconds(flag: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value <= _LONGEST_S:
        raise InvalidRequestError(f"{flag} is {value!r}.", f"give seconds, more than 0 and at most {_LONGEST_S:.0f}.")


def _check_word(flag: str, value: str) -> None:
    if not value or len(value) > _LONGEST_NAME or not value.isprintable() or " " in value:
        raise InvalidRequestError(
            f"{flag} is {value!r}.", f"give 1 to {_LONGEST_NAME} printable characters without spaces."
        )


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server; a value out of its range, or an address that needs a key, is an ``InvalidRequestError``."""

    host: str = _setting(
        "127.0.0.1",
        "Address to bind to; other machines than this one need --api-key or --insecure.",
        _check_word,
        "Server",
    )
    port: int = _setting(8000, "TCP port; 0 takes a free one.", _make_range_check(0, 65535), "Server")
    model_name: str = "specexport"  # under which the bundle is served
    log_format: str = _setting("text", "Log lines as text or JSON.", None, "Server", ("text", "json"))
    playground: bool = _setting(True, "Serve a page to try the model at /.", None, "Server")
    # A request must carry one of them (``Authorization: Bearer``); none lets everybody in.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False  # allow an address other than loopback without a key
    # Names that the ``Host`` header may have besides those of the address itself; only looked at where no key is
    # needed.
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = _setting(2**20, "Largest request body.", _make_range_check(1))
    max_prompts: int = _setting(32, "Most prompts of a request.", _make_range_check(1))
    max_n: int = _setting(16, "Most choices of a prompt.", _make_range_check(1))
    max_prompt_tokens: int | None = _setting(
        None, "Longest prompt.  [default: what the engine takes]", _make_range_check(1)
    )
    max_tokens: int | None = _setting(
        None, "Most tokens of a choice.  [default: what the engine takes]", _make_range_check(1)
    )
    max_waiting: int = _setting(
        64, "Most sequences that wait for a cache row; more are refused with 429.", _make_range_check(0)
    )
    max_requests_per_key: int | None = _setting(
        None,
        "Most sequences of one key, running or waiting; more are refused with 429.  [default: with several keys, all "
        "but a quarter of the places in the queue]",
        _make_range_check(1),
    )  # without keys all are one
    max_connections: int = _setting(
        1024,
        "Most connections. One more closes the one that rests, or sends its head, for the longest; else it gets 503.",
        _make_range_check(1),
    )
    keep_alive_timeout_s: float = _setting(
        75.0,
        "Seconds that a connection may rest between requests; give more than the proxy in front keeps its own.",
        _check_seconds,
    )
    request_timeout_s: float = _setting(600.0, "Seconds that a request may take, waiting included.", _check_seconds)
    body_timeout_s: float = _setting(30.0, "Seconds that a client may take to send its body.", _check_seconds)
    drain_timeout_s: float = _setting(30.0, "Seconds that requests may go on after SIGTERM.", _check_seconds)
    stuck_after_s: float = _setting(
        60.0, "Seconds without a round, while requests run, until it counts as dead.", _check_seconds
    )
    scheduling_policy: str = _setting(
        "fcfs",
        "priority: requests may have one, and lower ones go first. fcfs: they may not. Keys take turns with both.",
        choices=("fcfs", "priority"),
    )
    tool_call_parser: str = _setting(
        "auto",
        "Format of calls of tools; auto finds it in the chat template, json tells of tools in a system message.",
        None,
        "Text",
        PARSERS,
    )
    reasoning_parser: str = _setting(
        "auto",
        "auto: what a model thinks comes as reasoning_content. none: it stays in the text.",
        None,
        "Text",
        REASONING_PARSERS,
    )
    thinking_budget: int | None = _setting(
        None,
        "Most tokens that the model thinks in an answer, for requests without thinking_token_budget; then its thinking "
        "is ended for it.  [default: any number]",
        _make_range_check(0),
        "Text",
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value, said = getattr(self, each.name), each.metadata
            if said.get("check") and not (value is None and each.default is None):
                said["check"](get_flag_name(each.name), value)
            if said.get("choices") and value not in said["choices"]:
                raise InvalidRequestError(
                    f"{get_flag_name(each.name)} is {value!r}.", f"give one of {', '.join(said['choices'])}."
                )
        _check_word("--model-name", self.model_name)
        for name in self.allowed_hosts:
            _check_host_name(name)
        for key in self.api_keys:
            check_key(key, "--api-key")
        self._check_exposure()

    def per_key_limit(self, num_rows: int) -> int | None:
        """Most sequences of one key, if ``num_rows`` sequences run at a time; None for no limit but that of all."""
        if self.max_requests_per_key is not None or len(self.api_keys) < 2:
            return self.max_requests_per_key
        return max(1, num_rows + self.max_waiting - self.max_waiting // 4)

    def _check_exposure(self) -> None:
        if not self.is_loopback and not self.api_keys and not self.insecure:
            raise InvalidRequestError(
                f"{self.host} can be reached by other machines, and no API key was given.",
                "give --api-key, bind to 127.0.0.1, or say --insecure if something in front of it checks who comes.",
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback_name(self.host)


def is_loopback_name(host: str) -> bool:
    """Whether a name or an address (IPv6 with or without brackets) means this machine, whatever a DNS server says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host[1:-1] if host[:1] + host[-1:] == "[]" else host).is_loopback
    except ValueError:
        return False


def check_key(key: str, where: str) -> None:
    """Refuse an API key that is empty, or has spaces or other than visible ASCII; the message names ``where`` alone."""
    if not key:
        raise InvalidRequestError(f"{where} is empty.", "give a key of visible ASCII characters, or leave it out.")
    if not all("!" <= character <= "~" for character in key):
        raise InvalidRequestError(
            f"{where} has a space or a character that is not ASCII.", "give a key of visible ASCII characters."
        )


def read_keys(path: Path) -> tuple[str, ...]:
    """Keys of a file, one a line, without empty and ``#`` lines; InvalidRequestError if there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequestError(f"--api-key-file {path} cannot be read: {reason}.", "give a readable file.") from None
    keys = list(_parse_keys(lines, path))
    if not keys:
        raise InvalidRequestError(f"--api-key-file {path} has no key.", "put one key on each line.")
    return tuple(keys)


def _parse_keys(lines: Iterable[str], path: Path) -> Iterable[str]:
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if key and not key.startswith("#"):
            check_key(key, f"line {number} of --api-key-file {path}")
            yield key


def _check_host_name(name: str) -> None:
    _check_word("--allowed-host", name)
    if "/" in name or "*" in name or (":" in name and not name.startswith("[")):
        raise InvalidRequestError(
            f"--allowed-host is {name!r}.", "give a host name alone, without scheme, port or wildcard."
        )
