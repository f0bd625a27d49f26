"""What documents point to is there: links, anchors, files in backticks, scripts in commands, names of the API pages."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specexport_runtime import errors

ROOT = Path(__file__).parents[2]
NOT_OURS = {"build", "dist", "engines"}
PAGES = sorted(
    [*ROOT.glob("*.md")]
    + [
        page
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name[0] != "." and folder.name not in NOT_OURS
        for page in folder.rglob("*.md")
    ]
)
PACKAGES = (ROOT / "runtime" / "specexport_runtime", ROOT / "specexport")
CODE_FOLDERS = (*PACKAGES, ROOT / "benchmarks", ROOT / "examples")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
FILE = re.compile(r"`(?P<path>[\w.*/-]*(?:\.(?:py|toml|yaml|js|css|sh|Dockerfile)|\w/))`")
SCRIPT = re.compile(r"\b(?:benchmarks|examples|tools)/[\w/]+\.py\b")
API_NAME = re.compile(r"^::: (?P<name>specexport[\w.]+)$", re.MULTILINE)
ELSEWHERE = ("vllm/", "/")
"""How paths begin that are named on purpose and are not in the repository."""


def prose_of(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> Iterator[str]:
    """Anchors of the headings, as forges make them."""
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
        count = seen.get(anchor, 0)
        seen[anchor] = count + 1
        yield f"{anchor}-{count}" if count else anchor


def broken_links(page: Path) -> list[str]:
    broken = []
    for match in LINK.finditer(CODE.sub("", prose_of(page))):
        target = match["target"]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    return broken


def exists(path: str, page: Path) -> bool:
    """Whether a path in backticks means something: from the repository, a package, the tests, or beside the page."""
    if any(next(place.glob(path), None) for place in (ROOT, *PACKAGES, ROOT / "tests", page.parent)):
        return True
    name = path.rstrip("/")
    return "/" not in name and any(next(folder.rglob(name), None) for folder in CODE_FOLDERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_files_in_backticks_and_scripts_in_commands_exist(page: Path) -> None:
    assert broken_links(page) == []
    paths = {match["path"] for match in FILE.finditer(prose_of(page))}
    assert sorted(path for path in paths if not path.startswith(ELSEWHERE) and not exists(path, page)) == []
    scripts = set(SCRIPT.findall(page.read_text(encoding="utf-8")))
    assert sorted(script for script in scripts if not (ROOT / script).is_file()) == []


@pytest.mark.parametrize("page", [page for page in PAGES if "::: specexport" in page.read_text(encoding="utf-8")])
def test_the_api_pages_name_what_there_is(page: Path) -> None:
    names = API_NAME.findall(page.read_text(encoding="utf-8"))
    assert names
    assert [name for name in names if not is_there(name)] == []


def is_there(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return bool(module and hasattr(importlib.import_module(module), attribute)) or bool(
            importlib.import_module(name)
        )
    except ImportError:
        return False


def test_the_tree_of_errors_names_every_class() -> None:
    tree = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    classes = [cls.__name__ for cls in vars(errors).values() if isinstance(cls, type)]
    assert sorted(["SpecexportError", *tree]) == sorted(classes)


def test_what_is_broken_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n\n[a](#one-two) [b](#three) [c](other.md) ![d](picture.png) [e](https://x.invalid)\n"
        "[f](page.md#one-two) [g](page.md#two)\n\n```text\n[h](nowhere.md)\n```\n"
        "`engine.py` `lost.py` `decoding/` `x/y.py`\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["#three", "other.md", "picture.png", "page.md#two"]
    assert [path for path in FILE.findall(page.read_text(encoding="utf-8")) if not exists(path, page)] == [
        "lost.py",
        "x/y.py",
    ]
