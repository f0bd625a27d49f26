"""One more engine option, one more field of a manifest: a line each, and it is everywhere.

A field that counts in a release also raises ``manifest.SCHEMA_VERSION``: a manifest without it is refused.
"""

from pathlib import Path

from tests.support.cases.edited_copy import changed_lines, copy_runtime, edit, run_with

OPTION = """
import json
from click.testing import CliRunner
from specexport_runtime.cli.command import generate
from specexport_runtime.cli.serve import serve
from specexport_runtime.engine_options import EngineOptions, make_options
from specexport_runtime.errors import InvalidRequestError
found = {"changed": make_options(None, {"toy": 3}).toy, "documented": "toy: A toy." in EngineOptions.__doc__}
for command in (generate, serve):
    found[command.name] = "--toy" in CliRunner().invoke(command, ["--help"]).output
try:
    EngineOptions(toy=9)
except InvalidRequestError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""
FIELD = """
import json, sys
from pathlib import Path
from specexport_runtime.bundle.manifest import _digest, load_manifest
from specexport_runtime.errors import SpecexportError
path = Path(sys.argv[1]) / "manifest.json"
data = json.loads(path.read_text())
found = {}
for given in (None, "new", 5):
    for entry in data["models"].values():
        entry["source"] = entry["source"] | ({} if given is None else {"toy": given})
    data["manifest_sha256"] = _digest(data)
    path.write_text(json.dumps(data))
    try:
        manifest = load_manifest(path.parent)
        again = manifest.to_json()["models"]["target"]["source"]["toy"]
        found[str(given)] = [manifest.models["target"].source.toy, again]
    except SpecexportError as error:
        found[str(given)] = str(error)
print(json.dumps(found))
"""


def test_an_engine_option_is_one_line(tmp_path: Path) -> None:
    package = copy_runtime(tmp_path)
    first = "    max_num_seqs: int | None = _option(\n"
    line = '    toy: int = _option(1, "A toy.", use=Use.ANY, check=_within(0, 4))\n'
    edit(package / "engine_options.py", {first: line + first})
    assert changed_lines(tmp_path) == {"specexport_runtime/engine_options.py": 1}
    found = run_with(package, OPTION)
    refused = found.pop("refused")
    assert found == {"changed": 3, "documented": True, "generate": True, "serve": True}
    assert refused.startswith("toy is 9.")


def test_a_field_of_the_manifest_is_one_line(tmp_path: Path, demo_bundle: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_bytes((demo_bundle / "manifest.json").read_bytes())
    package = copy_runtime(tmp_path / "sources")
    last = "    architecture: str  # model class name\n"
    edit(package / "bundle" / "entry.py", {last: last + "    toy: str\n"})
    assert changed_lines(tmp_path / "sources") == {"specexport_runtime/bundle/entry.py": 1}
    found = run_with(package, FIELD, bundle)
    assert found["new"] == ["new", "new"], "read, and written again"
    assert "toy" in found["None"], "a manifest without it is of an earlier schema"
    assert "source.toy is 5, not a text" in found["5"]
