"""What an executor or a drafter overrides is spelled as in its base class: a misspelt name would be an ability less."""

import ast
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime" / "specexport_runtime"
BASES = {"Executor": RUNTIME / "executors" / "base.py", "Drafter": RUNTIME / "drafters" / "base.py"}
NEEDED = {"Executor": {"prepare", "execute"}, "Drafter": {"propose"}}
"""What tells an executor or a drafter, whatever it inherits from."""
LOOKS_LIKE = 0.8
MEANT = {"similarity_of"}  # as it is


def heirs(base: str, classes: list[ast.ClassDef]) -> list[ast.ClassDef]:
    """Classes that inherit from ``base``, near or far; by names."""
    names, found = {base}, list[ast.ClassDef]()
    while more := [
        each for each in classes if each not in found and names & {b.id for b in each.bases if isinstance(b, ast.Name)}
    ]:
        found += more
        names |= {each.name for each in more}
    return found


def given_by(cls: ast.ClassDef) -> Iterator[str]:
    """Public names that a class has: of methods, and of attributes of the class and of its instances."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
            stored = [x for x in ast.walk(node) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
            yield from (each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def public(cls: ast.ClassDef) -> set[str]:
    return {name for name in given_by(cls) if not name.startswith("_")}


def odd_names(cls: ast.ClassDef, base: set[str], read: set[str]) -> set[str]:
    """Names of a class's own that may be meant for others: no one reads them, or they look like one of the base's."""
    own = public(cls) - base - MEANT
    return {name for name in own if name not in read or any(alike(name, each) >= LOOKS_LIKE for each in base)}


def alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def names_of(base: str) -> set[str]:
    body = ast.parse(BASES[base].read_text(encoding="utf-8")).body
    return next(public(each) for each in body if isinstance(each, ast.ClassDef) and each.name == base)


@pytest.fixture(scope="module")
def trees() -> list[ast.Module]:
    paths = [*RUNTIME.rglob("*.py"), *(ROOT / "specexport").rglob("*.py")]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


@pytest.fixture(scope="module")
def classes(trees: list[ast.Module]) -> list[ast.ClassDef]:
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@pytest.fixture(scope="module")
def read(trees: list[ast.Module]) -> set[str]:
    """Attributes that the product reads; of the fake, what its users' tests do."""
    nodes = (node for tree in trees for node in ast.walk(tree))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return found | {"calls", "masks", "resident_bytes"}


@pytest.mark.parametrize("base", BASES)
def test_what_a_class_has_is_of_its_base_or_read(base: str, classes: list[ast.ClassDef], read: set[str]) -> None:
    found = heirs(base, classes)
    assert not {each.name: names for each in found if (names := odd_names(each, names_of(base), read))}
    assert len(found) > 5


@pytest.mark.parametrize("base", BASES)
def test_none_goes_without_its_base(base: str, classes: list[ast.ClassDef]) -> None:
    known = {base, *(each.name for each in heirs(base, classes))}
    assert not [each.name for each in classes if public(each) >= NEEDED[base] and each.name not in known]


@pytest.mark.parametrize(
    "line",
    [
        "def wants_feature(self, request): ...",
        "def restarted(self, request): ...",  # a name that others have
        "def note_hidden_states(self, request, states): ...",
        "engine_second = 0.0",
        "prefil_seconds: float = 0.0",
        "def __init__(self):\n        self.trait, self.store = None, None",
    ],
)
def test_a_misspelt_name_is_found(line: str, read: set[str]) -> None:
    (cls,) = ast.parse(f"class Own(Drafter):\n    {line}\n").body
    assert len(odd_names(cls, names_of("Drafter"), read)) == 1
