"""The error tree of specexport, shared by the compiler and the runtime.

::

    SpecexportError                   exit code 1
    ├── UserInputError                exit code 2: the caller can fix it
    │   ├── InvalidRequestError       a prompt or a sampling parameter; a ValueError too
    │   ├── RecipeError               a build flag or a recipe key
    │   ├── CheckpointError           a checkpoint that cannot be read
    │   ├── UnsupportedModelError     a model that cannot be traced exactly
    │   ├── VocabularyMismatchError   target and draft disagree on tokens
    │   ├── OutputExistsError         the output folder is in use
    │   ├── MissingDependencyError    an extra is not installed
    │   └── BundleError               a bundle part is missing or altered
    ├── IncompatibleError             exit code 3: bundle or hardware does not fit
    ├── CheckFailedError              exit code 1: a proof did not hold
    ├── EngineClosedError             exit code 1: the engine takes no more requests
    │   └── EngineDeadError           it was ended by a defect, fails again and again, or stands still
    ├── EndlessWaitError              exit code 1: waiting in this thread or process would never end
    ├── QueueFullError                exit code 1: too many requests wait; later there may be room
    │   └── OwnerLimitError           one owner has as many requests as it may have
    └── RequestFailedError            exit code 1: a request ended by an exception, which is its cause

Every message says what is wrong and where; ``hint`` says how to fix it. Commands print both on one line and no
traceback. This module imports nothing when it is loaded.
"""


class SpecexportError(Exception):
    """Root of all errors that specexport raises on purpose.

    Args:
        message: what is wrong, and where.
        hint: how to fix it, as an instruction.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} Fix: {self.hint}" if self.hint else self.message


class UserInputError(SpecexportError):
    """The caller gave something that cannot be used."""

    exit_code = 2


class InvalidRequestError(UserInputError, ValueError):
    """A prompt or a sampling parameter is out of its range."""


class RecipeError(UserInputError):
    """A build flag or a recipe key is unknown or out of its range."""


class CheckpointError(UserInputError):
    """A checkpoint is missing, empty, or in a form that is refused."""


class UnsupportedModelError(UserInputError):
    """A model cannot be traced exactly; the message names the reason."""


class VocabularyMismatchError(UserInputError):
    """Target and draft give different meanings to a token id."""


class OutputExistsError(UserInputError):
    """The output folder exists and is not empty."""


class MissingDependencyError(UserInputError):
    """An optional dependency is needed and not installed."""


class BundleError(UserInputError):
    """A bundle has a missing, altered or unreadable part."""


class IncompatibleError(SpecexportError):
    """A bundle or this machine's hardware or software does not fit the other."""

    exit_code = 3


class CheckFailedError(SpecexportError):
    """A proof (verify, contract check) did not hold."""


class EngineClosedError(SpecexportError):
    """The engine was closed, or is finishing what it has and takes no more requests."""


class EngineDeadError(EngineClosedError):
    """The engine is of no more use: a defect ended it, step after step fails, or requests wait and none ends."""


class EndlessWaitError(SpecexportError):
    """Waiting here would never end: in the decoding thread, or in a process that was forked while requests ran."""


class QueueFullError(SpecexportError):
    """More requests wait than were allowed to; the same request may be taken later."""


class OwnerLimitError(QueueFullError):
    """One owner has as many requests as it may have at a time."""


class RequestFailedError(SpecexportError):
    """A request was ended by an exception: in its callback, in its sampling, or in the engine (``__cause__``)."""


MORE_MEMORY = "end other programs, raise the limit (`ulimit -v`), or take a smaller model or `build --quantize int4`."
"""A hint for IncompatibleErrors of a machine with too little memory."""


def make_install_hint(*extras: str) -> str:
    """A hint: how to install extras of specexport, which is on no package index.

    From a clone that holds this file, its folder's command; elsewhere one for a clone and for a wheel.
    """
    from pathlib import Path

    wanted = f"[{','.join(extras)}]"
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return f"pip install -e '.{wanted}' in the clone of specexport."
    return f"pip install 'PATH{wanted}', PATH being specexport's clone or wheel."


def describe_not_installed(names: list[str]) -> str:
    """``onnx, which is not installed``, for one package or several."""
    return f"{', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not installed"


def describe_write_fault(error: OSError) -> tuple[str, str] | None:
    """What is wrong with a place that cannot be written to, and the way out; None for any other error."""
    import errno

    if error.errno == errno.EFBIG:
        return "a file would be larger than this process may write", "raise the limit (`ulimit -f`)."
    if error.errno == errno.EROFS:
        return "the disk is read-only", "write to another disk."
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ("the disk is full", "free some space, or write to another disk.") if full else None
