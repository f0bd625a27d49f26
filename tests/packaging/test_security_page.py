"""docs/security.md names the file and the test of everything that it says is enforced: both must exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime" / "specexport_runtime"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "security.md").read_text().split("## What is not")[0].splitlines()
    if re.match(r"\|.*\| `[^`|]+` \|$", line)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_what_is_enforced_has_a_place_and_a_test(row: list[str]) -> None:
    _, _, place, test = row
    name = place.strip("`")
    assert (ROOT if name.startswith(("specexport/", "docker/", "runtime/")) else RUNTIME).joinpath(name).exists(), place
    path, _, function = test.strip("`").partition("::")
    assert f"def {function}(" in (ROOT / "tests" / path).read_text(), test
