import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_two_classes_of_the_product_have_one_name() -> None:
    """Who reads a class's name anywhere knows which one is meant; none is exempt, private ones neither."""
    places = defaultdict(list)
    for package in (ROOT / "runtime" / "specexport_runtime", ROOT / "specexport"):
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
