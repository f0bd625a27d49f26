"""The library of our own operators for ONNX Runtime on the CPU: found, checked, and registered with a session."""

import ctypes
import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from specexport_runtime.bundle.files import native_path
from specexport_runtime.errors import (
    MORE_MEMORY,
    IncompatibleError,
    MissingDependencyError,
    UserInputError,
    make_install_hint,
)
from specexport_runtime.machine import describe_memory_shortage, is_memory_error

KERNELS_VARIABLE = "SPECEXPORT_CPU_KERNELS"
"""Names an instruction set, for tests."""
OLDEST_ONNXRUNTIME = (1, 18)
"""The first whose threads an operator can use."""

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARY = _PACKAGE / f"_operators.{ {'darwin': 'dylib', 'win32': 'dll'}.get(sys.platform, 'so') }"
_SOURCES = _PACKAGE.parent / "operators"
_REGISTERED = "specexport.operators"


def register(options: Any) -> None:
    """Make our operators known to the ``SessionOptions`` of a session that is to be opened; again is nothing."""
    _load_library()
    _check_onnxruntime()
    try:
        options.get_session_config_entry(_REGISTERED)
    except RuntimeError:  # not set
        options.register_custom_ops_library(native_path(_LIBRARY))
        options.add_session_config_entry(_REGISTERED, "1")


def kernels() -> str:
    """The instruction set whose kernels run in this process, as ``"avx512vnni"``.

    MissingDependencyError without the library, IncompatibleError if it cannot be loaded or is older than its sources,
    UserInputError if ``SPECEXPORT_CPU_KERNELS`` names what this processor lacks.
    """
    return _text(_load_library().specexport_kernels)


def runnable_kernels() -> tuple[str, ...]:
    """All that this processor can run, slowest first. Raises as :func:`kernels`."""
    return tuple(name for name, runs in _all_kernels(_load_library()) if runs)


def function(name: str, types: list[Any]) -> Any:
    """One of the library's functions, of arguments of such types, that gives nothing. Raises as :func:`kernels`."""
    found = getattr(_load_library(), name)
    found.argtypes, found.restype = types, None
    return found


def build() -> str:
    """Of which sources the library was compiled: another arithmetic takes another time. Raises as :func:`kernels`."""
    return _text(_load_library().specexport_build)


def check_sources() -> None:
    """Refuse an editable installation's library of other sources, whatever their dates (IncompatibleError)."""
    if _has_sources() and (built := build()) != _fingerprint():
        raise IncompatibleError(
            f"{_LIBRARY} was compiled from other sources ({built}) than lie beside it.", _make_repair_hint()
        )


@functools.cache
def _load_library() -> ctypes.CDLL:
    if not _LIBRARY.is_file():
        raise MissingDependencyError(f"{_LIBRARY} is missing: it has the CPU's operators.", _make_repair_hint())
    try:
        library = ctypes.CDLL(native_path(_LIBRARY))
        built = _text(library.specexport_build)
    except (OSError, AttributeError) as error:
        if is_memory_error(error):
            needs = describe_memory_shortage(_LIBRARY.stat().st_size)
            raise IncompatibleError(f"{_LIBRARY}: {needs}.", MORE_MEMORY) from error
        raise IncompatibleError(f"{_LIBRARY} cannot be loaded ({error}).", _make_repair_hint()) from error
    if _has_sources() and _sources_are_newer() and built != _fingerprint():
        raise IncompatibleError(f"{_LIBRARY} is older than its sources in {_SOURCES}.", _make_repair_hint())
    wanted = os.environ.get(KERNELS_VARIABLE)
    if wanted and wanted != _text(library.specexport_kernels):
        names = _all_kernels(library)
        known = f"this processor runs {', '.join(name for name, runs in names if runs)}"
        what = "this processor lacks it" if wanted in dict(names) else "there is no such instruction set"
        raise UserInputError(f"{KERNELS_VARIABLE}={wanted}: {what}.", f"{known}; unset it to take the best.")
    return library


def _check_onnxruntime() -> None:
    import onnxruntime

    release = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if release < OLDEST_ONNXRUNTIME:
        oldest = ".".join(map(str, OLDEST_ONNXRUNTIME))
        raise IncompatibleError(
            f"onnxruntime {onnxruntime.__version__} is older than {oldest}, and cannot run our operators.",
            make_install_hint("cpu"),
        )


def _all_kernels(library: ctypes.CDLL) -> list[tuple[str, bool]]:
    function = library.specexport_kernels_at
    function.restype = ctypes.c_char_p
    runs = ctypes.c_int()
    found: list[tuple[str, bool]] = []
    while (name := function(len(found), ctypes.byref(runs))) is not None:
        found.append((name.decode("ascii"), bool(runs.value)))
    return found


def _text(function: Any) -> str:
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode("ascii")


def _has_sources() -> bool:
    return (_SOURCES / "build.py").is_file() and (_SOURCES / "library.cpp").is_file()


def _sources_are_newer() -> bool:
    parts = (path for path in _SOURCES.rglob("*") if path.suffix in (".cpp", ".h") or path.name == "build.py")
    return max(path.stat().st_mtime_ns for path in parts) >= _LIBRARY.stat().st_mtime_ns


def _fingerprint() -> str:
    text: str = runpy.run_path(str(_SOURCES / "build.py"))["fingerprint"]()
    return text


def _make_repair_hint() -> str:
    if _has_sources():
        return f"run `make install` in {_SOURCES.parents[1]}, or python {_SOURCES / 'build.py'}."
    return "install specexport again, with pip's --force-reinstall."
