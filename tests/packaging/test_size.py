"""The brake on growth counts code, and fails when there is more of it than the committed file says."""

import subprocess
import sys
from pathlib import Path

from tools import size

PYTHON = (
    '"""Doc.\n\nMore."""\n\nimport os  # why\n\n# comment\n\n\ndef f():\n    """One."""\n    return """a\n\nb"""\n'
    '\n\nX = 1\n"""What it is."""\n'
)
CPP = '// one\n#include "a.h"\n\n/* two\n   three */\nint f() { return 1; }  // four\nconst char* u = "// five";\n'


def test_code_is_counted_without_comments_docstrings_and_blank_lines() -> None:
    assert size.python_lines(PYTHON) == 5
    assert size.cpp_lines(CPP) == 3
    one = "x = 1\n"
    files = {
        "specexport/bench/a.py": one, "specexport/b.py": one, "runtime/specexport_runtime/server/c.py": one,
        "runtime/operators/a.h": CPP, "tests/ops/test_a.py": one, "tools/proof/a.py": one, "hatch_build.py": one,
    }  # fmt: skip
    assert size.count(files.items()) == {
        "specexport/bench": 1, "specexport": 1, "runtime/specexport_runtime/server": 1, "runtime/operators": 3,
        "tests/ops": 1, "tools": 1,
    }  # fmt: skip


def test_more_than_the_file_says_is_an_error_until_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools" / "size.py"
    script.write_text(Path(size.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)

    assert run("--write").returncode == 0
    assert run().returncode == 0
    (tmp_path / "tools" / "more.py").write_text("x = 1\n")
    grown = run()
    assert grown.returncode == 1
    assert "+1" in grown.stdout
    assert grown.stderr.startswith("error: the code grew.")
    run("--write")
    (tmp_path / "tools" / "more.py").unlink()
    assert run().returncode == 0, "less is no error"
