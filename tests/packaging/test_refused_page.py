"""The page of refusals goes by messages: each one that it quotes is one that the code has."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "refused.md"
SOURCES = [*(ROOT / "specexport").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]


def texts() -> list[str]:
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def unknown(messages: list[str]) -> list[str]:
    """Both sides may have something put in where the other one has words."""
    known = "\n|".join(texts())
    patterns = {message: "[^|]*?".join(map(re.escape, message.split("…"))) for message in messages}
    return [message for message in messages if re.search(patterns[message], known) is None]


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    rows = re.findall(r"^\| (`.+?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)  # in the first column
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert messages
    gone = "which is not … anywhere"
    assert unknown([*messages, "which is not installed", gone]) == [gone]
