"""What a server may do, and for whom: every limit in one place, checked before anything is loaded."""

import ipaddress
from dataclasses import dataclass

from specexport_runtime.errors import InvalidRequestError


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server.

    Attributes:
        host: address to bind to.
        port: TCP port; 0 lets the system choose.
        model_name: name under which the bundle is served.
        api_keys: keys of which a request must carry one (``Authorization: Bearer``); none lets everybody in.
        insecure: allow an address other than loopback without a key.
        allowed_hosts: names that the ``Host`` header may have besides those of the address itself; only looked at where
            no key is needed.
        max_body_bytes: largest request body.
        max_prompts: most prompts of one request.
        max_n: most choices a prompt.
        max_prompt_tokens: longest prompt; None: what the engine takes.
        max_tokens: most tokens a choice; None: what the engine takes.
        max_waiting: most sequences that may wait for a cache row; more are refused with 429.
        request_timeout_s: longest that a request may take, waiting included.
        body_timeout_s: longest that a client may take to send its body.
        drain_timeout_s: longest that requests may go on after SIGTERM.
        max_connections: most connections at a time; more are refused with 503.
        log_format: ``"json"`` or ``"text"``.
        playground: serve the page at ``/``.

    Raises:
        InvalidRequestError: a value is out of its range, or the address needs a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "specexport"
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 2**20
    max_prompts: int = 32
    max_n: int = 16
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_waiting: int = 64
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    max_connections: int = 1024
    log_format: str = "text"
    playground: bool = True

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.api_keys and not self.insecure:
            raise InvalidRequestError(
                f"{self.host} can be reached by other machines, and no API key was given.",
                "give --api-key, bind to 127.0.0.1, or say --insecure if something in front of it checks who comes.",
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
