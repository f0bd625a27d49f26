import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"specexport": ROOT / "specexport", "specexport_runtime": ROOT / "runtime" / "specexport_runtime"}
PROMISED = {"SpecEngine", "SamplingParams"}


def every_module() -> list[str]:
    names = list(PACKAGES)
    for name, folder in PACKAGES.items():
        names += [module.name for module in pkgutil.walk_packages([str(folder)], prefix=f"{name}.")]
    return [name for name in names if not name.endswith((".__main__", "._operators"))]


def public_names(module: ModuleType) -> list[str]:
    """``__all__``, or else what the module itself defines without an underscore."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


@pytest.mark.parametrize("name", every_module())
def test_public_names_exist_and_say_what_they_are(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} has no docstring"
    names = public_names(module)
    assert len(names) == len(set(names)), f"{name}.__all__ repeats a name"
    for public in names:
        assert hasattr(module, public), f"{name}.__all__ promises {public!r}"
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert (value.__doc__ or "").strip(), f"{name}.{public} has no docstring"


def test_the_runtime_offers_what_the_readme_promises() -> None:
    runtime = importlib.import_module("specexport_runtime")
    assert set(runtime.__all__) >= PROMISED
    assert set(dir(runtime)) >= set(runtime.__all__)
