"""Hatchling's hook: compiles the operators of ``runtime/operators`` into the wheel, which is one for every Python."""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST = (3, 11)


class OperatorsHook(BuildHookInterface):  # type: ignore[type-arg]
    """A wheel has the library of its platform; an editable installation has it beside the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name what was made. ``version`` is "standard" or "editable"."""
        if sys.version_info[:2] < OLDEST:  # pip asks for a wheel before it reads `requires-python`
            wanted, found = (".".join(map(str, version)) for version in (OLDEST, sys.version_info[:2]))
            self.app.abort(f"specexport needs Python {wanted} or newer, and this is {found}.")
        build = _builder(Path(self.root))
        try:
            target = build.wanted_target()
            if version == "editable":
                folder = build.PACKAGE
            else:  # may be another platform's: it must not replace the one that runs here
                self.made = tempfile.TemporaryDirectory(prefix="specexport-operators-")
                folder = Path(self.made.name)
            out = folder / build.file_name(target)
            self.app.display_info(f"compiling the CPU operators for {target}")
            build.compile_library(target, out)
        except build.BuildError as error:
            self.app.abort(f"specexport: {error}")
        if version != "editable":
            build_data["force_include"][str(out)] = f"specexport_runtime/{out.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{build.wheel_tag(target)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 hatchling's
        """Remove what the wheel has now."""
        if version != "editable":
            self.made.cleanup()


def _builder(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_operators", root / "runtime" / "operators" / "build.py")
    assert spec is not None  # noqa: S101 for the type checker
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
