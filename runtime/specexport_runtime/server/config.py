"""What a server may do, and for whom: every limit in one place, checked before anything is loaded."""

import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.chat_dialect import check_parsers

LOG_FORMATS = ("text", "json")
SCHEDULING_POLICIES = ("fcfs", "priority")
_COUNTS = ("max_body_bytes", "max_prompts", "max_n", "max_connections")
_OPTIONAL_COUNTS = ("max_prompt_tokens", "max_tokens", "max_requests_per_key")
_SECONDS = ("request_timeout_s", "body_timeout_s", "drain_timeout_s", "keep_alive_timeout_s", "stuck_after_s")
_LONGEST_S = 7 * 86400.0
_LONGEST_NAME = 256


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server; a value out of its range, or an address that needs a key, is an ``InvalidRequestError``."""

    host: str = "127.0.0.1"
    port: int = 8000  # TCP; 0 lets the system choose
    model_name: str = "specexport"  # under which the bundle is served
    # A request must carry one of them (``Authorization: Bearer``); none lets everybody in.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False  # allow an address other than loopback without a key
    # Names that the ``Host`` header may have besides those of the address itself; only looked at where no key is
    # needed.
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 2**20
    max_prompts: int = 32  # of one request
    max_n: int = 16  # most choices a prompt
    max_prompt_tokens: int | None = None  # longest prompt; None: what the engine takes
    max_tokens: int | None = None  # most tokens a choice; None: what the engine takes
    max_waiting: int = 64  # most sequences that may wait for a cache row; more are refused with 429
    # Most sequences of one key, running or waiting; more are refused with 429. None: of several keys each leaves a
    # quarter of the places in the queue to others; else no limit. Without keys all are one.
    max_requests_per_key: int | None = None
    # ``"priority"`` lets requests have one, ``"fcfs"`` does not; keys take turns with both
    scheduling_policy: str = "fcfs"
    request_timeout_s: float = 600.0  # longest that a request may take, waiting included
    body_timeout_s: float = 30.0  # longest that a client may take to send its body
    drain_timeout_s: float = 30.0  # longest that requests may go on after SIGTERM
    stuck_after_s: float = 60.0  # without a round, while requests are active, after which the engine counts as dead
    # For one more connection, the one that has rested, or sent its head, the longest is closed; else it gets 503.
    max_connections: int = 1024
    # how long a connection may rest before and between requests, as answers tell clients
    keep_alive_timeout_s: float = 75.0
    log_format: str = "text"  # ``"json"`` or ``"text"``
    playground: bool = True  # serve the page at ``/``
    tool_call_parser: str = "auto"  # format of calls of functions; ``"auto"`` finds it in the chat template
    reasoning_parser: str = "auto"  # ``"none"`` leaves what a model thinks in its text; ``"auto"`` takes it out

    def __post_init__(self) -> None:
        _check_range("--port", self.port, 0, 65535)
        _check_range("--max-waiting", self.max_waiting, 0, None)
        for name in (*_COUNTS, *_OPTIONAL_COUNTS):
            value = getattr(self, name)
            if value is not None or name in _COUNTS:
                _check_range(_flag(name), value, 1, None)
        for name in _SECONDS:
            _check_seconds(_flag(name), getattr(self, name))
        if self.log_format not in LOG_FORMATS:
            raise InvalidRequestError(f"--log-format is {self.log_format!r}.", f"give {' or '.join(LOG_FORMATS)}.")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise InvalidRequestError(
                f"--scheduling-policy is {self.scheduling_policy!r}.", f"give {' or '.join(SCHEDULING_POLICIES)}."
            )
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        _check_word("--host", self.host)
        _check_word("--model-name", self.model_name)
        for name in self.allowed_hosts:
            _check_host_name(name)
        for key in self.api_keys:
            check_key(key, "--api-key")
        self._check_reach()

    def per_key_limit(self, num_rows: int) -> int | None:
        """Most sequences of one key, if ``num_rows`` sequences run at a time; None for no limit but that of all."""
        if self.max_requests_per_key is not None or len(self.api_keys) < 2:
            return self.max_requests_per_key
        return max(1, num_rows + self.max_waiting - self.max_waiting // 4)

    def _check_reach(self) -> None:
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
    keys = list(_keys_of(lines, path))
    if not keys:
        raise InvalidRequestError(f"--api-key-file {path} has no key.", "put one key on each line.")
    return tuple(keys)


def _keys_of(lines: Iterable[str], path: Path) -> Iterable[str]:
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if key and not key.startswith("#"):
            check_key(key, f"line {number} of --api-key-file {path}")
            yield key


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def _check_range(flag: str, value: object, low: int, high: int | None) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or value < low or (high is not None and value > high):  # type: ignore[operator]
        wanted = f"an integer from {low} to {high}" if high is not None else f"an integer of {low} or more"
        raise InvalidRequestError(f"{flag} is {value!r}.", f"give {wanted}.")


def _check_seconds(flag: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value <= _LONGEST_S:  # type: ignore[arg-type,operator]
        raise InvalidRequestError(f"{flag} is {value!r}.", f"give seconds, more than 0 and at most {_LONGEST_S:.0f}.")


def _check_word(flag: str, value: str) -> None:
    if not value or len(value) > _LONGEST_NAME or not value.isprintable() or " " in value:
        raise InvalidRequestError(
            f"{flag} is {value!r}.", f"give 1 to {_LONGEST_NAME} printable characters without spaces."
        )


def _check_host_name(name: str) -> None:
    _check_word("--allowed-host", name)
    if "/" in name or "*" in name or (":" in name and not name.startswith("[")):
        raise InvalidRequestError(
            f"--allowed-host is {name!r}.", "give a host name alone, without scheme, port or wildcard."
        )
