"""Servers of several models: their bundles are manifests alone, and what is opened for one is an engine of fakes."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specexport_runtime import SpecEngine
from specexport_runtime.abi import ADAPTER_IDS
from specexport_runtime.bundle.entry import AdapterEntry
from specexport_runtime.bundle.files import FileEntry
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import BundleError
from specexport_runtime.server.app import create_app
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.model_pool import ModelPool
from tests.support.cases.manifests import ENTRY, MANIFEST, write
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.serving import MAX_MODEL_LEN, Served, fake_engine

GIB = 2**30


def write_bundles(folder: Path, *names: str, adapters: Sequence[str] = ()) -> dict[str, Path]:
    """Folders of bundles that are manifests alone: a model has weights of 1 GiB, and caches of a few kilobytes."""
    files = {name: FileEntry("ef", GIB if name == "target/model.onnx" else 3) for name in MANIFEST.files}
    entry = ENTRY
    if adapters:
        entry = replace(
            ENTRY,
            adapters=tuple(AdapterEntry(name, name, "ab", 1, "chosen") for name in adapters),
            engine=replace(ENTRY.engine, inputs=(*ENTRY.engine.inputs, ADAPTER_IDS.name)),
        )
    manifest = replace(MANIFEST, models={"target": entry}, files=files, max_model_len=MAX_MODEL_LEN // 2)
    for name in names:
        (folder / name).mkdir(parents=True)
        write(folder / name, manifest.to_json())
    return {name: folder / name for name in names}


class Opened:
    """What stands in for ``SpecEngine.load``: a model's texts follow from its name.

    Attributes:
        names: of the models that were opened, in order.
        failing: names of those that cannot be.
        held: opening waits while a name is a key, until its event is set.
    """

    def __init__(self, step_seconds: float = 0.0, adapters: tuple[str, ...] = ()) -> None:
        self.names: list[str] = []
        self.failing: set[str] = set()
        self.held: dict[str, threading.Event] = {}
        self._options: dict[str, Any] = {"step_seconds": step_seconds, "adapters": adapters}

    def load(self, bundle: Path, options: EngineOptions | None = None) -> SpecEngine:
        self.names.append(bundle.name)
        if bundle.name in self.held:
            assert self.held[bundle.name].wait(HANG_S)
        if bundle.name in self.failing:
            raise BundleError(f"{bundle} is broken.", "build it again.")
        return make_model(bundle.name, **self._options)


def make_model(name: str, **options: Any) -> SpecEngine:
    """The engine of the model of a name."""
    return fake_engine(seed=sum(map(ord, name)), **options)


def make_pool(bundles: Mapping[str, Path], config: ServerConfig | None = None, **limits: Any) -> ModelPool:
    return ModelPool(bundles, config or ServerConfig(), EngineOptions(), **limits)


class ServedPool(Served):
    """A server of bundles by name; ``opened`` opens them."""

    def __init__(
        self, bundles: Mapping[str, Path], opened: Opened, config: ServerConfig | None = None, **limits: Any
    ) -> None:
        super().__init__(lambda: make_model("none"), config)
        self.opened = opened
        self._bundles, self._limits = bundles, limits
        self._patch = pytest.MonkeyPatch()

    def make_app(self) -> None:
        self._patch.setattr(SpecEngine, "load", staticmethod(self.opened.load))
        self.engine = self.pool = make_pool(self._bundles, self.config, **self._limits)
        self.app = create_app(None, self.config, self.pool)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
        super().__exit__(*error)

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self.pool.num_active)
        for state in self.pool.states:
            if state.engine is not None:
                state.engine.engine.check()

    def open_models(self) -> list[str]:
        return [state.config.model_name for state in self.pool.states if state.engine is not None]
