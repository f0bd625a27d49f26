"""Output that takes every text, whatever the encoding of the terminal or the pipe has no letters for."""

import codecs
import sys


def take_any_text() -> None:
    r"""Let standard output and standard error escape what they cannot encode, as ``\u65e5``, instead of raising.

    A stream that is said to be ASCII gets UTF-8: that is the C locale, which says nothing of the terminal, and click
    and Python's own UTF-8 mode take it so. An error handler that the user chose stays.
    """
    for stream in (sys.stdout, sys.stderr):
        change = getattr(stream, "reconfigure", None)
        if change is None:  # no stream, or none of the system's
            continue
        if stream.errors in ("strict", "surrogateescape"):
            change(errors="backslashreplace")
        if codecs.lookup(stream.encoding).name == "ascii":
            change(encoding="utf-8", errors=stream.errors)
