"""Installed versions beside the ranges that our extras name, which are those that are tested."""

from importlib.metadata import PackageNotFoundError, requires


def tested_ranges(extra: str) -> list[tuple[str, str]]:
    """Distribution and tested version range of each requirement of one of our extras, as installed."""
    try:
        lines = requires("specexport") or []
    except PackageNotFoundError:
        return []
    ranges = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        if f"'{extra}'" in marker or f'"{extra}"' in marker:
            name = requirement.strip()
            cut = min((name.find(sign) for sign in "<>=!~ (" if sign in name), default=len(name))
            ranges.append((name[:cut], name[cut:].strip(" ()")))
    return ranges


def outside_tested_range(name: str, installed: str, *, extra: str) -> str:
    """What to say of a version outside its tested range; empty if it is inside."""
    for requirement, wanted in tested_ranges(extra):
        if requirement == name and not _satisfies(installed, wanted):
            return f"{name} {installed} is outside the tested {wanted}: pip install '{name}{wanted}'."
    return ""


def _satisfies(installed: str, wanted: str) -> bool:
    """Whether a version is inside a range of ``>=`` and ``<`` clauses, the only ones our requirements use."""
    have = _release(installed)
    for clause in filter(None, wanted.split(",")):
        if clause.startswith(">=") and have < _release(clause[2:]):
            return False
        if clause.startswith("<") and not clause.startswith("<=") and have >= _release(clause[1:]):
            return False
    return True


def _release(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    while numbers and numbers[-1] == 0:  # 1.31 and 1.31.0 are the same
        numbers.pop()
    return tuple(numbers)
