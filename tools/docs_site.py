"""A hook of mkdocs (``mkdocs.yml``): pages outside ``docs/`` join the site, and links between files work there too.

In the repository a link names a file: that is what a reader on a forge needs. In the site README.md is the first page,
and each page of ``docs/`` lies one folder higher. So each relative link is translated; a link to a file that is no page
leads to a copy of it. Whatever leads nowhere stays as it is, and ``mkdocs build --strict`` refuses it. Code blocks lose
the notes in their first lines (``no-test: …``), which are for the tests and would not be understood, and docstrings
lose what only Sphinx would understand.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "README.md",
    *("CONTRIBUTING.md", "CHANGELOG.md", "docker/README.md", "examples/*/README.md", "tests/support/README.md"),
    *("examples/heads/cards/*.md", "benchmarks/results/*.md"),
)
"""Pages of the site that do not lie in ``docs/``."""
OPTIONS_HERE = "<!-- the engine options -->"
"""What a page has in the place of their list."""
_HOME = ("README.md", "index.md")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_NOTE = re.compile(r"^(```\w+) .*")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?")
_COLONS = re.compile(r"<p>::</p>\s*|:(?=:</p>)")
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=\))")


def outside_pages() -> list[str]:
    """Paths in the repository of the pages outside ``docs/``."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in OUTSIDE for path in ROOT.glob(pattern))


def site_path(path: str) -> str:
    """Where a file of the repository lies in the site: ``docs/x.md`` is ``x.md``, README.md is ``index.md``."""
    return _HOME[1] if path == _HOME[0] else path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """The file of the repository that a page of the site is made of: the inverse of :func:`site_path`."""
    if path == _HOME[1]:
        return _HOME[0]
    return path if path in outside_pages() else f"docs/{path}"


def find_target(link: str, page: str) -> str | None:
    """The file that a link means, as a path in the repository; None for addresses, anchors and what does not exist.

    ``page`` is the page that the link stands on, as a path in the repository.
    """
    parts = urlsplit(link)
    if parts.scheme or not parts.path or parts.path.startswith("/"):
        return None
    path = PurePosixPath(os.path.normpath(PurePosixPath(page).parent / parts.path))
    if (ROOT / path / "README.md").is_file():
        path /= "README.md"  # what a forge shows of a folder
    return path.as_posix() if (ROOT / path).is_file() else None


def translate(text: str, page: str) -> str:
    """The text of a page with links that work in the site, and code blocks without notes."""

    def replace(match: re.Match[str]) -> str:
        link = match["target"]
        target = find_target(link, page)
        if target is None:
            return link
        path = os.path.relpath(site_path(target), PurePosixPath(site_path(page)).parent)
        anchor = urlsplit(link).fragment
        return f"{path}#{anchor}" if anchor else path

    return "".join(
        _NOTE.sub(r"\1", part) if part.startswith("```") else _LINK.sub(replace, part) for part in _FENCE.split(text)
    )


def linked_files(pages: list[str]) -> Iterator[str]:
    """Files outside ``docs/`` that pages link to and that are no pages."""
    found = set()
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for part in _FENCE.split(text):
            if not part.startswith("```"):
                found |= {find_target(match["target"], page) for match in _LINK.finditer(part)}
    yield from sorted(path for path in found if path and not path.startswith("docs/") and not path.endswith(".md"))


def engine_options() -> str:
    """The options of ``SpecEngine.load`` as a list: their docstring is made when the module is imported."""
    from specexport_runtime.engine_options import OPTIONS

    return "\n".join(f"- `{name}`: {option.sentences}" for name, option in OPTIONS.items())


def plain_docstrings(html: str) -> str:
    """Docstrings without Sphinx's roles, and without the second colon before a literal block."""
    return _COLONS.sub("", _ROLE.sub("<code>", html))


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Called by mkdocs: add the pages outside ``docs/``, and copies of the files that pages link to."""
    from mkdocs.structure.files import File

    pages = [*outside_pages(), *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    for path in [*outside_pages(), *linked_files(pages)]:
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:  # noqa: ARG001
    """Called by mkdocs for each page: translate its links, and fill in lists."""
    return translate(markdown, repository_path(page.file.src_uri)).replace(OPTIONS_HERE, engine_options())


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:  # noqa: ARG001
    """Called by mkdocs for each page made: tidy the docstrings of the API pages."""
    return plain_docstrings(html) if page.file.src_uri.startswith("reference/") else html
