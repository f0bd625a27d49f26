"""The brake on growth: lines of code of each package, of tests and of tools, against those in ``tools/size.txt``.

A line of code holds more than a comment, a docstring or nothing. More lines than the file says are an error; whoever
needs them writes the file anew and commits it with the change, where a reader sees what it costs.

    .venv/bin/python tools/size.py                 # compare; exit code 1 if something grew
    .venv/bin/python tools/size.py --write         # the numbers of this tree
    .venv/bin/python tools/size.py --since main~5  # what changed since a commit
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = "tools/size.txt"
CPP = (".cpp", ".h")
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\")", re.DOTALL)


def python_lines(source: str) -> int:
    """Lines of Python that are not blank, hold more than a comment, and are in no docstring."""
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.strip() and line.lstrip()[0] != "#"}
    for node in ast.walk(ast.parse(source)):
        # Texts that stand alone: docstrings, and those of attributes.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def cpp_lines(source: str) -> int:
    """Lines of C++ that hold code."""
    code = _CPP_COMMENT.sub(lambda match: match[1] or "", source)
    return sum(bool(line.strip()) for line in code.splitlines())


def package_of(path: str) -> str | None:
    """What a file counts for: a package and the folder in it, a folder of tests, or a folder of scripts."""
    top, *inner = path.split("/")
    if top in ("tools", "benchmarks", "examples"):
        return top
    if top not in ("specexport", "runtime", "tests") or not inner:
        return None
    depth = 3 if inner[0] == "specexport_runtime" else 2
    return "/".join(path.split("/")[:-1][:depth])


def count(files: Iterable[tuple[str, str]]) -> Counter[str]:
    """Lines of code by package of files, each a path and its text."""
    sizes: Counter[str] = Counter()
    for path, text in files:
        if package := package_of(path):
            sizes[package] += python_lines(text) if path.endswith(".py") else cpp_lines(text)
    return sizes


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _is_code(path: str) -> bool:
    return path.endswith((".py", *CPP))


def of_tree() -> Counter[str]:
    """Of this tree: files that git tracks, and new ones that it does not ignore."""
    names = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    paths = [name for name in names if _is_code(name) and (ROOT / name).is_file()]
    return count((name, (ROOT / name).read_text(encoding="utf-8")) for name in paths)


def of_commit(revision: str) -> Counter[str]:
    """Of a commit."""
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=False, capture_output=True).stdout
    if not packed:
        sys.exit(f"error: there is no commit {revision}. Fix: give one that `git log` names.")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = [(each.name, archive.extractfile(each)) for each in archive if _is_code(each.name)]
        return count((name, file.read().decode()) for name, file in files if file and package_of(name))


def read_limits(text: str) -> dict[str, int]:
    """The numbers of the file."""
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {package: int(number) for package, number in rows}


def changes(sizes: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    """How many lines more each package has than in ``others``, without those of which both have as many."""
    names = sorted({*sizes, *others})
    return {name: change for name in names if (change := sizes.get(name, 0) - others.get(name, 0))}


def main() -> int:
    """Compare, print the difference, and say how to go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {LIMITS}")
    parser.add_argument("--since", metavar="REV", help="print what changed since a commit, and compare nothing")
    given = parser.parse_args()
    sizes = of_tree()
    if given.write:
        rows = "".join(f"{name} {number}\n" for name, number in sorted(sizes.items()))
        (ROOT / LIMITS).write_text(f"# Lines of code, at most: tools/size.py --write\n{rows}", encoding="utf-8")
    known = (ROOT / LIMITS).read_text(encoding="utf-8") if (ROOT / LIMITS).is_file() else ""
    others = of_commit(given.since) if given.since else read_limits(known)
    found = changes(sizes, others)
    for name, change in found.items():
        print(f"{name}: {sizes.get(name, 0):,} lines of code, {change:+,}")
    product = sum(number for name, number in sizes.items() if name.startswith(("specexport", "runtime")))
    tests = sum(number for name, number in sizes.items() if name.startswith("tests"))
    print(f"size: product {product:,}, tests {tests:,}, {sum(found.values()):+,} against {given.since or LIMITS}")
    if given.since or not any(change > 0 for change in found.values()):
        return 0
    print(
        f"error: the code grew. Fix: remove as much elsewhere in the package, or `{Path(sys.argv[0]).name} --write` "
        f"and commit {LIMITS} with the change.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
