"""Whether bundles can be compared by their drafts: they must have the same target, and be different ones."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

from specexport.bench.subject import Subject
from specexport_runtime.errors import InvalidRequestError

_SHOWN = 12  # characters of a hash


def name_bundles(folders: Seq[Path], subjects: Seq[Subject]) -> dict[str, Subject]:
    """The bundles by unique names: their own, or the folders as given where two have the same.

    Raises InvalidRequestError if two of them are one bundle.
    """
    for i, (folder, subject) in enumerate(zip(folders, subjects, strict=True)):
        for earlier, other in zip(folders[:i], subjects[:i], strict=True):
            if folder.resolve() == earlier.resolve() or subject.details["build_key"] == other.details["build_key"]:
                raise InvalidRequestError(f"{earlier} and {folder} are the same bundle.", "give each bundle once.")
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return dict(zip(names, subjects, strict=True))


def check_same_target(subjects: Mapping[str, Subject]) -> None:
    """Refuse bundles that do not have the target of the first: InvalidRequestError names the bundle and what differs.

    Two targets are one if checkpoint, tokenizer, backend, dtype and quantization are the same, and the engine file too.
    TensorRT times its kernels while it builds, so that two builds of one model may differ: there the file may. It may
    too where a target gives features to a head, which nothing else in it depends on.
    """
    first, *others = subjects.items()
    wanted = _identity(first[1])
    for name, subject in others:
        found = _identity(subject)
        different = [what for what in wanted if found[what].differs(wanted[what])]
        if different[1:] and different[-1] == "engine file":
            different.pop()  # it follows from the others
        if different:
            parts = [f"{what} {found[what].shown} instead of {wanted[what].shown}" for what in different]
            raise InvalidRequestError(
                f"{name} has another target than {first[0]}: {', '.join(parts)}.",
                "compare bundles of one target, built alike but for the draft.",
            )


class _Part(NamedTuple):
    value: Any
    shown: str
    varies: bool = False  # with what is not the target's own

    def differs(self, other: "_Part") -> bool:
        return self.value != other.value and not (self.varies or other.varies)


def _identity(subject: Subject) -> dict[str, _Part]:
    details = subject.details
    target = details["models"]["target"]
    checkpoint, tokenizer, engine = target["source_sha256"], details["tokenizer_sha256"], target["engine_sha256"]
    return {
        "checkpoint": _Part(checkpoint, f"{target['source']} ({checkpoint[:_SHOWN]})"),
        "tokenizer": _Part(tokenizer, tokenizer[:_SHOWN]),
        "backend": _Part(target["backend"], target["backend"]),
        "dtype": _Part(target["dtype"], target["dtype"]),
        "quantization": _Part(target["quantize"], target["quantize"] or "none"),
        "engine file": _Part(
            engine, str(engine)[:_SHOWN], varies=bool(target["built_for"] or target.get("feature_size"))
        ),
    }
