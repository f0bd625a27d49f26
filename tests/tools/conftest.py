import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tools are scripts, not a package that is installed

from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.rows import Recorder


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(Recorder(tmp_path / "rows.jsonl", "section"), tmp_path, 60.0)
