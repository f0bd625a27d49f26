"""What differs between the two TensorRT packages. Everything else is one code path over the same network API.

``tensorrt-rtx`` builds on any machine for the architectures it is told, and compiles the last step on the GPU when an
engine is loaded; ``tensorrt`` times kernels on the GPU it builds for, so it builds for that one alone, and takes
plugins. Imports neither of them.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

from specexport.backends import present_gpu
from specexport.backends.base import ANY_ARCHITECTURE
from specexport_runtime.errors import IncompatibleError, MissingDependencyError, RecipeError, make_install_hint


class TrtPackage(NamedTuple):
    """One of the packages."""

    backend: str  # also the name of our extra
    module: str  # import name
    cross_builds: bool  # builds for architectures that are not in this machine


TENSORRT_RTX = TrtPackage("tensorrt-rtx", "tensorrt_rtx", cross_builds=True)
TENSORRT = TrtPackage("tensorrt", "tensorrt", cross_builds=False)
PACKAGES = {package.backend: package for package in (TENSORRT, TENSORRT_RTX)}


def import_package(package: TrtPackage) -> Any:
    """The package's module; MissingDependencyError says how to install it if it is absent or cannot be loaded."""
    hint = make_install_hint(package.backend)
    if importlib.util.find_spec(package.module) is None:
        if package is TENSORRT:
            hint += " To build without it or without a GPU, use --backend tensorrt-rtx."
        raise MissingDependencyError(
            f"--backend {package.backend} needs {package.module}, which is not installed.", hint
        )
    try:
        return importlib.import_module(package.module)
    except Exception as error:  # a missing or broken native library raises anything
        raise MissingDependencyError(f"{package.module} cannot be loaded: {error}", hint) from error


def known_architectures(package: TrtPackage) -> tuple[str, ...]:
    """Architectures that the package builds for here, such as ``("75", "80", "89")``."""
    module = import_package(package)
    if not package.cross_builds:
        present = present_gpu.query_gpu_architecture()
        return () if present is None else (present,)
    names: Sequence[str] = list(module.ComputeCapability.__members__)
    return tuple(sorted((name[2:] for name in names if name.startswith("SM")), key=int))


def resolve_architectures(package: TrtPackage, asked: Sequence[str]) -> tuple[str, ...]:
    """The architectures of ``--sm``, or the GPU's in this machine; RecipeError if there are none."""
    known = known_architectures(package)
    if not package.cross_builds and not known:
        raise IncompatibleError(
            f"--backend {package.backend} builds for the GPU in the machine, and there is none here.",
            "build where the GPU is, or use --backend tensorrt-rtx, which builds anywhere.",
        )
    chosen = tuple(asked)
    if not chosen:
        present = present_gpu.query_gpu_architecture()
        if present is None:
            raise RecipeError(
                f"there is no GPU here, and no --sm says what {package.backend} is to build for.",
                f"name one or more of {', '.join(known)} with --sm.",
            )
        if present not in known:
            raise RecipeError(
                f"this machine's GPU is sm{present}, for which {package.backend} builds no engine.",
                f"take --backend ort-cuda or tensorrt, or name others with --sm: {', '.join(known)}.",
            )
        chosen = (str(present),)
    portable = (ANY_ARCHITECTURE,) if package.cross_builds else ()
    unknown = [sm for sm in chosen if sm not in (*known, *portable)]
    if unknown:
        raise RecipeError(
            f"--sm {unknown[0]} is not an architecture that {package.backend} builds for here.",
            f"use {'one or more of ' if len(known) > 1 else ''}{', '.join(known)}.",
        )
    return chosen


def configure(trt: Any, package: TrtPackage, config: Any, sm: str, *, has_plugins: bool = False) -> None:
    """Set the architecture (``"any"``: portable) and where activations come from on an ``IBuilderConfig``."""
    if package.cross_builds and sm != ANY_ARCHITECTURE:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    # Activations come from the runtime alone, or a step could not be recorded into a CUDA graph.
    if not has_plugins:  # NVIDIA: incompatible with quickly deployable plugins
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
