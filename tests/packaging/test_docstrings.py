"""Docstrings for the people who read them: whole ones on what others call or write, one true sentence inside."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("specexport", "runtime/specexport_runtime")
SECTION = re.compile(r"^ *(Args|Arguments|Attributes|Raises|Returns|Yields):$", re.MULTILINE)


def public_files() -> set[Path]:
    """The modules whose docstrings ruff wants whole: all others stand in the one pattern that leaves `D1` out."""
    ignores = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    (pattern,) = [pattern for pattern, rules in ignores.items() if rules == ["D1"]]
    assert pattern.startswith("!{")
    assert pattern.endswith("}")
    found = {each: set(ROOT.glob(each)) for each in pattern[2:-1].split(",")}
    assert all(found.values()), [each for each, files in found.items() if not files]
    return set().union(*found.values())


def sections(path: Path) -> Iterator[str]:
    """Where a docstring of a module has a section for each argument."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if is_documented and (match := SECTION.search(ast.get_docstring(node) or "")):
            yield f"{path.relative_to(ROOT)}, {getattr(node, 'name', 'module')}: {match[1]}"


def test_only_public_modules_have_docstrings_with_sections() -> None:
    public = public_files()
    inner = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if path not in public]
    assert [each for path in sorted(inner) for each in sections(path)] == []
    assert [each for path in sorted(public) for each in sections(path)]
