"""Texts in letters that the locale has not: output takes them, and the command line holds them."""

import codecs
import contextlib
import os
import sys


def escape_unencodable_output() -> None:
    r"""Let standard output and error escape what they cannot encode, as ``\u65e5``; ASCII streams get UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        change = getattr(stream, "reconfigure", None)
        if change is None:  # no stream, or none of the system's
            continue
        if stream.errors in ("strict", "surrogateescape"):
            change(errors="backslashreplace")
        if codecs.lookup(stream.encoding).name == "ascii":
            change(encoding="utf-8", errors=stream.errors)


def decode_argument(text: str) -> str:
    """A text of the command line, whose bytes the C locale takes for ASCII though they are UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        with contextlib.suppress(UnicodeError):  # refused where texts are checked
            return os.fsencode(text).decode("utf-8")
    return text
